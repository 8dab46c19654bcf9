//! Any bytes as a file of torch, in either of its forms: archives, and the pickles in a row.
#![no_main]

use libfuzzer_sys::fuzz_target;

fuzz_target!(|bytes: &[u8]| {
    ckptfs_fuzz::read(bytes, "x.pt");
});
