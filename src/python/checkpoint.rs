//! An open checkpoint, as Python sees it: what it is, and its tensors.

use std::collections::BTreeMap;
use std::ffi::OsStr;
use std::num::NonZeroUsize;
use std::path::{Path, PathBuf};
use std::sync::atomic::AtomicBool;
use std::sync::{Arc, OnceLock};

use pyo3::prelude::*;
use pyo3::types::PyList;

use crate::checkpoint::{self, Format};
use crate::loader::{self, LoadError, Route};
use crate::mount_info;
use crate::source;
use crate::threads::parallel_map;

use super::error::load_exception;
use super::interruptible::{WaitMode, without_gil};
use super::tensor::PyTensor;

/// Checkpoints that are opened at once: while one waits for the disk, others are parsed.
const MAX_CONCURRENT_OPENS: usize = 8;

/// A checkpoint whose files are open. Any number of threads load from it at once.
#[pyclass(frozen, name = "Checkpoint", module = "ckptfs._ckptfs")]
pub struct PyCheckpoint {
    checkpoint: Arc<loader::OpenCheckpoint>,
    /// By the place of each tensor, the range of its bytes in the data of the file.
    offsets: OnceLock<Vec<(u64, u64)>>,
}

/// What opening and reading take of the package's `LoadOptions`: its attributes.
pub struct PyLoadOptions {
    root: Option<String>,
    allow_partial: bool,
    follow_symlinks: bool,
    ranks: Option<u32>,
    delta_base: Option<String>,
    threads: Option<NonZeroUsize>,
    memory: Option<u64>,
    leave_cache: bool,
    cache: bool,
    views: Option<ViewsArgument>,
}

/// A recipe as the package gives it.
enum ViewsArgument {
    File(PathBuf),
    Json(String),
}

/// Not derived: what is derived interns each name at its first use in a cell that another thread may be filling. A child
/// forked meanwhile would wait for that thread for ever.
impl<'py> FromPyObject<'_, 'py> for PyLoadOptions {
    type Error = PyErr;

    fn extract(options: Borrowed<'_, 'py, PyAny>) -> PyResult<PyLoadOptions> {
        Ok(PyLoadOptions {
            root: options.getattr("root")?.extract()?,
            allow_partial: options.getattr("allow_partial")?.extract()?,
            follow_symlinks: options.getattr("follow_symlinks")?.extract()?,
            ranks: options.getattr("ranks")?.extract()?,
            delta_base: options.getattr("delta_base")?.extract()?,
            threads: options.getattr("threads")?.extract()?,
            memory: options.getattr("reading_memory")?.extract()?,
            leave_cache: options.getattr("leave_cache")?.extract()?,
            cache: options.getattr("cache")?.extract()?,
            views: match options.getattr("views")? {
                none if none.is_none() => None,
                views => Some(match views.extract::<(bool, String)>()? {
                    (true, path) => ViewsArgument::File(path.into()),
                    (false, json) => ViewsArgument::Json(json),
                }),
            },
        })
    }
}

impl PyLoadOptions {
    /// The options of the loader.
    pub fn into_options(self, py: Python<'_>) -> PyResult<loader::LoadOptions> {
        let PyLoadOptions {
            root,
            allow_partial,
            follow_symlinks,
            ranks,
            delta_base,
            threads,
            memory,
            leave_cache,
            cache,
            views,
        } = self;
        let parse = checkpoint::ParseOptions {
            root_key: root,
            allow_partial,
            follow_symlinks,
            ranks,
            delta_base: delta_base.map(|base| source::absolute_path(Path::new(&base))),
        };
        let bypass_disk_cache = !cache;
        let recipe = match views {
            None => Ok(None),
            Some(ViewsArgument::File(path)) => loader::LoadRecipe::read(&path).map(Some),
            Some(ViewsArgument::Json(json)) => loader::LoadRecipe::parse_json(&json).map(Some),
        };
        let recipe = recipe.map_err(|error| load_exception(py, &error.into()))?;
        Ok(loader::LoadOptions {
            parse,
            threads,
            buffer_bytes: memory,
            leave_cache,
            bypass_disk_cache,
            recipe: recipe.map(Arc::new),
        })
    }
}

#[pymethods]
impl PyCheckpoint {
    /// Opens what a path leads to.
    #[new]
    fn new(py: Python<'_>, path: PathBuf, options: PyLoadOptions) -> PyResult<PyCheckpoint> {
        let options = options.into_options(py)?;
        let never = AtomicBool::new(false);
        let opened = if mount_info::may_block(&path) {
            // Opening cannot be stopped: it ends, or hangs and is abandoned.
            without_gil(py, WaitMode::MayAbandon, &never, move || options.open(&path))?
        } else {
            without_gil(py, WaitMode::Inline, &never, move || options.open_outside_mounts(&path))?
        };
        PyCheckpoint::from_result(py, opened)
    }

    /// Opens a checkpoint whose bytes are in memory.
    #[staticmethod]
    fn from_bytes(py: Python<'_>, bytes: &[u8], options: PyLoadOptions) -> PyResult<PyCheckpoint> {
        let options = options.into_options(py)?;
        PyCheckpoint::from_result(py, py.detach(|| options.open_bytes(bytes)))
    }

    /// The path that it was opened by.
    #[getter]
    fn path(&self) -> &OsStr {
        self.checkpoint.path().as_os_str()
    }

    /// The names of its tensors, in the order of their bytes.
    #[getter]
    fn names<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyList>> {
        let tensors = self.checkpoint.tensors();
        PyList::new(py, self.file_order().into_iter().map(|place| &*tensors[place].name))
    }

    /// The metadata. Of one safetensors file it is that of its header, `None` if the header has none; any other
    /// checkpoint says that it is torch's.
    #[getter]
    fn metadata(&self) -> Option<BTreeMap<String, String>> {
        let virtual_file = self.checkpoint.virtual_file();
        if self.is_single_safetensors() && !virtual_file.source_has_metadata() {
            return None;
        }
        let mut metadata = self.checkpoint.metadata().clone();
        if self.is_single_safetensors() && !virtual_file.source_has_format() {
            metadata.remove("format");
        }
        Some(metadata)
    }

    /// The format of its files.
    #[getter]
    fn format(&self) -> &'static str {
        self.checkpoint.format().name()
    }

    /// The number of files that it holds open.
    #[getter]
    fn file_count(&self) -> usize {
        self.checkpoint.virtual_file().source_files().len()
    }

    /// Messages about what was chosen and what was left out.
    #[getter]
    fn notes(&self) -> Vec<String> {
        self.checkpoint.notes().to_vec()
    }

    /// A hash of the states of its files: equal means the same bytes.
    #[getter]
    fn identity(&self) -> String {
        self.checkpoint.virtual_file().identity().to_string()
    }

    /// How its bytes are reached: `plain`, `direct` with the source of a mount, or `through` a mount with the reason.
    #[getter]
    fn route(&self) -> (&'static str, Option<String>) {
        match self.checkpoint.route() {
            Route::Plain => ("plain", None),
            Route::Direct { source } => ("direct", Some(source.display().to_string())),
            Route::ThroughMount { reason } => ("through", Some(reason.clone())),
        }
    }

    /// Its tensors, in the order of `names`.
    #[getter]
    fn tensors<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyList>> {
        let tensors = self.checkpoint.tensors();
        let made =
            self.file_order().into_iter().map(|place| self.wrap_tensor(tensors[place].clone()));
        let made = made.map(|tensor| Bound::new(py, tensor)).collect::<PyResult<Vec<_>>>()?;
        PyList::new(py, made)
    }

    /// The tensor of a name.
    fn tensor(&self, py: Python<'_>, name: &str) -> PyResult<PyTensor> {
        let found = self.checkpoint.tensor(name).map_err(|error| load_exception(py, &error))?;
        Ok(self.wrap_tensor(found.clone()))
    }

    /// The range of the data: in the file itself if it is one safetensors file, otherwise in the virtual file.
    #[getter]
    fn data_range(&self) -> (u64, u64) {
        let virtual_file = self.checkpoint.virtual_file();
        if !self.is_single_safetensors() {
            return (virtual_file.header_size(), virtual_file.size());
        }
        let size = virtual_file.origins()[0].size();
        let starts =
            self.checkpoint.tensors().iter().map(|tensor| tensor.bytes.first_extent().offset);
        (starts.min().unwrap_or(size), size)
    }

    /// The range of a tensor's bytes in the data of the file.
    fn data_offsets(&self, py: Python<'_>, name: &str) -> PyResult<(u64, u64)> {
        let found = self.checkpoint.tensor(name).map_err(|error| load_exception(py, &error))?;
        let first = self.checkpoint.tensors().as_ptr();
        let place = (std::ptr::from_ref(found).addr() - first.addr()) / size_of_val(found);
        Ok(self.offsets()[place])
    }
}

/// Opens what each path leads to, several at once: a [`PyCheckpoint`] or an exception for each.
#[pyfunction]
pub fn open_each<'py>(
    py: Python<'py>,
    paths: Vec<PathBuf>,
    options: PyLoadOptions,
) -> PyResult<Vec<Bound<'py, PyAny>>> {
    let options = options.into_options(py)?;
    let may_block = paths.iter().any(|path| mount_info::may_block(path));
    let wait = if may_block { WaitMode::MayAbandon } else { WaitMode::Inline };
    let work = move || parallel_map(&paths, MAX_CONCURRENT_OPENS, |path| options.open(path));
    let opened = without_gil(py, wait, &AtomicBool::new(false), work)?;
    let made = opened.into_iter().map(|opened| match PyCheckpoint::from_result(py, opened) {
        Ok(opened) => Ok(Bound::new(py, opened)?.into_any()),
        Err(error) => Ok(error.into_value(py).into_bound(py).into_any()),
    });
    made.collect()
}

impl PyCheckpoint {
    fn from_result(
        py: Python<'_>,
        opened: Result<loader::OpenCheckpoint, LoadError>,
    ) -> PyResult<PyCheckpoint> {
        let opened = opened.map_err(|error| load_exception(py, &error))?;
        Ok(PyCheckpoint { checkpoint: Arc::new(opened), offsets: OnceLock::new() })
    }

    /// The places of its tensors, in the order of their bytes.
    fn file_order(&self) -> Vec<usize> {
        let tensors = self.checkpoint.tensors();
        let mut places: Vec<usize> = (0..tensors.len()).collect();
        if self.is_single_safetensors() {
            let offsets = self.offsets();
            places.sort_by_key(|&place| (offsets[place], &*tensors[place].name));
        }
        places
    }

    fn wrap_tensor(&self, tensor: checkpoint::Tensor) -> PyTensor {
        PyTensor { checkpoint: Arc::clone(&self.checkpoint), tensor }
    }

    /// Whether it is one real safetensors file, whose own header has the places of tensors.
    fn is_single_safetensors(&self) -> bool {
        let virtual_file = self.checkpoint.virtual_file();
        self.checkpoint.format() == Format::Safetensors
            && virtual_file.origins().len() == 1
            && virtual_file.recipe().is_none()
    }

    fn offsets(&self) -> &[(u64, u64)] {
        self.offsets.get_or_init(|| {
            let (virtual_file, tensors) =
                (self.checkpoint.virtual_file(), self.checkpoint.tensors());
            if self.is_single_safetensors() {
                // The data begins with the first of them.
                let starts = tensors.iter().map(|tensor| tensor.bytes.first_extent().offset);
                let data = starts.min().unwrap_or(0);
                let ranges = tensors.iter().map(|tensor| tensor.bytes.first_extent());
                return ranges
                    .map(|run| (run.offset - data, run.offset - data + run.len))
                    .collect();
            }
            let data = virtual_file.header_size();
            let ranges = (0..tensors.len()).map(|place| virtual_file.tensor_range(place));
            ranges.map(|range| (range.start - data, range.end - data)).collect()
        })
    }
}
