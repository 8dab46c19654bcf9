//! What reading a pickle costs.

use std::fs;
use std::sync::{Mutex, PoisonError};

use ckptfs::checkpoint::{self, Options};
use ckptfs::image::Image;

use super::in_bounded_time;
use super::pickle::*;
use super::zip::{archive, checkpoint};

/// The most memory that reading any of these may take: each is a few megabytes at the most, and what
/// reading it should take is a small multiple of that.
const MEMORY: u64 = 512 << 20;

/// Held while memory is measured: it is measured for the whole program.
static ALONE: Mutex<()> = Mutex::new(());

/// Reads a checkpoint with that value as its pickle all the way to an image, and says whether there
/// is one. It must not take long, nor much memory.
pub fn is_shown(value: &[u8]) -> bool {
    is_shown_with(value, Options::default())
}

pub fn is_shown_with(value: &[u8], options: Options) -> bool {
    let bytes = archive(&checkpoint(&pickle(value)));
    let _alone = ALONE.lock().unwrap_or_else(PoisonError::into_inner);
    fs::write("/proc/self/clear_refs", "5").expect("the peak can be reset");
    let before = memory("VmRSS:");
    let shown = in_bounded_time(move || {
        let parsed = checkpoint::parse_bytes(&bytes, "x.pt".as_ref(), &options);
        parsed.is_ok_and(|parsed| Image::new(parsed).is_ok())
    });
    let taken = memory("VmHWM:").saturating_sub(before);
    assert!(taken < MEMORY, "{} MB were taken", taken >> 20);
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
