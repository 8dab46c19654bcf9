//! Where a load delivers bytes: in place, through a staging buffer, or past the host's memory.
//!
//! Readers know of the targets only what a [`Sink`] says of them. The sink of host memory is a [`BufferPool`].

use std::ops::Range;
use std::path::Path;
use std::sync::Mutex;

use memmap2::MmapMut;

use crate::huge_pages;
use crate::source::{OpenFile, SourceError};
use crate::threads::lock;
use crate::virtual_file::MAX_EXTENT_BYTES;

use super::error::LoadError;
use super::memory::HostTarget;

/// Bytes of a staging buffer: an extent. What is read around an extent for alignment does not lead out of it.
pub const BUFFER_BYTES: usize = MAX_EXTENT_BYTES as usize;

/// What a load passes bytes through, to targets of a type.
pub trait Sink<T>: Sync {
    /// Whether reads can fill every target, so that extents need not fit in a staging buffer.
    const IS_HOST_MEMORY: bool = false;

    /// The memory of a target, if reads can fill it. The first call may write zeros.
    fn host_memory(target: &mut T) -> Option<&mut [u8]>;

    /// Fills a staging buffer and copies it out to the targets. The buffer has [`BUFFER_BYTES`], is aligned for
    /// direct reads, and holds what lies from `start` on. If `fill` returns `None` nothing is copied.
    fn stage<W>(
        &self,
        path: &Path,
        start: u64,
        targets: &mut [(u64, T)],
        fill: impl FnOnce(&mut [u8]) -> Result<Option<W>, SourceError>,
    ) -> Result<Option<W>, LoadError>;

    /// Reads an extent of a file past the host's memory, and checks that the file is unchanged before it hands
    /// the bytes on. Returns whether it did.
    fn read_to_device(
        &self,
        _path: &Path,
        _file: &OpenFile,
        _range: &Range<u64>,
        _targets: &mut [(u64, T)],
    ) -> Result<bool, LoadError> {
        Ok(false)
    }

    /// Runs all the work of one reader thread.
    fn run_reader<R>(&self, work: impl FnOnce() -> R) -> R {
        work()
    }

    /// Called when the load is over and its threads have ended.
    fn finish(&self) {}
}

/// The memory of all targets, if reads can fill all of them.
pub fn in_place_targets<T, S: Sink<T>>(targets: &mut [(u64, T)]) -> Option<Vec<(u64, &mut [u8])>> {
    targets.iter_mut().map(|(at, target)| Some((*at, S::host_memory(target)?))).collect()
}

/// Copies what was read from `start` on to the targets.
pub fn copy_out(bytes: &[u8], start: u64, targets: &mut [(u64, &mut [u8])]) {
    for (at, target) in targets {
        let offset = (*at - start) as usize;
        target.copy_from_slice(&bytes[offset..offset + target.len()]);
    }
}

/// Page-aligned staging buffers that are used again.
///
/// A disk reads into huge pages faster: one request to it names at most a few hundred places, which of ordinary
/// pages are no megabyte.
#[derive(Debug, Default)]
pub struct BufferPool {
    free: Mutex<Vec<MmapMut>>,
}

impl BufferPool {
    fn with_buffer<T>(&self, work: impl FnOnce(&mut [u8]) -> T) -> std::io::Result<T> {
        let free = lock(&self.free).pop();
        let mut buffer = match free {
            Some(buffer) => buffer,
            None => huge_pages::allocate_zeroed(BUFFER_BYTES)?,
        };
        let result = work(&mut buffer);
        lock(&self.free).push(buffer);
        Ok(result)
    }
}

impl Sink<HostTarget<'_>> for BufferPool {
    const IS_HOST_MEMORY: bool = true;

    fn host_memory<'t>(target: &'t mut HostTarget<'_>) -> Option<&'t mut [u8]> {
        Some(target.prepare())
    }

    fn stage<W>(
        &self,
        path: &Path,
        start: u64,
        targets: &mut [(u64, HostTarget<'_>)],
        fill: impl FnOnce(&mut [u8]) -> Result<Option<W>, SourceError>,
    ) -> Result<Option<W>, LoadError> {
        let staged = self.with_buffer(|buffer| {
            let filled = fill(buffer)?;
            if filled.is_some() {
                for (at, target) in targets {
                    copy_out(buffer, start, &mut [(*at, target.prepare())]);
                }
            }
            Ok::<_, SourceError>(filled)
        });
        let out_of_memory =
            |_| LoadError::OutOfMemory { path: path.to_path_buf(), bytes: BUFFER_BYTES as u64 };
        Ok(staged.map_err(out_of_memory)??)
    }

    /// Gives the buffers back to the system.
    fn finish(&self) {
        let free = std::mem::take(&mut *lock(&self.free));
        drop(free);
    }
}
