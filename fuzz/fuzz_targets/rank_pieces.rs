//! Any bytes as the pickles of the files of two ranks: two bytes with the length of the first, and both in a row.
#![no_main]

use libfuzzer_sys::fuzz_target;

fuzz_target!(|bytes: &[u8]| {
    let Some((len, pickles)) = bytes.split_first_chunk::<2>() else { return };
    let len = usize::from(u16::from_le_bytes(*len)).min(pickles.len());
    let (first, second) = pickles.split_at(len);
    ckptfs_fuzz::read_ranks(&[first, second]);
});
