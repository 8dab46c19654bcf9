//! Streams of a device, which do work in order, and events, which mark a point in that work.

#![allow(unsafe_code)]

use std::ffi::c_void;
use std::sync::Arc;

use cudarc::driver::{result, sys};

use super::driver::{Device, DriverHandle};
use super::error::CudaError;

/// A queue of work for a device.
#[derive(Debug)]
pub struct CudaStream {
    device: Arc<Device>,
    stream: DriverHandle<sys::CUstream>,
    is_owned: bool,
}

impl CudaStream {
    /// A new stream, which does not wait for the device's default stream.
    pub fn create(device: &Arc<Device>) -> Result<CudaStream, CudaError> {
        let _context = device.enter()?;
        let stream = result::stream::create(result::stream::StreamKind::NonBlocking)
            .map_err(|e| device.driver_error("cuStreamCreate", e))?;
        Ok(CudaStream { device: Arc::clone(device), stream: DriverHandle(stream), is_owned: true })
    }

    /// A stream of another library by its handle, such as torch's `cuda_stream`; 0 is the device's default stream.
    ///
    /// # Safety
    ///
    /// It must be a stream of this device, and exist as long as this value.
    pub unsafe fn from_raw(device: &Arc<Device>, handle: usize) -> CudaStream {
        let stream = DriverHandle(handle as sys::CUstream);
        CudaStream { device: Arc::clone(device), stream, is_owned: false }
    }

    /// The device of the stream.
    pub fn device(&self) -> &Arc<Device> {
        &self.device
    }

    /// Records an event behind all work that was queued so far.
    pub fn record_event(&self) -> Result<CudaEvent, CudaError> {
        let _context = self.device.enter()?;
        let event = CudaEvent::create(&self.device)?;
        // SAFETY: both exist.
        unsafe { result::event::record(event.event.0, self.stream.0) }
            .map_err(|e| self.device.driver_error("cuEventRecord", e))?;
        Ok(event)
    }

    /// Makes all work that is queued from now on wait for an event. The host does not wait.
    pub fn wait_event(&self, event: &CudaEvent) -> Result<(), CudaError> {
        let _context = self.device.enter()?;
        let flags = sys::CUevent_wait_flags::CU_EVENT_WAIT_DEFAULT;
        // SAFETY: both exist; the driver keeps what it needs of the event.
        unsafe { result::stream::wait_event(self.stream.0, event.event.0, flags) }
            .map_err(|e| self.device.driver_error("cuStreamWaitEvent", e))
    }

    /// Whether all queued work is done. Never waits.
    pub(super) fn is_idle(&self) -> bool {
        let Ok(_context) = self.device.enter() else { return false };
        // SAFETY: the stream exists.
        unsafe { sys::cuStreamQuery(self.stream.0) }.result().is_ok()
    }

    /// Waits until all queued work is done.
    pub fn synchronize(&self) -> Result<(), CudaError> {
        let _context = self.device.enter()?;
        // SAFETY: the stream exists.
        unsafe { result::stream::synchronize(self.stream.0) }
            .map_err(|e| self.device.driver_error("cuStreamSynchronize", e))
    }

    /// Queues a copy of bytes of a chunk to an address on the device. Until it is done the chunk must stay as it
    /// is: the caller records an event, and adds it to the chunk's pending copies (`ChunkLease::copy_out`).
    ///
    /// # Safety
    ///
    /// As many bytes at that address must belong to the caller until the copy is done.
    pub(super) unsafe fn copy_from_host(&self, from: &[u8], to: u64) -> Result<(), CudaError> {
        let _context = self.device.enter()?;
        // SAFETY: the caller guarantees the address; the bytes belong to a chunk, which waits for the event.
        unsafe { result::memcpy_htod_async(to, from, self.stream.0) }
            .map_err(|e| self.device.driver_error("cuMemcpyHtoDAsync", e))
    }

    /// Queues a copy out of a chunk on the device.
    ///
    /// # Safety
    ///
    /// `len` bytes at both addresses, of this device, must belong to the caller until the copy is done.
    pub(super) unsafe fn copy_on_device(
        &self,
        from: u64,
        len: usize,
        to: u64,
    ) -> Result<(), CudaError> {
        let _context = self.device.enter()?;
        // SAFETY: the caller guarantees both addresses.
        unsafe { result::memcpy_dtod_async(to, from, len, self.stream.0) }
            .map_err(|e| self.device.driver_error("cuMemcpyDtoDAsync", e))
    }

    /// Queues a kernel.
    ///
    /// # Safety
    ///
    /// It must be a kernel of this device that takes these parameters. What it reads and writes must stay until it is done.
    pub(super) unsafe fn launch(
        &self,
        kernel: DriverHandle<sys::CUfunction>,
        block_count: u32,
        threads_per_block: u32,
        params: &mut [*mut c_void],
    ) -> Result<(), CudaError> {
        let _context = self.device.enter()?;
        let (grid, block) = ((block_count, 1, 1), (threads_per_block, 1, 1));
        // SAFETY: the caller guarantees the kernel, its parameters and the memory.
        unsafe { result::launch_kernel(kernel.0, grid, block, 0, self.stream.0, params) }
            .map_err(|e| self.device.driver_error("cuLaunchKernel", e))
    }
}

impl Drop for CudaStream {
    fn drop(&mut self) {
        if self.is_owned
            && let Ok(_context) = self.device.enter()
        {
            // SAFETY: it was created here and has no other owner. The driver finishes its work.
            let _ = unsafe { result::stream::destroy(self.stream.0) };
        }
    }
}

/// A point in the work of a stream.
#[derive(Debug)]
pub struct CudaEvent {
    device: Arc<Device>,
    event: DriverHandle<sys::CUevent>,
}

impl CudaEvent {
    /// Needs the context of the device to be current.
    fn create(device: &Arc<Device>) -> Result<CudaEvent, CudaError> {
        let event = result::event::create(sys::CUevent_flags::CU_EVENT_DISABLE_TIMING)
            .map_err(|e| device.driver_error("cuEventCreate", e))?;
        Ok(CudaEvent { device: Arc::clone(device), event: DriverHandle(event) })
    }

    /// Whether the work before it is done. Never waits.
    pub fn is_done(&self) -> Result<bool, CudaError> {
        let _context = self.device.enter()?;
        // SAFETY: the event exists.
        match unsafe { result::event::query(self.event.0) } {
            Ok(()) => Ok(true),
            Err(e) if e.0 == sys::CUresult::CUDA_ERROR_NOT_READY => Ok(false),
            Err(e) => Err(self.device.driver_error("cuEventQuery", e)),
        }
    }

    /// Waits until the work before it is done.
    pub fn wait(&self) -> Result<(), CudaError> {
        let _context = self.device.enter()?;
        // SAFETY: the event exists.
        unsafe { result::event::synchronize(self.event.0) }
            .map_err(|e| self.device.driver_error("cuEventSynchronize", e))
    }
}

impl Drop for CudaEvent {
    fn drop(&mut self) {
        if let Ok(_context) = self.device.enter() {
            // SAFETY: it was created here and has no other owner.
            let _ = unsafe { result::event::destroy(self.event.0) };
        }
    }
}
