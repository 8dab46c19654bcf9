//! Casts that a device does while it copies: it reads values from a chunk, and writes them in another type.

#![allow(unsafe_code)]

use std::collections::BTreeMap;
use std::ffi::{CString, c_void};
use std::sync::{Arc, Mutex};

use cudarc::driver::{result, sys};

use crate::checkpoint::{Dtype, TensorBytes};
use crate::threads::lock;

use super::cast_ptx::{KERNEL_NAME, THREADS_PER_BLOCK, cast_ptx};
use super::driver::{Device, DriverHandle};
use super::error::CudaError;
use super::stream::CudaStream;

/// A cast on a device.
#[derive(Debug)]
pub struct DeviceCast {
    device: Arc<Device>,
    module: DriverHandle<sys::CUmodule>,
    function: DriverHandle<sys::CUfunction>,
    /// Bytes of a value before the cast, and after it.
    value_bytes: [u64; 2],
}

impl DeviceCast {
    /// Has the driver compile a cast; `None` if there is no kernel, or the driver cannot compile it.
    fn load(device: &Arc<Device>, from: Dtype, to: Dtype) -> Option<DeviceCast> {
        let text = CString::new(cast_ptx(from, to)?).ok()?;
        let _context = device.enter().ok()?;
        // SAFETY: the text ends with a NUL, and the driver keeps nothing of it.
        let module = unsafe { result::module::load_data(text.as_ptr().cast()) }
            .inspect_err(|error| tracing::debug!(?error, "values are cast on the host"))
            .ok()?;
        let mut kernel = DeviceCast {
            device: Arc::clone(device),
            module: DriverHandle(module),
            function: DriverHandle(std::ptr::null_mut()),
            value_bytes: [from, to].map(|dtype| u64::from(dtype.bits()) / 8),
        };
        // SAFETY: the module was just loaded, and is kept as long as the function.
        let function = unsafe { result::module::get_function(module, KERNEL_NAME.into()) };
        kernel.function = DriverHandle(function.ok()?);
        Some(kernel)
    }

    /// The number of bytes that values of so many bytes become.
    pub fn output_bytes(&self, len: u64) -> u64 {
        let [from, to] = self.value_bytes;
        len / from * to
    }

    /// Queues the cast of `len` bytes of values.
    ///
    /// # Safety
    ///
    /// The device must be able to read so many bytes at `from`. The bytes that they become must belong to the caller at
    /// `to`, until the work is done.
    pub unsafe fn launch(
        &self,
        stream: &CudaStream,
        from: u64,
        len: u64,
        to: u64,
    ) -> Result<(), CudaError> {
        let (mut from, mut to, mut count) = (from, to, len / self.value_bytes[0]);
        let block_count = count.div_ceil(u64::from(THREADS_PER_BLOCK)) as u32;
        let mut params = [&raw mut from, &raw mut to, &raw mut count].map(|it| it.cast::<c_void>());
        // SAFETY: the kernel takes these three numbers, and reads and writes nothing but what the caller guarantees.
        unsafe { stream.launch(self.function, block_count, THREADS_PER_BLOCK, &mut params) }
    }
}

impl Drop for DeviceCast {
    fn drop(&mut self) {
        // Work that uses the kernel may still be queued. If the device cannot finish it, the module is leaked.
        if self.device.synchronize().is_ok()
            && let Ok(_context) = self.device.enter()
        {
            // SAFETY: it was loaded here, and no work uses it any more.
            let _ = unsafe { result::module::unload(self.module.0) };
        }
    }
}

/// A device by its number, and the types before and after a cast.
type CastKey = (usize, Dtype, Dtype);

/// The kernels of a loader, each compiled once.
#[derive(Debug, Default)]
pub struct DeviceCasts(Mutex<BTreeMap<CastKey, Option<Arc<DeviceCast>>>>);

impl DeviceCasts {
    /// The values of a tensor before its cast, and the kernel that casts them; `None` if the host must do it.
    pub fn find<'a>(
        &self,
        device: &Arc<Device>,
        bytes: &'a TensorBytes,
    ) -> Option<(Arc<DeviceCast>, &'a TensorBytes)> {
        let TensorBytes::Cast { from, to, inner } = bytes else { return None };
        let TensorBytes::Run(run) = &**inner else { return None };
        // Then no end of an extent cuts a value.
        if !run.offset.is_multiple_of(u64::from(from.bits()) / 8) {
            return None;
        }
        let mut kernels = lock(&self.0);
        let kernel = kernels
            .entry((device.ordinal(), *from, *to))
            .or_insert_with(|| DeviceCast::load(device, *from, *to).map(Arc::new));
        Some((Arc::clone(kernel.as_ref()?), inner))
    }
}
