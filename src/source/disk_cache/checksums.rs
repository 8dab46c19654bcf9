//! The checksums of an object, in one file beside its blocks: 4 bytes for each 16 KiB of the object.
//!
//! They are a function of the object's version, so all blocks and processes write the same ones. One that was never
//! written, or is lost, is 0, which no bytes have.

use std::fs::File;
use std::io;
use std::ops::Range;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex};

use rustix::fs::{CWD, Mode, OFlags, openat};
use rustix::io::Errno;
use xxhash_rust::xxh3::Xxh3;

use crate::source::file_limit::open_within_limit;
use crate::source::local::read_available;
use crate::threads::lock_holding_forks;

use super::ObjectId;

/// The name of the file in the folder of an object.
pub const CHECKSUMS_NAME: &str = "checksums";

/// Bytes of a piece, which one checksum covers: the least that a read compares. Pieces begin at multiples of this in an object.
pub const CHECKED_BYTES: u64 = 16 << 10;

/// The number of this layout of the cache. Another one has other checksums.
const LAYOUT: u64 = 5;

/// Bytes of a checksum.
const CHECKSUM_BYTES: usize = 4;

/// The numbers of the pieces that a range lies in.
pub fn pieces_of(range: &Range<u64>) -> Range<u64> {
    range.start / CHECKED_BYTES..range.end.div_ceil(CHECKED_BYTES)
}

/// Computes the checksums of an object's pieces, whose bytes arrive in parts: 32 bits of XXH3-64. The same bytes have
/// another one in another version of the object, and at another place in it.
pub struct ChecksumHasher(Xxh3);

impl ChecksumHasher {
    pub fn new(object: &ObjectId) -> ChecksumHasher {
        let [a, b, c, d, e, f, g, h, ..] = object.0;
        ChecksumHasher(Xxh3::with_seed(u64::from_le_bytes([a, b, c, d, e, f, g, h]) ^ LAYOUT))
    }

    pub fn update(&mut self, bytes: &[u8]) {
        self.0.update(bytes);
    }

    /// The checksum of the bytes so far, which end at an offset of the object. The next bytes begin another.
    pub fn take(&mut self, end: u64) -> u32 {
        // An odd factor, of which no two bits are alike: each bit of the offset changes many of the upper ones.
        let of_place = end.wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 32;
        let checksum = (self.0.digest() ^ of_place) as u32;
        self.0.reset();
        checksum.max(1)
    }
}

/// The checksums of an object.
#[derive(Debug)]
pub struct ObjectChecksums {
    object: ObjectId,
    path: PathBuf,
    /// The file for reads, from the first one on.
    opened: Mutex<Option<Arc<File>>>,
}

impl ObjectChecksums {
    /// The checksums of an object, in its folder.
    pub fn new(object: ObjectId, folder: &Path) -> ObjectChecksums {
        ObjectChecksums { object, path: folder.join(CHECKSUMS_NAME), opened: Mutex::default() }
    }

    pub fn hasher(&self) -> ChecksumHasher {
        ChecksumHasher::new(&self.object)
    }

    /// Reads the checksums of pieces.
    pub fn read(&self, pieces: Range<u64>) -> io::Result<Vec<u32>> {
        let mut bytes = vec![0; (pieces.end - pieces.start) as usize * CHECKSUM_BYTES];
        if let Some(file) = self.open()? {
            // What lies behind the end of the file was never written.
            read_available(&file, &mut bytes, pieces.start * CHECKSUM_BYTES as u64)?;
        }
        let (checksums, _) = bytes.as_chunks();
        Ok(checksums.iter().map(|&checksum| u32::from_le_bytes(checksum)).collect())
    }

    /// Writes the checksums of pieces from a number on.
    pub fn write(&self, first: u64, checksums: &[u32]) -> io::Result<()> {
        if checksums.is_empty() {
            return Ok(());
        }
        let bytes: Vec<u8> = checksums.iter().flat_map(|checksum| checksum.to_le_bytes()).collect();
        let file = self.open_with(OFlags::WRONLY | OFlags::CREATE)?;
        file.write_all_at(&bytes, first * CHECKSUM_BYTES as u64)
    }

    /// Closes the file: another may have its name.
    pub fn close(&self) {
        *lock_holding_forks(&self.opened) = None;
    }

    /// The file for reads; `None` if there is none.
    fn open(&self) -> io::Result<Option<Arc<File>>> {
        if let Some(file) = &*lock_holding_forks(&self.opened) {
            return Ok(Some(Arc::clone(file)));
        }
        let file = match self.open_with(OFlags::RDONLY) {
            Err(Errno::NOENT) => return Ok(None),
            file => Arc::new(file?),
        };
        Ok(Some(Arc::clone(lock_holding_forks(&self.opened).get_or_insert(file))))
    }

    fn open_with(&self, flags: OFlags) -> Result<File, Errno> {
        let flags = flags | OFlags::NOFOLLOW | OFlags::NONBLOCK | OFlags::CLOEXEC;
        let mode = Mode::RUSR | Mode::WUSR;
        open_within_limit(|| openat(CWD, &self.path, flags, mode)).map(File::from)
    }
}
