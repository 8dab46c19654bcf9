//! Any bytes as a torch file, in its zip form or its older form of pickles in a row.
#![no_main]

use libfuzzer_sys::fuzz_target;

fuzz_target!(|bytes: &[u8]| {
    ckptfs_fuzz::read(bytes, "x.pt");
});
