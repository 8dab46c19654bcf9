//! What reading a pickle costs.

use std::fs;
use std::sync::{Mutex, MutexGuard, PoisonError};

use ckptfs::checkpoint::{self, ParseOptions};
use ckptfs::virtual_file::VirtualFile;

use super::in_bounded_time;
use super::pickle::*;
use super::zip::{Record, archive, checkpoint};

/// The most memory that reading any of these may take: each is a few megabytes at the most, and what
/// reading it should take is a small multiple of that.
const MEMORY: u64 = 512 << 20;

static ALONE: Mutex<()> = Mutex::new(());

/// Held by each test from its beginning: memory is measured for the whole process, and values to read are large.
pub fn alone() -> MutexGuard<'static, ()> {
    ALONE.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Reads a checkpoint with that value as its pickle all the way to a virtual file, and says whether there
/// is one. It must not take long, nor much memory.
pub fn is_shown(value: &[u8]) -> bool {
    is_shown_with(value, ParseOptions::default())
}

pub fn is_shown_with(value: &[u8], options: ParseOptions) -> bool {
    are_shown(&[archive(&checkpoint(&pickle(value)))], options, MEMORY)
}

/// Whether a checkpoint with a compressed pickle is shown within that much memory.
pub fn is_shown_packed(value: &[u8], memory: u64) -> bool {
    let mut records = checkpoint(&pickle(value));
    records[0] = Record::deflated("archive/data.pkl", &pickle(value));
    are_shown(&[archive(&records)], ParseOptions::default(), memory)
}

/// Whether that many copies are shown, parsed concurrently within that much memory.
pub fn are_shown_together(value: &[u8], times: usize, memory: u64) -> bool {
    let bytes = archive(&checkpoint(&pickle(value)));
    are_shown(&vec![bytes; times], ParseOptions::default(), memory)
}

/// Whether all of these files are shown, parsed concurrently within that much memory.
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

/// What the system says of this program's memory, in bytes.
fn memory(what: &str) -> u64 {
    let status = fs::read_to_string("/proc/self/status").expect("readable");
    let line = status.lines().find_map(|line| line.strip_prefix(what)).expect("the line");
    line.trim().trim_end_matches(" kB").parse::<u64>().expect("a number") << 10
}

/// The tensor of six floats.
pub fn tensor() -> Vec<u8> {
    Tensor::default().bytes()
}

/// `n` times the value remembered in a slot, in a list.
pub fn list_of(slot: u32, n: usize) -> Vec<u8> {
    [EMPTY_LIST, MARK, &get(slot).repeat(n), APPENDS].concat()
}

/// A value that is remembered and taken off the stack.
pub fn remember(slot: u32, value: &[u8]) -> Vec<u8> {
    [value, &put(slot), POP].concat()
}
