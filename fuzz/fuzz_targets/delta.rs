//! Any bytes as the index of a delta, or as the compressed changes of its tensor. Before them are a byte with the kind, and
//! two with the length of the tensor. No other bytes are ever served than those that an applier makes of them.
#![no_main]

use libfuzzer_sys::fuzz_target;

fuzz_target!(|bytes: &[u8]| {
    ckptfs_fuzz::read_delta(bytes);
});
