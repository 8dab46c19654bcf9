//! A whole file in memory.
//!
//! In: an [`OpenFile`]. Out: its bytes as [`Whole`]: an index of many megabytes is read in less time than its
//! memory would take to be had in ordinary pages.

use std::ops::{Deref, DerefMut};

use memmap2::MmapMut;

use crate::huge_pages;

use super::{OpenFile, ReadAt, SourceError};

/// The bytes of a file.
pub struct FileBytes {
    map: Option<MmapMut>,
    len: usize,
}

impl Deref for FileBytes {
    type Target = [u8];

    fn deref(&self) -> &[u8] {
        self.map.as_deref().map_or(&[], |map| &map[..self.len])
    }
}

impl DerefMut for FileBytes {
    fn deref_mut(&mut self) -> &mut [u8] {
        self.map.as_deref_mut().map_or(&mut [], |map| &mut map[..self.len])
    }
}

impl OpenFile {
    /// All of it, which the caller has seen to be no more than it wants.
    pub fn read_whole(&self) -> Result<FileBytes, SourceError> {
        let Some(len) = usize::try_from(self.size()).ok().filter(|&len| len > 0) else {
            return Ok(FileBytes { map: None, len: 0 });
        };
        // To the end of its last huge page, which is soon gone again.
        let map = huge_pages::allocate_zeroed(if len < huge_pages::HUGE_PAGE_BYTES {
            len
        } else {
            len.next_multiple_of(huge_pages::HUGE_PAGE_BYTES)
        });
        let mut map =
            map.map_err(|e| SourceError::io(&self.file().path(), "have memory for it", e))?;
        self.read_exact_at(&mut map[..len], 0)?;
        Ok(FileBytes { map: Some(map), len })
    }
}
