//! Loads tensors from a checkpoint straight into memory, whatever its format, mounted or not.
//!
//! In: a path: a checkpoint, a directory that holds one, the name that a mount would show, or a file of
//! a mount. Out: an [`OpenCheckpoint`], which loads whole tensors, parts of them, or many at once; [`load_many`] loads those of several. A file of a
//! mount is not read through it but from where its bytes lie, if that can be seen and is the same.
//!
//! ```no_run
//! # fn main() -> Result<(), Box<dyn std::error::Error>> {
//! use std::path::Path;
//!
//! let model = ckptfs::open(Path::new("models/llama"))?;
//! for tensor in model.tensors() {
//!     println!("{} {:?} {:?}", tensor.name, tensor.dtype, tensor.shape);
//! }
//! let weight = model.load(model.tensor("lm_head.weight")?)?;
//! println!("{} bytes", weight.len());
//! # Ok(())
//! # }
//! ```

mod batch;
mod error;
mod execute;
mod handle;
mod memory;
mod mmap;
mod plan;
mod read_extent;
mod report;
mod resolve_mount;
mod sink;
mod stream;

use std::num::NonZeroUsize;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use crate::checkpoint;
use crate::view;

#[cfg(feature = "cuda")]
pub(crate) use batch::load_with_sink;
pub use batch::{LoadRequest, load_many, load_many_owned};
pub use error::LoadError;
#[cfg(feature = "cuda")]
pub(crate) use execute::BUFFER_BYTES;
pub use handle::OpenCheckpoint;
pub use memory::TensorBuffer;
pub use mmap::{MapRefusal, MappedTensor};
#[cfg(feature = "cuda")]
pub(crate) use plan::Target;
pub use report::LoadReport;
use resolve_mount::ResolvedCheckpoint;
#[cfg(feature = "cuda")]
pub(crate) use sink::Sink;

/// How a checkpoint is opened and read.
#[derive(Clone, Debug, Default)]
pub struct LoadOptions {
    /// How it is parsed.
    pub parse: checkpoint::ParseOptions,
    /// Threads that read at once; by default as many as keep a fast disk busy.
    pub threads: Option<NonZeroUsize>,
    /// Bytes that reading may hold besides what it reads into; a buffer at the least, and as many
    /// threads as have one.
    pub buffer_bytes: Option<u64>,
    /// Leave in the page cache only what was there before.
    pub leave_cache: bool,
}

/// How the bytes of an opened checkpoint are reached.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Route {
    /// They lie where the path leads.
    Plain,
    /// The path is one of a mount, and they are read from where the mount has them.
    Direct {
        /// There.
        source: PathBuf,
    },
    /// The path is one of a mount, and they are read through it.
    ThroughMount {
        /// Why.
        reason: String,
    },
}

/// Threads that read at once: while some copy or wait for fresh memory, the others keep the disk busy.
const DEFAULT_THREADS: usize = 16;

impl LoadOptions {
    fn concurrency(&self) -> execute::Concurrency {
        let threads = self.threads.map_or(DEFAULT_THREADS, NonZeroUsize::get);
        let buffers =
            self.buffer_bytes.map_or(u64::MAX, |memory| memory / execute::BUFFER_BYTES as u64);
        let most = usize::try_from(buffers).unwrap_or(usize::MAX).max(1);
        execute::Concurrency {
            threads: threads.min(most),
            max_threads: most,
            leave_cache: self.leave_cache,
        }
    }

    fn check_memory(&self, path: &Path) -> Result<(), LoadError> {
        let (given, needs) = (self.buffer_bytes.unwrap_or(u64::MAX), execute::BUFFER_BYTES as u64);
        match given < needs {
            true => Err(LoadError::MemoryLimit { path: path.to_path_buf(), given, needs }),
            false => Ok(()),
        }
    }

    /// Opens a checkpoint.
    pub fn open(&self, path: &Path) -> Result<OpenCheckpoint, LoadError> {
        self.check_memory(path)?;
        self.open_resolved(path, resolve_mount::resolve(path, &self.parse)?)
    }

    /// The same at a path that lies on a filesystem of this machine's own, and so on no mount of ours, as
    /// [`mount_info::may_keep_waiting`](crate::mount_info::may_keep_waiting) tells.
    pub fn open_outside_mounts(&self, path: &Path) -> Result<OpenCheckpoint, LoadError> {
        self.check_memory(path)?;
        self.open_resolved(
            path,
            resolve_mount::lay_out(view::open(path, &self.parse)?, Route::Plain)?,
        )
    }

    /// Opens a checkpoint whose bytes are in memory; they are copied.
    pub fn open_bytes(&self, bytes: &[u8]) -> Result<OpenCheckpoint, LoadError> {
        let path = Path::new("bytes in memory");
        self.check_memory(path)?;
        let checkpoint = checkpoint::parse_bytes(bytes, path, &self.parse)?;
        self.open_resolved(path, resolve_mount::lay_out(checkpoint, Route::Plain)?)
    }

    fn open_resolved(
        &self,
        path: &Path,
        found: ResolvedCheckpoint,
    ) -> Result<OpenCheckpoint, LoadError> {
        let ResolvedCheckpoint { virtual_file, open_file: opened, format, notes, route } = found;
        let reader = Arc::new(virtual_file).open_with_file(opened)?;
        Ok(OpenCheckpoint::new(path, format, notes, reader, route, self))
    }
}

/// Opens a checkpoint as it is by default.
pub fn open(path: &Path) -> Result<OpenCheckpoint, LoadError> {
    LoadOptions::default().open(path)
}

impl From<checkpoint::CheckpointError> for LoadError {
    fn from(error: checkpoint::CheckpointError) -> Self {
        LoadError::View(view::ViewError::Checkpoint(error))
    }
}
