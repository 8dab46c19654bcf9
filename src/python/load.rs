//! Loading tensors, of one checkpoint or of several in one plan.
//!
//! In: [`Tensor`]s, and for memory of the caller's its addresses. Out: [`Memory`] that was read, or nothing;
//! and what the load did.

use std::sync::Arc;

use pyo3::exceptions::PyValueError;
use pyo3::intern;
use pyo3::prelude::*;
use pyo3::types::PyDict;

use crate::checkpoint;
use crate::loader::{self, LoadRequest};

use super::error::load_exception;
use super::interruptible::{Stop, WaitMode, without_gil};
use super::memory::Memory;
use super::tensor::PyTensor;

/// What is no larger is read from this machine in less time than a thread for it would cost.
const MAX_INLINE_BYTES: u64 = 1 << 20;

/// A tensor and what has it, for a thread that Python's lock does not hold up.
pub type TensorHandle = (Arc<loader::OpenCheckpoint>, checkpoint::Tensor);

/// What a load did, but for what it was asked: bytes by how they were had, and why not all came as was asked,
/// with the number of tensors. A dictionary of those that there are.
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
            gathered,
            memory,
            fallbacks,
            without_gpudirect,
            ..
        } = self.0;
        let told = PyDict::new(py);
        let bytes = [
            (intern!(py, "cached"), cached),
            (intern!(py, "direct"), direct),
            (intern!(py, "gpudirect"), gpudirect),
            (intern!(py, "buffered"), buffered),
            (intern!(py, "gathered"), gathered),
            (intern!(py, "memory"), memory),
        ];
        for (name, bytes) in bytes.into_iter().filter(|(_, bytes)| *bytes > 0) {
            told.set_item(name, bytes)?;
        }
        if !fallbacks.is_empty() {
            told.set_item(intern!(py, "fallbacks"), fallbacks)?;
        }
        if let Some(why) = without_gpudirect {
            told.set_item(intern!(py, "without_gpudirect"), why)?;
        }
        Ok(told)
    }
}

/// Loads tensors, each into memory of its own. Also what the load did. `threads` are those with
/// which the first was opened if none are said.
#[pyfunction]
#[pyo3(signature = (tensors, stop=None, threads=None))]
pub fn load(
    py: Python<'_>,
    tensors: Vec<PyRef<'_, PyTensor>>,
    stop: Option<PyRef<'_, Stop>>,
    threads: Option<usize>,
) -> PyResult<(Vec<Memory>, ReportDict)> {
    let tensors: Vec<TensorHandle> = tensors.iter().map(|tensor| tensor_handle(tensor)).collect();
    let stop = Stop::flag(stop.as_deref());
    let wait = wait_mode(&tensors, WaitMode::MayAbandon);
    let told_to = Arc::clone(&stop);
    let done = without_gil(py, wait, &stop, move || {
        let tensors: Vec<_> = tensors.iter().map(|(of, tensor)| (&**of, tensor)).collect();
        loader::load_many_owned(&tensors, &told_to, threads)
    })?;
    let (memory, report) = done.map_err(|error| load_exception(py, &error))?;
    Ok((memory.into_iter().map(Memory::owned).collect(), ReportDict(report)))
}

/// Loads tensors, each into the memory that begins at its address, which must be there, writable, as
/// long as the tensor and nobody else's until this returns.
#[pyfunction]
#[pyo3(signature = (tensors, addresses, stop=None))]
#[allow(unsafe_code)]
pub fn load_into(
    py: Python<'_>,
    tensors: Vec<PyRef<'_, PyTensor>>,
    addresses: Vec<usize>,
    stop: Option<PyRef<'_, Stop>>,
) -> PyResult<ReportDict> {
    if tensors.len() != addresses.len() {
        return Err(PyValueError::new_err("every tensor needs one address"));
    }
    let places = tensors.iter().zip(addresses).filter(|(it, _)| !it.tensor.bytes.is_empty());
    let (tensors, addresses): (Vec<TensorHandle>, Vec<usize>) =
        places.map(|(tensor, at)| (tensor_handle(tensor), at)).unzip();
    check_targets(&tensors, &addresses)?;
    let stop = Stop::flag(stop.as_deref());
    // The memory is the caller's, who may use it for something else from the return of this on.
    let wait = wait_mode(&tensors, WaitMode::UntilDone);
    let told_to = Arc::clone(&stop);
    let done = without_gil(py, wait, &stop, move || {
        let wanted = tensors.iter().zip(addresses).map(|((checkpoint, tensor), at)| {
            let len = tensor.bytes.len() as usize;
            // SAFETY: the package has seen that this memory belongs to a contiguous tensor of that
            // many bytes, and holds on to it until this returns, which is when the work has ended;
            // and it was just seen that no two of them overlap.
            let target = unsafe { std::slice::from_raw_parts_mut(at as *mut u8, len) };
            LoadRequest { checkpoint, tensor, target }
        });
        loader::load_many(wanted, &told_to, None)
    })?;
    Ok(ReportDict(done.map_err(|error| load_exception(py, &error))?))
}

pub fn tensor_handle(tensor: &PyTensor) -> TensorHandle {
    (Arc::clone(&tensor.of), tensor.tensor.clone())
}

/// How loading them is waited for: `long`, if not in the calling thread.
pub fn wait_mode(tensors: &[TensorHandle], long: WaitMode) -> WaitMode {
    let bytes: u64 = tensors.iter().map(|(_, tensor)| tensor.bytes.len()).sum();
    let of_one = |(a, _): &TensorHandle, (b, _): &TensorHandle| Arc::ptr_eq(a, b);
    let is_local = || tensors.chunk_by(of_one).all(|all| all[0].0.is_local());
    if bytes <= MAX_INLINE_BYTES && is_local() { WaitMode::Inline } else { long }
}

/// Refuses places to load into that are none, or of which two share a byte.
pub fn check_targets(tensors: &[TensorHandle], addresses: &[usize]) -> PyResult<()> {
    // Nothing begins at address 0; tensors whose memory was freed tell that one.
    let has_none = |(tensor, at): (&TensorHandle, &usize)| !tensor.1.bytes.is_empty() && *at == 0;
    if tensors.iter().zip(addresses).any(has_none) {
        return Err(PyValueError::new_err("one of the tensors to load into has no memory"));
    }
    if any_overlap(tensors, addresses) {
        return Err(PyValueError::new_err("two of the tensors to load into share memory"));
    }
    Ok(())
}

/// Whether two of the places to load into share a byte.
fn any_overlap(tensors: &[TensorHandle], addresses: &[usize]) -> bool {
    let end =
        |(_, tensor): &TensorHandle, at: usize| at.saturating_add(tensor.bytes.len() as usize);
    let ranges = tensors.iter().zip(addresses).map(|(tensor, &at)| (at, end(tensor, at)));
    let mut ranges: Vec<(usize, usize)> = ranges.collect();
    ranges.sort_unstable();
    ranges.windows(2).any(|pair| pair[0].1 > pair[1].0)
}
