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

/// A cast, compiled for a device. It is dropped after the chunks that its queued work reads, which wait for that work.
#[derive(Debug)]
pub struct DeviceCast {
    device: Arc<Device>,
    module: DriverHandle<sys::CUmodule>,
    function: DriverHandle<sys::CUfunction>,
    /// Bytes of a value before the cast.
    from_bytes: u64,
    /// Bytes of a value after it.
    to_bytes: u64,
}

impl DeviceCast {
    /// Has the driver compile a cast; `None` if there is no kernel for it.
    fn compile(
        device: &Arc<Device>,
        from: Dtype,
        to: Dtype,
    ) -> Result<Option<DeviceCast>, CudaError> {
        let Some(text) = cast_ptx(from, to).and_then(|text| CString::new(text).ok()) else {
            return Ok(None);
        };
        let _context = device.enter()?;
        // SAFETY: the text ends with a NUL, and the driver keeps nothing of it.
        let module = unsafe { result::module::load_data(text.as_ptr().cast()) }
            .map_err(|e| device.driver_error("cuModuleLoadData", e))?;
        let mut cast = DeviceCast {
            device: Arc::clone(device),
            module: DriverHandle(module),
            function: DriverHandle(std::ptr::null_mut()),
            from_bytes: u64::from(from.bits()) / 8,
            to_bytes: u64::from(to.bits()) / 8,
        };
        // SAFETY: the module was just loaded, and is kept as long as the function.
        let function = unsafe { result::module::get_function(module, KERNEL_NAME.into()) }
            .map_err(|e| device.driver_error("cuModuleGetFunction", e))?;
        cast.function = DriverHandle(function);
        Ok(Some(cast))
    }

    /// The bytes of output for `len` bytes of input.
    pub fn output_bytes(&self, len: u64) -> u64 {
        len / self.from_bytes * self.to_bytes
    }

    /// Queues the cast of `len` bytes.
    ///
    /// # Safety
    ///
    /// Until the work is done, the device must be able to read `len` bytes at `from`. The bytes of output at `to` must belong
    /// to the caller. Both addresses must be multiples of the size of their values.
    pub unsafe fn launch(
        &self,
        stream: &CudaStream,
        from: u64,
        len: u64,
        to: u64,
    ) -> Result<(), CudaError> {
        debug_assert!(from.is_multiple_of(self.from_bytes) && to.is_multiple_of(self.to_bytes));
        let (mut from, mut to, mut count) = (from, to, len / self.from_bytes);
        // At most 16,384: a chunk has 4 MiB.
        let block_count = count.div_ceil(u64::from(THREADS_PER_BLOCK)) as u32;
        let mut params = [&raw mut from, &raw mut to, &raw mut count].map(|it| it.cast::<c_void>());
        // SAFETY: the kernel takes these three numbers, and reads and writes nothing but what the caller guarantees.
        unsafe { stream.launch(self.function, block_count, THREADS_PER_BLOCK, &mut params) }
    }
}

impl Drop for DeviceCast {
    fn drop(&mut self) {
        if let Ok(_context) = self.device.enter() {
            // SAFETY: it was loaded here, and no work uses it any more.
            let _ = unsafe { result::module::unload(self.module.0) };
        }
    }
}

/// A device by its number, and the types before and after a cast.
type CastKey = (usize, Dtype, Dtype);

/// The casts of a loader, each compiled once. What cannot be compiled is not tried again.
#[derive(Debug, Default)]
pub struct DeviceCasts(Mutex<BTreeMap<CastKey, Option<Arc<DeviceCast>>>>);

impl DeviceCasts {
    /// The bytes of a tensor before its cast, and the cast that a device does on their way to an address. `None` if there
    /// is no cast, or the host must do it.
    pub fn find<'a>(
        &self,
        device: &Arc<Device>,
        bytes: &'a TensorBytes,
        address: u64,
    ) -> Option<(Arc<DeviceCast>, &'a TensorBytes)> {
        let TensorBytes::Cast { from, to, inner } = bytes else { return None };
        let TensorBytes::Run(run) = &**inner else { return None };
        let value_bytes = |dtype: &Dtype| u64::from(dtype.bits()) / 8;
        // A kernel loads and stores only aligned values. Extents end at multiples of 4 MiB, and so cut no aligned value.
        let is_aligned =
            run.offset.is_multiple_of(value_bytes(from)) && address.is_multiple_of(value_bytes(to));
        if !is_aligned {
            return None;
        }
        let compile = || {
            let compiled = DeviceCast::compile(device, *from, *to);
            compiled.unwrap_or_else(|error| {
                tracing::debug!(%error, "the host casts what a device could");
                None
            })
        };
        let mut casts = lock(&self.0);
        let key = (device.ordinal(), *from, *to);
        let cast = casts.entry(key).or_insert_with(|| compile().map(Arc::new));
        Some((Arc::clone(cast.as_ref()?), inner))
    }
}
