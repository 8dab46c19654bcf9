//! The bytes of a tensor, which Python sees as a writable buffer.

use std::ffi::{c_int, c_void};

use pyo3::exceptions::PyBufferError;
use pyo3::ffi;
use pyo3::prelude::*;

use crate::cuda;
use crate::loader::{self, MappedTensor};

/// What keeps the bytes there.
enum MemoryOwner {
    Owned { _memory: loader::TensorBuffer },
    Mapped { _mapped: MappedTensor },
    Device { piece: cuda::DeviceSlice },
    Released,
}

/// DLPack's numbers for memory of the host and of CUDA devices.
const DLPACK_HOST: i32 = 1;
const DLPACK_CUDA: i32 = 2;

/// The bytes of a tensor: in memory of their own, mapped from a file, or on a device.
///
/// A page of a mapping that this process writes becomes its own copy. On the host it is a buffer, for
/// `torch.frombuffer` and `numpy.frombuffer`.
#[pyclass(frozen, name = "Memory", module = "ckptfs._ckptfs")]
pub struct PyMemory {
    /// A number: only the users of the buffer look at what is there.
    address: usize,
    len: usize,
    owner: MemoryOwner,
}

impl PyMemory {
    pub fn owned(mut memory: loader::TensorBuffer) -> PyMemory {
        let (address, len) = (memory.as_mut_ptr() as usize, memory.len());
        PyMemory { address, len, owner: MemoryOwner::Owned { _memory: memory } }
    }

    pub fn mapped(mapped: MappedTensor) -> PyMemory {
        let (address, len) = (mapped.as_mut_ptr() as usize, mapped.len());
        PyMemory { address, len, owner: MemoryOwner::Mapped { _mapped: mapped } }
    }

    pub fn on_device(piece: cuda::DeviceSlice) -> PyMemory {
        let (address, len) = (piece.address() as usize, piece.len());
        PyMemory { address, len, owner: MemoryOwner::Device { piece } }
    }

    pub fn address(&self) -> usize {
        self.address
    }

    pub fn len(&self) -> usize {
        self.len
    }

    /// The device, as DLPack numbers them.
    pub fn dlpack_device(&self) -> (i32, i32) {
        match &self.owner {
            MemoryOwner::Device { piece } => {
                (DLPACK_CUDA, i32::try_from(piece.device().ordinal()).unwrap_or(i32::MAX))
            }
            MemoryOwner::Owned { .. } | MemoryOwner::Mapped { .. } | MemoryOwner::Released => {
                (DLPACK_HOST, 0)
            }
        }
    }
}

impl Drop for PyMemory {
    fn drop(&mut self) {
        let owner = std::mem::replace(&mut self.owner, MemoryOwner::Released);
        if let MemoryOwner::Device { piece } = owner {
            // It waits for the device, whose work may wait for another thread of Python.
            let mut piece = Some(piece);
            let _ = Python::try_attach(|py| py.detach(|| drop(piece.take())));
        }
    }
}

#[pymethods]
impl PyMemory {
    fn __len__(&self) -> usize {
        self.len
    }

    fn __repr__(&self) -> String {
        format!("<{} bytes of a tensor>", self.len)
    }

    #[allow(unsafe_code)]
    unsafe fn __getbuffer__(
        slf: Bound<'_, Self>,
        view: *mut ffi::Py_buffer,
        flags: c_int,
    ) -> PyResult<()> {
        let this = slf.get();
        if let MemoryOwner::Device { .. } = this.owner {
            return Err(PyBufferError::new_err("these bytes are on a device"));
        }
        let len = isize::try_from(this.len).map_err(|e| PyBufferError::new_err(e.to_string()))?;
        let address = this.address as *mut c_void;
        // SAFETY: Python gives a view to be filled. The address has `len` bytes that may be written as long as this
        // object lives. The view gets a reference to it, and nothing of ours looks at the bytes.
        let done = unsafe { ffi::PyBuffer_FillInfo(view, slf.as_ptr(), address, len, 0, flags) };
        if done == 0 { Ok(()) } else { Err(PyErr::fetch(slf.py())) }
    }
}
