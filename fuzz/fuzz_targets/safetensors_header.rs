//! Any bytes as a safetensors file: what is accepted here, the reference reader accepts.
#![no_main]

use libfuzzer_sys::fuzz_target;

fuzz_target!(|bytes: &[u8]| {
    let accepted = ckptfs::checkpoint::parse_header(&bytes.to_vec()).is_ok();
    if accepted {
        safetensors::SafeTensors::deserialize(bytes).expect("accepted by the reference reader");
    }
    ckptfs_fuzz::read(bytes, "x.safetensors");
});
