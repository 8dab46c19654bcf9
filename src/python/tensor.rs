//! A tensor of a checkpoint, or a part of one: what it is, not what it holds.

use pyo3::prelude::*;

use crate::checkpoint;

/// What is known of a tensor without reading it.
#[pyclass(frozen, module = "ckptfs._ckptfs")]
pub struct Tensor(pub checkpoint::Tensor);

#[pymethods]
impl Tensor {
    #[getter]
    fn name(&self) -> &str {
        &self.0.name
    }

    /// As a safetensors header calls it.
    #[getter]
    fn dtype(&self) -> &'static str {
        self.0.dtype.name()
    }

    /// As a safetensors header has it: of types that share a byte, every element counts.
    #[getter]
    fn shape(&self) -> Vec<u64> {
        self.0.shape.to_vec()
    }

    #[getter]
    fn nbytes(&self) -> u64 {
        self.0.bytes.len()
    }

    fn __repr__(&self) -> String {
        format!("<{} {} {:?}>", self.0.name, self.0.dtype, self.0.shape)
    }
}
