//! A whole file in memory.
//!
//! In: an [`OpenFile`]. Out: its bytes as [`Whole`], in huge pages where the system has them: an index of
//! many megabytes is read in less time than its pages of 4 KiB would take to be had.

use std::ops::Deref;

use memmap2::{Advice, MmapMut};

use super::{Error, OpenFile, ReadAt};

/// The bytes of a file.
pub struct Whole(Option<MmapMut>);

impl Deref for Whole {
    type Target = [u8];

    fn deref(&self) -> &[u8] {
        self.0.as_deref().unwrap_or_default()
    }
}

impl OpenFile {
    /// All of it, which the caller has seen to be no more than it wants.
    pub fn read_whole(&self) -> Result<Whole, Error> {
        let Some(len) = usize::try_from(self.size()).ok().filter(|&len| len > 0) else {
            return Ok(Whole(None));
        };
        let map = MmapMut::map_anon(len);
        let mut map = map.map_err(|e| Error::io(&self.file().path(), "have memory for it", e))?;
        // Where the system has none, it is ordinary memory.
        let _ = map.advise(Advice::HugePage);
        self.read_exact_at(&mut map, 0)?;
        Ok(Whole(Some(map)))
    }
}
