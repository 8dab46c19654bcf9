//! Any bytes as the pickle of an otherwise valid archive.
#![no_main]

use libfuzzer_sys::fuzz_target;

fuzz_target!(|bytes: &[u8]| {
    ckptfs_fuzz::read(&ckptfs_fuzz::archive(bytes), "x.pt");
});
