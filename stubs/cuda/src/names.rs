//! The names of all functions of the interface, by the module of `calls` that has them.

/// Expands a macro with the functions that do something, by module.
macro_rules! with_supported_names {
    ($expand:ident) => {
        $expand! {
            context {
                cuCtxGetApiVersion cuCtxGetCurrent cuCtxGetDevice cuCtxGetFlags
                cuCtxGetStreamPriorityRange cuCtxPopCurrent_v2 cuCtxPushCurrent_v2 cuCtxSetCurrent
                cuCtxSetFlags cuCtxSynchronize cuDevicePrimaryCtxGetState
                cuDevicePrimaryCtxRelease_v2 cuDevicePrimaryCtxRetain cuDevicePrimaryCtxSetFlags_v2
            }
            copy {
                cuMemcpy cuMemcpyAsync cuMemcpyDtoDAsync_v2 cuMemcpyDtoD_v2 cuMemcpyDtoHAsync_v2
                cuMemcpyDtoH_v2 cuMemcpyHtoDAsync_v2 cuMemcpyHtoD_v2 cuMemcpyPeerAsync
                cuMemsetD8Async cuMemsetD8_v2
            }
            device {
                cuDeviceGet cuDeviceGetAttribute cuDeviceGetCount cuDeviceGetName
                cuDeviceGetPCIBusId cuDeviceGetUuid cuDeviceGetUuid_v2 cuDeviceTotalMem_v2
            }
            event {
                cuEventCreate cuEventDestroy_v2 cuEventElapsedTime cuEventElapsedTime_v2
                cuEventQuery cuEventRecord cuEventRecordWithFlags cuEventSynchronize
            }
            library {
                cuDriverGetVersion cuGetErrorName cuGetErrorString cuInit
            }
            lookup {
                cuGetProcAddress cuGetProcAddress_v2
            }
            memory {
                cuMemAllocAsync cuMemAllocHost_v2 cuMemAlloc_v2 cuMemFreeAsync cuMemFreeHost
                cuMemFree_v2 cuMemGetAddressRange_v2 cuMemGetInfo_v2 cuMemHostAlloc
                cuMemHostGetDevicePointer_v2 cuMemHostRegister_v2 cuMemHostUnregister
                cuPointerGetAttribute
            }
            module {
                cuLaunchKernel cuModuleGetFunction cuModuleLoadData cuModuleUnload
            }
            stream {
                cuStreamCreate cuStreamCreateWithPriority cuStreamDestroy_v2 cuStreamGetCtx
                cuStreamGetFlags cuStreamGetPriority cuStreamIsCapturing cuStreamQuery
                cuStreamSynchronize cuStreamWaitEvent cuThreadExchangeStreamCaptureMode
            }
        }
    };
}
pub(crate) use with_supported_names;

/// Expands a macro with the functions that only report that they are not supported. Bindings look them up, and no
/// test needs them.
macro_rules! with_unsupported_names {
    ($expand:ident) => {
        $expand! {
            unsupported {
                cuCtxCreate_v3 cuCtxCreate_v4 cuCtxDestroy_v2 cuCtxFromGreenCtx cuCtxGetCacheConfig
                cuCtxGetLimit cuCtxSetCacheConfig cuCtxSetLimit cuDestroyExternalMemory
                cuDevResourceGenerateDesc cuDevSmResourceSplitByCount cuDeviceCanAccessPeer
                cuDeviceGetByPCIBusId cuDeviceGetDefaultMemPool cuDeviceGetDevResource
                cuDeviceGetMemPool cuDeviceSetMemPool cuExternalMemoryGetMappedBuffer
                cuFuncGetAttribute cuFuncSetAttribute cuFuncSetCacheConfig cuGraphDestroy
                cuGraphExecDestroy cuGraphInstantiateWithFlags cuGraphLaunch cuGraphUpload
                cuGreenCtxCreate cuGreenCtxDestroy cuGreenCtxStreamCreate cuImportExternalMemory
                cuLaunchCooperativeKernel cuLaunchHostFunc cuLinkAddData_v2
                cuLinkComplete cuLinkCreate_v2 cuLogsRegisterCallback cuLogsUnregisterCallback
                cuMemAddressFree cuMemAddressReserve cuMemAdvise_v2 cuMemAllocFromPoolAsync
                cuMemAllocManaged cuMemCreate cuMemExportToShareableHandle
                cuMemGetAllocationGranularity cuMemGetAllocationPropertiesFromHandle
                cuMemHostGetFlags cuMemImportFromShareableHandle cuMemMap cuMemPoolCreate
                cuMemPoolDestroy cuMemPoolGetAttribute cuMemPoolSetAttribute cuMemPoolTrimTo
                cuMemPrefetchAsync_v2 cuMemRelease cuMemRetainAllocationHandle cuMemSetAccess
                cuMemUnmap cuMemsetD32Async cuModuleGetGlobal_v2
                cuModuleGetLoadingMode cuModuleLoad cuModuleLoadDataEx
                cuMulticastAddDevice cuMulticastBindMem cuMulticastCreate
                cuMulticastUnbind cuOccupancyAvailableDynamicSMemPerBlock
                cuOccupancyMaxActiveBlocksPerMultiprocessor
                cuOccupancyMaxActiveBlocksPerMultiprocessorWithFlags cuOccupancyMaxActiveClusters
                cuOccupancyMaxPotentialBlockSize cuOccupancyMaxPotentialBlockSizeWithFlags
                cuOccupancyMaxPotentialClusterSize cuPointerGetAttributes cuProfilerStart
                cuProfilerStop cuStreamAttachMemAsync cuStreamBeginCapture_v2 cuStreamEndCapture
                cuStreamWriteValue32 cuTensorMapEncodeTiled
            }
        }
    };
}
pub(crate) use with_unsupported_names;

/// Whether the interface has a function of this name.
pub fn is_known(name: &str) -> bool {
    macro_rules! list {
        ($($module:ident { $($name:ident)* })*) => { [$($(stringify!($name)),*),*] };
    }
    with_supported_names!(list).contains(&name) || with_unsupported_names!(list).contains(&name)
}
