//! A tensor of a checkpoint, or a part of one: what it is, and where it is to be had.

use std::sync::Arc;
use std::sync::atomic::AtomicBool;

use pyo3::prelude::*;

use crate::checkpoint::{self, Steps};
use crate::loader::{self, Route};

use super::fault::raised;
use super::memory::Memory;
use super::waiting::{Wait, without_lock};

/// What is known of a tensor without reading it.
#[pyclass(frozen, module = "ckptfs._ckptfs")]
pub struct Tensor {
    /// The checkpoint that has it, which stays open as long as this is kept.
    pub of: Arc<loader::Opened>,
    pub tensor: checkpoint::Tensor,
}

#[pymethods]
impl Tensor {
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
            Route::Through { why } => Some(why),
            Route::Plain | Route::Direct { .. } => None,
        }
    }

    /// A part of it: of each of its first axes the first step, how many, and from one to the next.
    fn part(&self, py: Python<'_>, steps: Vec<(u64, u64, u64)>) -> PyResult<Tensor> {
        let steps: Vec<Steps> =
            steps.into_iter().map(|(start, count, step)| Steps { start, count, step }).collect();
        let part = self.of.part_of(&self.tensor, &steps).map_err(|error| raised(py, &error))?;
        Ok(Tensor { of: Arc::clone(&self.of), tensor: part })
    }

    /// Its bytes where they lie in their file; or, in words, why they cannot be used there.
    fn map(&self, py: Python<'_>) -> PyResult<(Option<Memory>, Option<String>)> {
        let wait = if self.of.maps_at_once(&self.tensor) { Wait::Here } else { Wait::OrLeave };
        let (opened, tensor) = (Arc::clone(&self.of), self.tensor.clone());
        let work = move || opened.map(&tensor);
        let mapped = without_lock(py, wait, &AtomicBool::new(false), work)?;
        match mapped.map_err(|error| raised(py, &error))? {
            Ok(mapped) => Ok((Some(Memory::mapped(mapped)), None)),
            Err(why) => Ok((None, Some(why.to_string()))),
        }
    }

    fn __repr__(&self) -> String {
        format!("<{} {} {:?}>", self.tensor.name, self.tensor.dtype, self.tensor.shape)
    }
}
