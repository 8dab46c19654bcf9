//! Functions that PyTorch's libraries look up and the stubs do not support. They read none of their arguments.

use crate::answers::answer;
use crate::codes::{self, Code};

macro_rules! unsupported {
    ($($name:ident)*) => {$(
        /// Fails with "not supported".
        #[unsafe(no_mangle)]
        pub extern "C" fn $name() -> Code {
            answer(|| Err(codes::NOT_SUPPORTED))
        }
    )*};
}

unsupported! {
    cudaDeviceEnablePeerAccess cudaDeviceGetDefaultMemPool cudaDeviceGetGraphMemAttribute
    cudaDeviceSetGraphMemAttribute cudaFreeAsync cudaFuncGetAttributes cudaFuncSetAttribute
    cudaGetSymbolAddress cudaGraphAddNode cudaGraphConditionalHandleCreate cudaGraphDestroy
    cudaGraphExecDestroy cudaGraphGetNodes cudaGraphInstantiate cudaGraphInstantiateWithFlags
    cudaGraphLaunch cudaGraphNodeGetDependencies cudaGraphRetainUserObject cudaIpcCloseMemHandle
    cudaIpcGetEventHandle cudaIpcGetMemHandle cudaIpcOpenEventHandle cudaIpcOpenMemHandle
    cudaKernelSetAttributeForDevice cudaLaunchHostFunc cudaLibraryGetGlobal cudaLibraryGetKernel
    cudaLibraryGetKernelCount cudaLibraryGetManaged cudaLibraryGetUnifiedFunction
    cudaLibraryLoadData cudaLibraryLoadFromFile cudaLibraryUnload cudaMallocAsync cudaMallocManaged
    cudaMemPoolGetAttribute cudaMemPoolSetAccess cudaMemPoolSetAttribute cudaMemPoolTrimTo
    cudaMemcpy2DAsync cudaMemcpyToSymbol cudaOccupancyMaxActiveBlocksPerMultiprocessor
    cudaOccupancyMaxActiveBlocksPerMultiprocessorWithFlags cudaProfilerStart cudaProfilerStop
    cudaStreamAddCallback cudaStreamBeginCapture cudaStreamBeginCaptureToGraph cudaStreamEndCapture
    cudaStreamUpdateCaptureDependencies cudaUserObjectCreate cudaUserObjectRelease
}
