//! Memory and time that parsing a pickle takes.

use std::fs;
use std::sync::{Mutex, MutexGuard, PoisonError};

use ckptfs::checkpoint::{self, ParseOptions};
use ckptfs::virtual_file::VirtualFile;

use super::in_bounded_time;
use super::pickle::*;
use super::zip::{Record, archive, checkpoint};

/// Most memory that parsing any of these may take. Each file has at most a few megabytes, and parsing should take a
/// small multiple of that.
const MAX_PEAK_BYTES: u64 = 512 << 20;

static ALONE: Mutex<()> = Mutex::new(());

/// Held by each test from its beginning: memory is measured for the whole process, and the values to parse
/// are large.
pub fn alone() -> MutexGuard<'static, ()> {
    // As in the daemon: freed memory of a parse returns to the system, and is not counted for the next one.
    #[cfg(target_env = "gnu")]
    #[allow(unsafe_code)]
    // SAFETY: mallopt sets a number of the allocator, which does its own locking.
    unsafe {
        libc::mallopt(libc::M_MMAP_THRESHOLD, 1 << 20);
    }
    ALONE.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Parses a checkpoint with that pickle all the way to a virtual file, and tells whether there is one.
/// Neither may take long, nor much memory.
pub fn is_shown(value: &[u8]) -> bool {
    is_shown_with(value, ParseOptions::default())
}

pub fn is_shown_with(value: &[u8], options: ParseOptions) -> bool {
    are_shown(&[archive(&checkpoint(&pickle(value)))], options, MAX_PEAK_BYTES)
}

/// Tells whether a checkpoint with a compressed pickle is shown within that much memory.
pub fn is_shown_packed(value: &[u8], memory: u64) -> bool {
    let mut records = checkpoint(&pickle(value));
    records[0] = Record::deflated("archive/data.pkl", &pickle(value));
    are_shown(&[archive(&records)], ParseOptions::default(), memory)
}

/// Tells whether that many copies are shown, parsed concurrently within that much memory.
pub fn are_shown_together(value: &[u8], times: usize, memory: u64) -> bool {
    let bytes = archive(&checkpoint(&pickle(value)));
    are_shown(&vec![bytes; times], ParseOptions::default(), memory)
}

/// Tells whether all of these files are shown, parsed concurrently within that much memory.
fn are_shown(files: &[Vec<u8>], options: ParseOptions, most: u64) -> bool {
    assert!(ALONE.try_lock().is_err(), "the test holds `alone`");
    fs::write("/proc/self/clear_refs", "5").expect("the peak can be reset");
    let before = memory("VmRSS:");
    let files = files.to_vec();
    let shown = in_bounded_time(move || {
        let is_shown = |bytes: &[u8]| {
            let parsed = checkpoint::parse_bytes(bytes, "x.pt".as_ref(), &options);
            parsed.is_ok_and(|parsed| VirtualFile::new(parsed).is_ok())
        };
        std::thread::scope(|scope| {
            let all: Vec<_> = files.iter().map(|bytes| scope.spawn(|| is_shown(bytes))).collect();
            all.into_iter().map(|one| one.join().expect("no panic")).fold(true, |a, b| a & b)
        })
    });
    let taken = memory("VmHWM:").saturating_sub(before);
    assert!(taken < most, "{} MB were taken", taken >> 20);
    shown
}

/// Bytes of this process's memory, as the system reports them.
fn memory(what: &str) -> u64 {
    let status = fs::read_to_string("/proc/self/status").expect("readable");
    let line = status.lines().find_map(|line| line.strip_prefix(what)).expect("the line");
    line.trim().trim_end_matches(" kB").parse::<u64>().expect("a number") << 10
}

/// The tensor of six floats.
pub fn tensor() -> Vec<u8> {
    Tensor::default().bytes()
}

/// A list of `n` times the value in a memo slot.
pub fn list_of(slot: u32, n: usize) -> Vec<u8> {
    [EMPTY_LIST, MARK, &get(slot).repeat(n), APPENDS].concat()
}

/// Puts a value into a memo slot and takes it off the stack.
pub fn remember(slot: u32, value: &[u8]) -> Vec<u8> {
    [value, &put(slot), POP].concat()
}
