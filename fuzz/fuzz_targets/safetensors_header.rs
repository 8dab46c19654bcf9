//! Any bytes as a safetensors file: the reference reader accepts each file that is accepted here.
#![no_main]

use libfuzzer_sys::fuzz_target;

fuzz_target!(|bytes: &[u8]| {
    let path = std::path::Path::new("x.safetensors");
    let read = ckptfs::checkpoint::parse_bytes(bytes, path, &Default::default());
    if read.is_ok_and(|read| read.format == ckptfs::checkpoint::Format::Safetensors) {
        safetensors::SafeTensors::deserialize(bytes).expect("accepted by the reference reader");
    }
    ckptfs_fuzz::read(bytes, "x.safetensors");
});
