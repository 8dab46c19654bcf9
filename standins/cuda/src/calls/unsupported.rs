//! Functions that bindings name and that no test needs: they are there, and answer that there is no such
//! thing here.

use crate::codes::{self, Code};
use crate::driver::{Needs, call};

macro_rules! unsupported {
    ($($name:ident)*) => {
        $(
            /// Not supported.
            #[unsafe(no_mangle)]
            pub extern "C" fn $name() -> Code {
                call(stringify!($name), Needs::Nothing, |_| Err(codes::NOT_SUPPORTED))
            }
        )*

        super::table![$($name),*];
    };
}

unsupported! {
cuCtxCreate_v3 cuCtxCreate_v4 cuCtxDestroy_v2 cuCtxGetCacheConfig cuCtxGetLimit
cuCtxSetCacheConfig cuCtxSetLimit cuDestroyExternalMemory cuDeviceCanAccessPeer
cuDeviceGetByPCIBusId cuDeviceGetDefaultMemPool cuDeviceGetMemPool cuDeviceSetMemPool
cuExternalMemoryGetMappedBuffer cuFuncGetAttribute cuFuncSetAttribute cuFuncSetCacheConfig
cuGraphDestroy cuGraphExecDestroy cuGraphInstantiateWithFlags cuGraphLaunch cuGraphUpload
cuImportExternalMemory cuLaunchCooperativeKernel cuLaunchHostFunc cuLaunchKernel cuMemAdvise_v2
cuMemAllocFromPoolAsync cuMemAllocManaged cuMemHostGetFlags cuMemPoolCreate cuMemPoolDestroy
cuMemPoolGetAttribute cuMemPoolSetAttribute cuMemPoolTrimTo cuMemPrefetchAsync_v2
cuMemcpyPeerAsync cuModuleGetFunction cuModuleGetGlobal_v2 cuModuleGetLoadingMode cuModuleLoad
cuModuleLoadData cuModuleUnload cuOccupancyAvailableDynamicSMemPerBlock
cuOccupancyMaxActiveBlocksPerMultiprocessor
cuOccupancyMaxActiveBlocksPerMultiprocessorWithFlags cuOccupancyMaxActiveClusters
cuOccupancyMaxPotentialBlockSize cuOccupancyMaxPotentialBlockSizeWithFlags
cuOccupancyMaxPotentialClusterSize cuPointerGetAttributes cuProfilerStart cuProfilerStop
cuStreamAttachMemAsync cuStreamBeginCapture_v2 cuStreamEndCapture}
