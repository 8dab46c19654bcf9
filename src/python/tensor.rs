//! A tensor of a checkpoint, or a part of one, as Python sees it; and its bytes, a writable buffer there.

use std::collections::BTreeMap;
use std::ffi::{c_int, c_void};
use std::sync::Arc;
use std::sync::atomic::AtomicBool;

use pyo3::exceptions::PyBufferError;
use pyo3::ffi;
use pyo3::prelude::*;

use crate::checkpoint::{self, AxisSlice};
use crate::cuda;
use crate::loader::{self, MappedTensor, Route};

use super::error::load_exception;
use super::interruptible::{WaitMode, without_gil};

/// What is known of a tensor without reading it.
#[pyclass(frozen, name = "Tensor", module = "ckptfs._ckptfs")]
pub struct PyTensor {
    /// The checkpoint that it is of, which stays open as long as this exists.
    pub checkpoint: Arc<loader::OpenCheckpoint>,
    pub tensor: checkpoint::Tensor,
}

/// All bytes from the first of a tensor to its last; the steps and the stride of each axis; the bytes of a piece.
pub type StridedSpan = (PyTensor, Vec<(u64, u64)>, u64);

#[pymethods]
impl PyTensor {
    #[getter]
    fn name(&self) -> &str {
        &self.tensor.name
    }

    /// The type's name in a safetensors header.
    #[getter]
    fn dtype(&self) -> &'static str {
        self.tensor.dtype.name()
    }

    /// The shape in a safetensors header, which counts elements even where several share a byte.
    #[getter]
    fn shape(&self) -> Vec<u64> {
        self.tensor.shape.to_vec()
    }

    #[getter]
    fn nbytes(&self) -> u64 {
        self.tensor.bytes.len()
    }

    /// Why its bytes come through a mount, if they do.
    #[getter]
    fn through(&self) -> Option<&str> {
        match self.checkpoint.route() {
            Route::ThroughMount { reason } => Some(reason),
            Route::Plain | Route::Direct { .. } => None,
        }
    }

    /// A part of it: of each of its first axes the first index, the count and the step.
    fn part(&self, py: Python<'_>, steps: Vec<(u64, u64, u64)>) -> PyResult<PyTensor> {
        let steps: Vec<AxisSlice> = steps
            .into_iter()
            .map(|(start, count, step)| AxisSlice { start, count, step })
            .collect();
        let part = self
            .checkpoint
            .slice_of(&self.tensor, &steps)
            .map_err(|error| load_exception(py, &error))?;
        Ok(PyTensor { checkpoint: Arc::clone(&self.checkpoint), tensor: part })
    }

    /// Whether another tensor of the checkpoint is this one under a second name, as tied weights in a pickle are.
    fn is_same_as(&self, other: PyRef<'_, PyTensor>) -> bool {
        let PyTensor { checkpoint, tensor } = &*other;
        Arc::ptr_eq(&self.checkpoint, checkpoint)
            && self.tensor.dtype == tensor.dtype
            && self.tensor.shape == tensor.shape
            && self.tensor.bytes == tensor.bytes
    }

    /// Its bytes where they lie in their file, or why they cannot be used there.
    fn map(&self, py: Python<'_>) -> PyResult<(Option<PyMemory>, Option<String>)> {
        let wait = if self.checkpoint.maps_without_waiting(&self.tensor) {
            WaitMode::Inline
        } else {
            WaitMode::MayAbandon
        };
        let (checkpoint, tensor) = (Arc::clone(&self.checkpoint), self.tensor.clone());
        let work = move || checkpoint.map(&tensor);
        let mapped = without_gil(py, wait, &AtomicBool::new(false), work)?;
        match mapped.map_err(|error| load_exception(py, &error))? {
            Ok(mapped) => Ok((Some(PyMemory::mapped(mapped)), None)),
            Err(reason) => Ok((None, Some(reason.to_string()))),
        }
    }

    fn __repr__(&self) -> String {
        format!("<{} {} {:?}>", self.tensor.name, self.tensor.dtype, self.tensor.shape)
    }
}

/// The spans of strided tensors, by the places of these. Left out are tensors with pieces of `short_bytes` or more, and
/// spans of more than `max_bytes`. So are spans of which more than half would be read in vain.
#[pyfunction]
pub fn strided_spans(
    tensors: Vec<PyRef<'_, PyTensor>>,
    short_bytes: u64,
    max_bytes: u64,
) -> BTreeMap<usize, StridedSpan> {
    let spans = tensors
        .iter()
        .enumerate()
        .map(|(place, tensor)| (place, tensor.strided_span(short_bytes, max_bytes)));
    spans.filter_map(|(place, span)| Some((place, span?))).collect()
}

impl PyTensor {
    fn strided_span(&self, short_bytes: u64, max_bytes: u64) -> Option<StridedSpan> {
        let PyTensor { checkpoint, tensor } = self;
        let (all, grid) = tensor.strided_span()?;
        let bits = u64::from(tensor.dtype.bits());
        let is_whole = |bytes: u64| bits >= 8 && (bytes * 8).is_multiple_of(bits);
        let fits = grid.piece_bytes < short_bytes
            && all.bytes.len() <= max_bytes.min(tensor.bytes.len().saturating_mul(2))
            && is_whole(grid.piece_bytes)
            && grid.axes.iter().all(|axis| is_whole(axis.stride));
        let axes = grid.axes.iter().map(|axis| (axis.count, axis.stride)).collect();
        fits.then(|| {
            (PyTensor { checkpoint: Arc::clone(checkpoint), tensor: all }, axes, grid.piece_bytes)
        })
    }
}

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
