//! Loading tensors, of one checkpoint or of several in one plan, into memory of their own or of the caller's.

use std::sync::Arc;
use std::sync::atomic::AtomicBool;

use pyo3::exceptions::PyValueError;
use pyo3::prelude::*;
use pyo3::types::PyDict;

use crate::checkpoint;
use crate::loader::{self, BufferAlignment, LoadRequest};

use super::error::load_exception;
use super::interruptible::{StopFlag, WaitMode, without_gil};
use super::tensor::{PyMemory, PyTensor};

/// Loads of at most so many bytes from this machine take less time than starting a thread.
const MAX_INLINE_BYTES: u64 = 1 << 20;

/// A tensor and its checkpoint, for threads that do not hold the interpreter's lock.
pub type TensorHandle = (Arc<loader::OpenCheckpoint>, checkpoint::Tensor);

/// The report of a load as a dictionary, without its zeros: bytes by the way they were read, and fallbacks with the
/// number of tensors.
pub struct ReportDict(pub loader::LoadReport);

impl<'py> IntoPyObject<'py> for ReportDict {
    type Target = PyDict;
    type Output = Bound<'py, PyDict>;
    type Error = PyErr;

    fn into_pyobject(self, py: Python<'py>) -> PyResult<Bound<'py, PyDict>> {
        let loader::LoadReport {
            cached,
            direct,
            gpudirect,
            buffered,
            remote,
            disk_cached,
            gathered,
            cast,
            device_cast,
            memory,
            fallbacks,
            without_gpudirect,
            // Python counts and times its loads itself.
            tensors: _,
            bytes: _,
            seconds: _,
        } = self.0;
        let dict = PyDict::new(py);
        let bytes = [
            ("cached", cached),
            ("direct", direct),
            ("gpudirect", gpudirect),
            ("buffered", buffered),
            ("remote", remote),
            ("disk_cached", disk_cached),
            ("gathered", gathered),
            ("cast", cast),
            ("device_cast", device_cast),
            ("memory", memory),
        ];
        for (name, bytes) in bytes.into_iter().filter(|(_, bytes)| *bytes > 0) {
            dict.set_item(name, bytes)?;
        }
        if !fallbacks.is_empty() {
            dict.set_item("fallbacks", fallbacks)?;
        }
        if let Some(reason) = without_gpudirect {
            dict.set_item("without_gpudirect", reason)?;
        }
        Ok(dict)
    }
}

/// Loads tensors, each into memory of its own. Returns also what was done. `threads` defaults to that of the first
/// tensor's checkpoint. With `vector_aligned`, memory begins at multiples of 64 bytes.
#[pyfunction]
#[pyo3(signature = (tensors, stop=None, threads=None, vector_aligned=false))]
pub fn load(
    py: Python<'_>,
    tensors: Vec<PyRef<'_, PyTensor>>,
    stop: Option<PyRef<'_, StopFlag>>,
    threads: Option<usize>,
    vector_aligned: bool,
) -> PyResult<(Vec<PyMemory>, ReportDict)> {
    let alignment = if vector_aligned { BufferAlignment::Vector } else { BufferAlignment::File };
    let done = load_new(py, &tensors, stop, move |tensors, stop| {
        loader::load_many_owned(tensors, alignment, stop, threads)
    })?;
    let (memory, report) = done.map_err(|error| load_exception(py, &error))?;
    Ok((memory.into_iter().map(PyMemory::owned).collect(), ReportDict(report)))
}

/// Runs a load of tensors into new memory, which may be abandoned: no memory of the caller's is involved.
pub fn load_new<T: Send + 'static>(
    py: Python<'_>,
    tensors: &[PyRef<'_, PyTensor>],
    stop: Option<PyRef<'_, StopFlag>>,
    load: impl FnOnce(&[(&loader::OpenCheckpoint, &checkpoint::Tensor)], &AtomicBool) -> T
    + Send
    + 'static,
) -> PyResult<T> {
    let tensors: Vec<TensorHandle> = tensors.iter().map(|tensor| tensor_handle(tensor)).collect();
    let stop = StopFlag::shared(stop.as_deref());
    let wait = wait_mode(&tensors, WaitMode::MayAbandon);
    let stop_flag = Arc::clone(&stop);
    without_gil(py, wait, &stop, move || {
        let tensors: Vec<_> =
            tensors.iter().map(|(checkpoint, tensor)| (&**checkpoint, tensor)).collect();
        load(&tensors, &stop_flag)
    })
}

/// Loads tensors, each into memory at an address. That must be writable, as long as the tensor, and used by nothing
/// else until this returns.
#[pyfunction]
#[pyo3(signature = (tensors, addresses, stop=None))]
#[allow(unsafe_code)]
pub fn load_into(
    py: Python<'_>,
    tensors: Vec<PyRef<'_, PyTensor>>,
    addresses: Vec<usize>,
    stop: Option<PyRef<'_, StopFlag>>,
) -> PyResult<ReportDict> {
    if tensors.len() != addresses.len() {
        return Err(PyValueError::new_err("every tensor needs one address"));
    }
    let places =
        tensors.iter().zip(addresses).filter(|(tensor, _)| !tensor.tensor.bytes.is_empty());
    let (tensors, addresses): (Vec<TensorHandle>, Vec<usize>) =
        places.map(|(tensor, at)| (tensor_handle(tensor), at)).unzip();
    check_targets(&tensors, &addresses)?;
    let stop = StopFlag::shared(stop.as_deref());
    // Work cannot be abandoned: the caller may use the memory for something else once this returns.
    let wait = wait_mode(&tensors, WaitMode::UntilDone);
    let stop_flag = Arc::clone(&stop);
    let done = without_gil(py, wait, &stop, move || {
        let requests = tensors.iter().zip(addresses).map(|((checkpoint, tensor), at)| {
            let len = tensor.bytes.len() as usize;
            // SAFETY: the package has checked that this memory belongs to a contiguous tensor of that many bytes.
            // It keeps the memory until this returns, when the work has ended. No two overlap, see above.
            let target = unsafe { std::slice::from_raw_parts_mut(at as *mut u8, len) };
            LoadRequest { checkpoint, tensor, target }
        });
        loader::load_many(requests, &stop_flag, None)
    })?;
    Ok(ReportDict(done.map_err(|error| load_exception(py, &error))?))
}

pub fn tensor_handle(tensor: &PyTensor) -> TensorHandle {
    (Arc::clone(&tensor.checkpoint), tensor.tensor.clone())
}

/// How to wait for a load of these: in the calling thread if it is small and local, else by `otherwise`.
pub fn wait_mode(tensors: &[TensorHandle], otherwise: WaitMode) -> WaitMode {
    let bytes: u64 = tensors.iter().map(|(_, tensor)| tensor.bytes.len()).sum();
    let of_one = |(a, _): &TensorHandle, (b, _): &TensorHandle| Arc::ptr_eq(a, b);
    let is_local = || tensors.chunk_by(of_one).all(|all| all[0].0.is_local());
    if bytes <= MAX_INLINE_BYTES && is_local() { WaitMode::Inline } else { otherwise }
}

/// Refuses targets without memory, and two that share a byte.
pub fn check_targets(tensors: &[TensorHandle], addresses: &[usize]) -> PyResult<()> {
    // Tensors whose memory was freed have the address 0.
    let has_none = |(tensor, at): (&TensorHandle, &usize)| !tensor.1.bytes.is_empty() && *at == 0;
    if tensors.iter().zip(addresses).any(has_none) {
        return Err(PyValueError::new_err("one of the tensors to load into has no memory"));
    }
    if any_overlap(tensors, addresses) {
        return Err(PyValueError::new_err("two of the tensors to load into share memory"));
    }
    Ok(())
}

/// Whether two targets share a byte.
fn any_overlap(tensors: &[TensorHandle], addresses: &[usize]) -> bool {
    let end =
        |(_, tensor): &TensorHandle, at: usize| at.saturating_add(tensor.bytes.len() as usize);
    let ranges = tensors.iter().zip(addresses).map(|(tensor, &at)| (at, end(tensor, at)));
    let mut ranges: Vec<(usize, usize)> = ranges.collect();
    ranges.sort_unstable();
    ranges.windows(2).any(|pair| pair[0].1 > pair[1].0)
}
