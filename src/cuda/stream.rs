//! Work for a device, and points in it to wait for.
//!
//! In: copies out of pinned memory, and events of other streams. Out: events.

#![allow(unsafe_code)]

use std::sync::Arc;

use cudarc::driver::{result, sys};

use super::CudaError;
use super::driver::{Device, DriverHandle};

impl Device {
    /// A stream of its own, which waits for no other that it is not told to.
    pub fn create_stream(self: &Arc<Self>) -> Result<CudaStream, CudaError> {
        let _entered = self.enter()?;
        let stream = result::stream::create(result::stream::StreamKind::NonBlocking)
            .map_err(|e| self.driver_error("cuStreamCreate", e))?;
        Ok(CudaStream { device: Arc::clone(self), stream: DriverHandle(stream), is_owned: true })
    }

    /// Somebody else's stream, by its handle as a number: torch's `cuda_stream`; 0 is the device's default.
    ///
    /// # Safety
    ///
    /// It must be a stream of this device, and live as long as this is used.
    pub unsafe fn stream_from_raw(self: &Arc<Self>, handle: usize) -> CudaStream {
        let stream = DriverHandle(handle as sys::CUstream);
        CudaStream { device: Arc::clone(self), stream, is_owned: false }
    }

    fn create_event(self: &Arc<Self>) -> Result<CudaEvent, CudaError> {
        let event = result::event::create(sys::CUevent_flags::CU_EVENT_DISABLE_TIMING)
            .map_err(|e| self.driver_error("cuEventCreate", e))?;
        Ok(CudaEvent { device: Arc::clone(self), event: DriverHandle(event) })
    }
}

/// Work for a device, done in the order in which it was given.
#[derive(Debug)]
pub struct CudaStream {
    device: Arc<Device>,
    stream: DriverHandle<sys::CUstream>,
    is_owned: bool,
}

impl CudaStream {
    /// Its device.
    pub fn device(&self) -> &Arc<Device> {
        &self.device
    }

    /// What it was given so far, as an event.
    pub fn record_event(&self) -> Result<CudaEvent, CudaError> {
        let _entered = self.device.enter()?;
        let event = self.device.create_event()?;
        // SAFETY: both live here.
        unsafe { result::event::record(event.event.0, self.stream.0) }
            .map_err(|e| self.device.driver_error("cuEventRecord", e))?;
        Ok(event)
    }

    /// What it is given from now on waits for an event. Nobody else does.
    pub fn wait_event(&self, event: &CudaEvent) -> Result<(), CudaError> {
        let _entered = self.device.enter()?;
        let flags = sys::CUevent_wait_flags::CU_EVENT_WAIT_DEFAULT;
        // SAFETY: both live here; the driver keeps what it needs of the event.
        unsafe { result::stream::wait_event(self.stream.0, event.event.0, flags) }
            .map_err(|e| self.device.driver_error("cuStreamWaitEvent", e))
    }

    /// Whether all that it was given is done. Waits for nothing.
    pub(super) fn is_idle(&self) -> bool {
        let Ok(_entered) = self.device.enter() else { return false };
        // SAFETY: it lives here.
        unsafe { sys::cuStreamQuery(self.stream.0) }.result().is_ok()
    }

    /// Waits until all that it was given is done.
    pub fn synchronize(&self) -> Result<(), CudaError> {
        let _entered = self.device.enter()?;
        // SAFETY: it lives here.
        unsafe { result::stream::synchronize(self.stream.0) }
            .map_err(|e| self.device.driver_error("cuStreamSynchronize", e))
    }

    /// Has bytes of a chunk copied to an address of the device, some time from now. Until then the chunk must
    /// stay as it is: who calls this marks the stream, and says so to the chunk (`Taken::copy`).
    ///
    /// # Safety
    ///
    /// As many bytes at that address must be the caller's until this is done.
    pub(super) unsafe fn copy_from_host(&self, from: &[u8], to: u64) -> Result<(), CudaError> {
        let _entered = self.device.enter()?;
        // SAFETY: the caller's word for the address; the bytes are of a chunk, which waits for the mark.
        unsafe { result::memcpy_htod_async(to, from, self.stream.0) }
            .map_err(|e| self.device.driver_error("cuMemcpyHtoDAsync", e))
    }

    /// The same out of a chunk on the device.
    ///
    /// # Safety
    ///
    /// So many bytes at both addresses, of this device, must be the caller's until this is done.
    pub(super) unsafe fn copy_on_device(
        &self,
        from: u64,
        len: usize,
        to: u64,
    ) -> Result<(), CudaError> {
        let _entered = self.device.enter()?;
        // SAFETY: the caller's word for both.
        unsafe { result::memcpy_dtod_async(to, from, len, self.stream.0) }
            .map_err(|e| self.device.driver_error("cuMemcpyDtoDAsync", e))
    }
}

impl Drop for CudaStream {
    fn drop(&mut self) {
        if self.is_owned
            && let Ok(_entered) = self.device.enter()
        {
            // SAFETY: it was made here and nobody else has it. Its work goes on to the end.
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
    /// Whether the work before it is done.
    pub fn is_done(&self) -> Result<bool, CudaError> {
        let _entered = self.device.enter()?;
        // SAFETY: it lives here.
        match unsafe { result::event::query(self.event.0) } {
            Ok(()) => Ok(true),
            Err(e) if e.0 == sys::CUresult::CUDA_ERROR_NOT_READY => Ok(false),
            Err(e) => Err(self.device.driver_error("cuEventQuery", e)),
        }
    }

    /// Waits until it is.
    pub fn wait(&self) -> Result<(), CudaError> {
        let _entered = self.device.enter()?;
        // SAFETY: it lives here.
        unsafe { result::event::synchronize(self.event.0) }
            .map_err(|e| self.device.driver_error("cuEventSynchronize", e))
    }
}

impl Drop for CudaEvent {
    fn drop(&mut self) {
        if let Ok(_entered) = self.device.enter() {
            // SAFETY: it was made here and nobody else has it.
            let _ = unsafe { result::event::destroy(self.event.0) };
        }
    }
}
