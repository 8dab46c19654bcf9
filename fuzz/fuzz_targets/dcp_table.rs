//! Any bytes as the `.metadata` of a folder of torch.distributed.checkpoint.
#![no_main]

use libfuzzer_sys::fuzz_target;

fuzz_target!(|bytes: &[u8]| {
    ckptfs_fuzz::read_dcp_table(bytes);
});
