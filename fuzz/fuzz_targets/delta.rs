//! A byte with the kind, two with the length of a tensor, then the index of a delta or the compressed changes of the tensor.
//! No other bytes are served than those that a trainer's engine makes of them.
#![no_main]

use libfuzzer_sys::fuzz_target;

fuzz_target!(|bytes: &[u8]| {
    ckptfs_fuzz::read_delta(bytes);
});
