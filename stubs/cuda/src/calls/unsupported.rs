//! Functions that bindings look up and no test needs: they exist, and report that they are not supported.

use crate::codes::{self, Code};
use crate::driver::{Needs, call};

macro_rules! unsupported {
    ($($name:ident)*) => {
        $(
            /// Fails with `NOT_SUPPORTED`.
            #[unsafe(no_mangle)]
            pub extern "C" fn $name() -> Code {
                call(stringify!($name), Needs::Nothing, |_| Err(codes::NOT_SUPPORTED))
            }
        )*

        super::table![$($name),*];
    };
}

unsupported! {
cuCtxCreate_v3 cuCtxCreate_v4 cuCtxDestroy_v2 cuCtxFromGreenCtx cuCtxGetCacheConfig
cuCtxGetLimit cuCtxSetCacheConfig cuCtxSetLimit cuDestroyExternalMemory
cuDevResourceGenerateDesc cuDevSmResourceSplitByCount cuDeviceCanAccessPeer
cuDeviceGetByPCIBusId cuDeviceGetDefaultMemPool cuDeviceGetDevResource cuDeviceGetMemPool
cuDeviceSetMemPool cuExternalMemoryGetMappedBuffer cuFuncGetAttribute cuFuncSetAttribute
cuFuncSetCacheConfig cuGraphDestroy cuGraphExecDestroy cuGraphInstantiateWithFlags
cuGraphLaunch cuGraphUpload cuGreenCtxCreate cuGreenCtxDestroy cuGreenCtxStreamCreate
cuImportExternalMemory cuLaunchCooperativeKernel cuLaunchHostFunc cuLaunchKernel
cuLinkAddData_v2 cuLinkComplete cuLinkCreate_v2 cuLogsRegisterCallback cuLogsUnregisterCallback
cuMemAddressFree cuMemAddressReserve cuMemAdvise_v2 cuMemAllocFromPoolAsync cuMemAllocManaged
cuMemCreate cuMemExportToShareableHandle cuMemGetAllocationGranularity
cuMemGetAllocationPropertiesFromHandle cuMemHostGetFlags cuMemImportFromShareableHandle
cuMemMap cuMemPoolCreate cuMemPoolDestroy cuMemPoolGetAttribute cuMemPoolSetAttribute
cuMemPoolTrimTo cuMemPrefetchAsync_v2 cuMemRelease cuMemRetainAllocationHandle cuMemSetAccess
cuMemUnmap cuMemsetD32Async cuModuleGetFunction cuModuleGetGlobal_v2 cuModuleGetLoadingMode
cuModuleLoad cuModuleLoadData cuModuleLoadDataEx cuModuleUnload cuMulticastAddDevice
cuMulticastBindMem cuMulticastCreate cuMulticastUnbind cuOccupancyAvailableDynamicSMemPerBlock
cuOccupancyMaxActiveBlocksPerMultiprocessor
cuOccupancyMaxActiveBlocksPerMultiprocessorWithFlags cuOccupancyMaxActiveClusters
cuOccupancyMaxPotentialBlockSize cuOccupancyMaxPotentialBlockSizeWithFlags
cuOccupancyMaxPotentialClusterSize cuPointerGetAttributes cuProfilerStart cuProfilerStop
cuStreamAttachMemAsync cuStreamBeginCapture_v2 cuStreamEndCapture cuStreamWriteValue32
cuTensorMapEncodeTiled
}
