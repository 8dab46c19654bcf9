//! Bytes on disk: where they are, whether they are still the same, and how to read them.
//!
//! In: a path the user typed, or a path found inside a directory they typed.
//! Out: a [`FileReport`] (where it lies and its [`FileIdentity`], no descriptor held) and, once opened,
//! an [`OpenFile`] that reads at any offset from any thread.
//!
//! A path that somebody else wrote (an index, a symbolic link) is opened beneath its [`Root`]
//! by the kernel (`openat2`), so that it cannot lead out of the directory that the user named.

mod beneath;
mod cachestat;
mod direct;
mod error;
mod file;
mod filesystem;
mod location;
mod metadata;
mod nonresident;
mod read_file;
mod read_strategy;
mod residency;
mod root;
mod settled;

use direct::DirectReadOutcome;
pub use direct::{DIRECT_ALIGNMENT_BYTES, DirectFile};
pub use error::SourceError;
pub use file::{FileIdentity, FileState, OpenFile, SourceFile};
pub use location::UserPath;
pub use metadata::{FileKind, FileMetadata};
pub use nonresident::{evict, to_whole_pages};
pub use read_file::FileBytes;
pub use read_strategy::{ReadMode, ReadStrategy};
pub use residency::READAHEAD_MARGIN_BYTES;
use residency::Residency;
pub use root::{DirEntry, LinkPolicy, ResolvedPath, Root, is_directory, is_hub_repository};
pub use settled::is_past_clock_step;

/// Random access to a fixed number of bytes: a file, or memory.
pub trait ReadAt: Send + Sync {
    /// How many bytes there are.
    fn size(&self) -> u64;
    /// Fills `buf` from `offset`; anything less than the whole of it is an error.
    fn read_exact_at(&self, buf: &mut [u8], offset: u64) -> Result<(), SourceError>;
}

impl ReadAt for [u8] {
    fn size(&self) -> u64 {
        self.len() as u64
    }

    fn read_exact_at(&self, buf: &mut [u8], offset: u64) -> Result<(), SourceError> {
        let bytes = usize::try_from(offset)
            .ok()
            .and_then(|start| self.get(start..start.checked_add(buf.len())?))
            .ok_or_else(|| SourceError::Truncated { path: "memory".into(), offset })?;
        buf.copy_from_slice(bytes);
        Ok(())
    }
}

impl ReadAt for Vec<u8> {
    fn size(&self) -> u64 {
        self.as_slice().size()
    }

    fn read_exact_at(&self, buf: &mut [u8], offset: u64) -> Result<(), SourceError> {
        self.as_slice().read_exact_at(buf, offset)
    }
}

impl ReadAt for std::sync::Arc<[u8]> {
    fn size(&self) -> u64 {
        self.as_ref().size()
    }

    fn read_exact_at(&self, buf: &mut [u8], offset: u64) -> Result<(), SourceError> {
        self.as_ref().read_exact_at(buf, offset)
    }
}
