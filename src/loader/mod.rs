//! Loads tensors from a checkpoint straight into memory, whatever its format, mounted or not.
//!
//! A path is a checkpoint, a directory that holds one, the name that a mount would show, or a file of a mount.
//! It is opened as an [`OpenCheckpoint`], which loads whole tensors, slices of them, or many at once;
//! [`load_many`] loads those of several. A file of a mount is read at its source and not through the mount, if
//! the source can be seen and is the same.
//!
//! A load is resolved (`resolve_mount`), planned (`plan`) and executed (`execute`), and its bytes go to a
//! `sink`.
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

mod error;
mod execute;
mod handle;
mod mmap;
mod plan;
mod report;
mod resolve_mount;
mod sink;
mod stream;
mod tensor_buffer;

use std::num::NonZeroUsize;
use std::path::Path;
use std::sync::Arc;

use crate::checkpoint::{self, ParseOptions};
use crate::view;
use crate::virtual_file::VirtualFileReader;

pub use error::LoadError;
use execute::Concurrency;
#[cfg(feature = "cuda")]
pub(crate) use handle::load_with_sink;
pub use handle::{LoadRequest, OpenCheckpoint, load_many, load_many_owned};
pub use mmap::{MapRefusal, MappedTensor};
#[cfg(feature = "cuda")]
pub(crate) use plan::Target;
pub use report::LoadReport;
use resolve_mount::ResolvedCheckpoint;
pub use resolve_mount::Route;
use sink::BUFFER_BYTES as STAGING_BYTES;
#[cfg(feature = "cuda")]
pub(crate) use sink::{BUFFER_BYTES, Sink};
pub use tensor_buffer::TensorBuffer;

/// How a checkpoint is opened and read.
#[derive(Clone, Debug, Default)]
pub struct LoadOptions {
    /// How it is parsed.
    pub parse: ParseOptions,
    /// Threads that read at once; by default as many as keep a fast disk busy.
    pub threads: Option<NonZeroUsize>,
    /// Bytes of staging buffers: at least one buffer. They limit the threads to one per buffer.
    pub buffer_bytes: Option<u64>,
    /// Leave in the page cache only what was there before.
    pub leave_cache: bool,
}

/// Threads that read at once: while some copy or wait for fresh memory, the others keep the disk busy.
const DEFAULT_THREADS: usize = 16;

impl LoadOptions {
    /// Opens a checkpoint.
    pub fn open(&self, path: &Path) -> Result<OpenCheckpoint, LoadError> {
        self.open_resolved(path, || resolve_mount::resolve(path, &self.parse))
    }

    /// Opens a checkpoint at a path that is on a filesystem of this machine's own, and so on no mount of ours, as
    /// [`mount_info::may_block`](crate::mount_info::may_block) tells.
    pub fn open_outside_mounts(&self, path: &Path) -> Result<OpenCheckpoint, LoadError> {
        self.open_resolved(path, || {
            ResolvedCheckpoint::lay_out(view::open(path, &self.parse)?, Route::Plain)
        })
    }

    /// Opens a checkpoint whose bytes are in memory; they are copied.
    pub fn open_bytes(&self, bytes: &[u8]) -> Result<OpenCheckpoint, LoadError> {
        let path = Path::new("bytes in memory");
        self.open_resolved(path, || {
            let checkpoint = checkpoint::parse_bytes(bytes, path, &self.parse)?;
            ResolvedCheckpoint::lay_out(checkpoint, Route::Plain)
        })
    }

    fn open_resolved(
        &self,
        path: &Path,
        resolve: impl FnOnce() -> Result<ResolvedCheckpoint, LoadError>,
    ) -> Result<OpenCheckpoint, LoadError> {
        let concurrency = self.concurrency(path)?;
        let ResolvedCheckpoint { virtual_file, open_file, format, notes, route } = resolve()?;
        let reader = VirtualFileReader::open_with(&Arc::new(virtual_file), open_file)?;
        Ok(OpenCheckpoint::new(path, format, notes, reader, route, concurrency))
    }

    fn concurrency(&self, path: &Path) -> Result<Concurrency, LoadError> {
        let LoadOptions { parse: _, threads, buffer_bytes, leave_cache } = self;
        let (allowed, needed) = (buffer_bytes.unwrap_or(u64::MAX), STAGING_BYTES as u64);
        if allowed < needed {
            return Err(LoadError::MemoryLimit { path: path.to_path_buf(), allowed, needed });
        }
        let threads = threads.map_or(DEFAULT_THREADS, NonZeroUsize::get);
        let max_threads = usize::try_from(allowed / needed).unwrap_or(usize::MAX);
        let threads = threads.min(max_threads);
        Ok(Concurrency { threads, max_threads, leave_cache: *leave_cache })
    }
}

/// Opens a checkpoint with the default options.
pub fn open(path: &Path) -> Result<OpenCheckpoint, LoadError> {
    LoadOptions::default().open(path)
}
