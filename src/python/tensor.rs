//! A tensor of a checkpoint, or a part of one: what it is, and where it is to be had.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::atomic::AtomicBool;

use pyo3::prelude::*;

use crate::checkpoint::{self, AxisSlice};
use crate::loader::{self, Route};

use super::error::load_exception;
use super::interruptible::{WaitMode, without_gil};
use super::memory::Memory;

/// What is known of a tensor without reading it.
#[pyclass(frozen, name = "Tensor", module = "ckptfs._ckptfs")]
pub struct PyTensor {
    /// The checkpoint that has it, which stays open as long as this is kept.
    pub of: Arc<loader::OpenCheckpoint>,
    pub tensor: checkpoint::Tensor,
}

/// All of a stretch, and how a tensor lies in it.
pub type StridedSpan = (PyTensor, Vec<(u64, u64)>, u64);

#[pymethods]
impl PyTensor {
    #[getter]
    fn name(&self) -> &str {
        &self.tensor.name
    }

    /// As a safetensors header calls it.
    #[getter]
    fn dtype(&self) -> &'static str {
        self.tensor.dtype.name()
    }

    /// As a safetensors header has it: of types that share a byte, every element counts.
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
        match self.of.route() {
            Route::ThroughMount { reason } => Some(reason),
            Route::Plain | Route::Direct { .. } => None,
        }
    }

    /// A part of it: of each of its first axes the first step, how many, and from one to the next.
    fn part(&self, py: Python<'_>, steps: Vec<(u64, u64, u64)>) -> PyResult<PyTensor> {
        let steps: Vec<AxisSlice> = steps
            .into_iter()
            .map(|(start, count, step)| AxisSlice { start, count, step })
            .collect();
        let part =
            self.of.slice_of(&self.tensor, &steps).map_err(|error| load_exception(py, &error))?;
        Ok(PyTensor { of: Arc::clone(&self.of), tensor: part })
    }

    /// Its bytes where they lie in their file; or, in words, why they cannot be used there.
    fn map(&self, py: Python<'_>) -> PyResult<(Option<Memory>, Option<String>)> {
        let wait = if self.of.maps_without_waiting(&self.tensor) {
            WaitMode::Inline
        } else {
            WaitMode::MayAbandon
        };
        let (opened, tensor) = (Arc::clone(&self.of), self.tensor.clone());
        let work = move || opened.map(&tensor);
        let mapped = without_gil(py, wait, &AtomicBool::new(false), work)?;
        match mapped.map_err(|error| load_exception(py, &error))? {
            Ok(mapped) => Ok((Some(Memory::mapped(mapped)), None)),
            Err(why) => Ok((None, Some(why.to_string()))),
        }
    }

    fn __repr__(&self) -> String {
        format!("<{} {} {:?}>", self.tensor.name, self.tensor.dtype, self.tensor.shape)
    }
}

/// Of those tensors whose elements lie spread out, in pieces of less than `short` bytes and all within `most`: by
/// its place one tensor of all bytes from the first to the last, the steps and the bytes between them of each axis,
/// and the bytes of a piece. None of which most would be read for nothing.
#[pyfunction]
pub fn spread(
    tensors: Vec<PyRef<'_, PyTensor>>,
    short: u64,
    most: u64,
) -> BTreeMap<usize, StridedSpan> {
    let strided_span = tensors.iter().enumerate();
    strided_span.filter_map(|(place, tensor)| Some((place, tensor.spread(short, most)?))).collect()
}

impl PyTensor {
    fn spread(&self, short: u64, most: u64) -> Option<StridedSpan> {
        let PyTensor { of, tensor } = self;
        let (all, grid) = tensor.strided_span()?;
        let bits = u64::from(tensor.dtype.bits());
        let is_whole = |bytes: u64| bits >= 8 && (bytes * 8).is_multiple_of(bits);
        let fits = grid.piece_bytes < short
            && all.bytes.len() <= most.min(tensor.bytes.len().saturating_mul(2))
            && is_whole(grid.piece_bytes)
            && grid.axes.iter().all(|axis| is_whole(axis.stride));
        let axes = grid.axes.iter().map(|axis| (axis.count, axis.stride)).collect();
        fits.then(|| (PyTensor { of: Arc::clone(of), tensor: all }, axes, grid.piece_bytes))
    }
}
