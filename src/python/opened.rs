//! A checkpoint that is open, as Python sees it.
//!
//! In: a path, or bytes. Out: its tensors; and of those, [`Memory`] that was read or mapped. What is
//! loaded into memory of the caller's is told by address.

use std::collections::BTreeMap;
use std::num::NonZeroUsize;
use std::path::PathBuf;
use std::sync::atomic::AtomicBool;
use std::sync::{Arc, OnceLock};

use pyo3::exceptions::PyValueError;
use pyo3::prelude::*;
use pyo3::types::PyList;

use crate::checkpoint::{self, Format, Steps};
use crate::loader::{self, Error, Route};
use crate::meeting;

use super::fault::raised;
use super::memory::Memory;
use super::tensor::Tensor;
use super::waiting::{Stop, Wait, without_lock};

/// What is no larger is read from this machine in less time than a thread for it would cost.
const SMALL: u64 = 1 << 20;

/// A checkpoint whose files are open. Any number of threads load from it at once.
#[pyclass(frozen, module = "ckptfs._ckptfs")]
pub struct Opened {
    opened: Arc<loader::Opened>,
    /// By the place of each tensor: its bytes in the data of the file.
    offsets: OnceLock<Vec<(u64, u64)>>,
}

/// The options of a checkpoint, as Python gives them.
#[derive(FromPyObject)]
#[pyo3(from_item_all)]
struct Options {
    root: Option<String>,
    allow_partial: bool,
    follow_symlinks: bool,
    threads: Option<NonZeroUsize>,
    memory: Option<u64>,
    leave_cache: bool,
}

impl From<Options> for loader::Options {
    fn from(given: Options) -> Self {
        let Options { root, allow_partial, follow_symlinks, threads, memory, leave_cache } = given;
        let checkpoint = checkpoint::Options { root_key: root, allow_partial, follow_symlinks };
        loader::Options { checkpoint, threads, memory, leave_cache }
    }
}

#[pymethods]
impl Opened {
    /// Opens what a path leads to.
    #[new]
    fn new(py: Python<'_>, path: PathBuf, options: Options) -> PyResult<Opened> {
        let options = loader::Options::from(options);
        let wait = if meeting::may_keep_waiting(&path) { Wait::OrLeave } else { Wait::Here };
        // Opening is not told to stop: it ends, or hangs and is left behind.
        let work = move || options.open(&path);
        Opened::of(py, without_lock(py, wait, &AtomicBool::new(false), work)?)
    }

    /// Opens a checkpoint whose bytes are in memory.
    #[staticmethod]
    fn of_bytes(py: Python<'_>, bytes: &[u8], options: Options) -> PyResult<Opened> {
        let options = loader::Options::from(options);
        Opened::of(py, py.detach(|| options.open_bytes(bytes)))
    }

    /// The names of its tensors, in the order in which their bytes lie.
    #[getter]
    fn names<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyList>> {
        let tensors = self.opened.tensors();
        if !self.is_one_safetensors() {
            return PyList::new(py, tensors.iter().map(|tensor| &*tensor.name));
        }
        let offsets = self.offsets();
        let mut places: Vec<usize> = (0..tensors.len()).collect();
        places.sort_by_key(|&place| (offsets[place], &*tensors[place].name));
        PyList::new(py, places.into_iter().map(|place| &*tensors[place].name))
    }

    /// What it says of itself. One that is not a safetensors file says that it is torch's.
    #[getter]
    fn metadata(&self) -> BTreeMap<String, String> {
        let mut metadata = self.opened.metadata().clone();
        if self.is_one_safetensors() && !self.opened.image().states_format() {
            metadata.remove("format");
        }
        metadata
    }

    /// The format of its files.
    #[getter]
    fn format(&self) -> &'static str {
        self.opened.format().name()
    }

    /// What was chosen and what was left out, in words.
    #[getter]
    fn notes(&self) -> Vec<String> {
        self.opened.notes().to_vec()
    }

    /// A hash of the states of its files: equal means the same bytes.
    #[getter]
    fn identity(&self) -> String {
        self.opened.image().identity().to_string()
    }

    /// How its bytes are reached: `plain`, `direct` with the source of a mount, or `through` a mount
    /// with the reason.
    #[getter]
    fn route(&self) -> (&'static str, Option<String>) {
        match self.opened.route() {
            Route::Plain => ("plain", None),
            Route::Direct { source } => ("direct", Some(source.display().to_string())),
            Route::Through { why } => ("through", Some(why.clone())),
        }
    }

    /// The tensor of a name.
    fn tensor(&self, py: Python<'_>, name: &str) -> PyResult<Tensor> {
        let found = self.opened.tensor(name).map_err(|error| raised(py, &error))?;
        Ok(Tensor(found.clone()))
    }

    /// Where the bytes of a tensor begin and end in the data of the file.
    fn data_offsets(&self, py: Python<'_>, name: &str) -> PyResult<(u64, u64)> {
        let found = self.opened.tensor(name).map_err(|error| raised(py, &error))?;
        let first = self.opened.tensors().as_ptr();
        let place = (std::ptr::from_ref(found).addr() - first.addr()) / size_of_val(found);
        Ok(self.offsets()[place])
    }

    /// A part of a tensor: of each of its first axes the first step, how many, and from one to the next.
    fn part(&self, py: Python<'_>, name: &str, steps: Vec<(u64, u64, u64)>) -> PyResult<Tensor> {
        let steps: Vec<Steps> =
            steps.into_iter().map(|(start, count, step)| Steps { start, count, step }).collect();
        Ok(Tensor(self.opened.part(name, &steps).map_err(|error| raised(py, &error))?))
    }

    /// Loads tensors, each into memory of its own. Also what the load did, as JSON. `threads` are those of
    /// the options if none are said.
    #[pyo3(signature = (tensors, stop=None, threads=None))]
    fn load(
        &self,
        py: Python<'_>,
        tensors: Vec<PyRef<'_, Tensor>>,
        stop: Option<PyRef<'_, Stop>>,
        threads: Option<usize>,
    ) -> PyResult<(Vec<Memory>, String)> {
        let tensors: Vec<checkpoint::Tensor> = tensors.iter().map(|t| t.0.clone()).collect();
        let stop = Stop::flag(stop.as_deref());
        let wait = self.wait(tensors.iter(), Wait::OrLeave);
        let (opened, told_to) = (Arc::clone(&self.opened), Arc::clone(&stop));
        let done = without_lock(py, wait, &stop, move || {
            let tensors: Vec<&checkpoint::Tensor> = tensors.iter().collect();
            opened.load_owned(&tensors, &told_to, threads)
        })?;
        let (memory, report) = done.map_err(|error| raised(py, &error))?;
        Ok((memory.into_iter().map(Memory::owned).collect(), told(&report)?))
    }

    /// Loads tensors, each into the memory that begins at its address, which must be there, writable, as
    /// long as the tensor and nobody else's until this returns.
    #[pyo3(signature = (tensors, addresses, stop=None))]
    #[allow(unsafe_code)]
    fn load_into(
        &self,
        py: Python<'_>,
        tensors: Vec<PyRef<'_, Tensor>>,
        addresses: Vec<usize>,
        stop: Option<PyRef<'_, Stop>>,
    ) -> PyResult<String> {
        if tensors.len() != addresses.len() {
            return Err(PyValueError::new_err("every tensor needs one address"));
        }
        let places = tensors.iter().zip(addresses).filter(|(tensor, _)| !tensor.0.bytes.is_empty());
        let places: Vec<(checkpoint::Tensor, usize)> =
            places.map(|(tensor, at)| (tensor.0.clone(), at)).collect();
        // No slice may begin at address 0; tensors whose memory was freed tell that one.
        if places.iter().any(|&(_, at)| at == 0) {
            return Err(PyValueError::new_err("one of the tensors to load into has no memory"));
        }
        if overlap(&places) {
            return Err(PyValueError::new_err("two of the tensors to load into share memory"));
        }
        let stop = Stop::flag(stop.as_deref());
        // The memory is the caller's, who may use it for something else from the return of this on.
        let wait = self.wait(places.iter().map(|(tensor, _)| tensor), Wait::ToTheEnd);
        let (opened, told_to) = (Arc::clone(&self.opened), Arc::clone(&stop));
        let done = without_lock(py, wait, &stop, move || {
            let wanted = places.iter().map(|(tensor, at)| {
                let len = tensor.bytes.len() as usize;
                // SAFETY: the package has seen that this memory belongs to a contiguous tensor of that
                // many bytes, and holds on to it until this returns, which is when the work has ended;
                // and it was just seen that no two of them overlap.
                (tensor, unsafe { std::slice::from_raw_parts_mut(*at as *mut u8, len) })
            });
            opened.load_until(wanted, &told_to)
        })?;
        told(&done.map_err(|error| raised(py, &error))?)
    }

    /// The bytes of a tensor where they lie in its file; or, in words, why they cannot be used there.
    fn map(&self, py: Python<'_>, tensor: &Tensor) -> PyResult<(Option<Memory>, Option<String>)> {
        let wait = if self.opened.maps_at_once(&tensor.0) { Wait::Here } else { Wait::OrLeave };
        let (opened, tensor) = (Arc::clone(&self.opened), tensor.0.clone());
        let work = move || opened.map(&tensor);
        let mapped = without_lock(py, wait, &AtomicBool::new(false), work)?;
        match mapped.map_err(|error| raised(py, &error))? {
            Ok(mapped) => Ok((Some(Memory::mapped(mapped)), None)),
            Err(why) => Ok((None, Some(why.to_string()))),
        }
    }
}

impl Opened {
    fn of(py: Python<'_>, opened: Result<loader::Opened, Error>) -> PyResult<Opened> {
        let opened = opened.map_err(|error| raised(py, &error))?;
        Ok(Opened { opened: Arc::new(opened), offsets: OnceLock::new() })
    }

    /// How loading tensors is waited for, if not in the calling thread.
    fn wait<'a>(&self, tensors: impl Iterator<Item = &'a checkpoint::Tensor>, long: Wait) -> Wait {
        let bytes: u64 = tensors.map(|tensor| tensor.bytes.len()).sum();
        if bytes <= SMALL && self.opened.is_local() { Wait::Here } else { long }
    }

    /// Whether what is read is one real safetensors file: then its own header says what stands where.
    fn is_one_safetensors(&self) -> bool {
        let image = self.opened.image();
        self.opened.format() == Format::Safetensors && image.origins().len() == 1
    }

    fn offsets(&self) -> &[(u64, u64)] {
        self.offsets.get_or_init(|| {
            let (image, tensors) = (self.opened.image(), self.opened.tensors());
            if self.is_one_safetensors() {
                // The first of them begins where the data does.
                let starts = tensors.iter().map(|tensor| tensor.bytes.reach().1);
                let data = starts.min().unwrap_or(0);
                let ranges = tensors.iter().map(|tensor| tensor.bytes.reach());
                return ranges.map(|(_, at, len)| (at - data, at - data + len)).collect();
            }
            let data = image.header_size();
            let ranges = (0..tensors.len()).map(|place| image.tensor_range(place));
            ranges.map(|range| (range.start - data, range.end - data)).collect()
        })
    }
}

/// Whether two of the places to load into share a byte.
fn overlap(places: &[(checkpoint::Tensor, usize)]) -> bool {
    let mut ranges: Vec<(usize, usize)> = places
        .iter()
        .map(|(tensor, at)| (*at, at.saturating_add(tensor.bytes.len() as usize)))
        .collect();
    ranges.sort_unstable();
    ranges.windows(2).any(|pair| pair[0].1 > pair[1].0)
}

fn told(report: &loader::Report) -> PyResult<String> {
    serde_json::to_string(report).map_err(|error| PyValueError::new_err(error.to_string()))
}
