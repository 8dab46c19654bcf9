//! A tensor that lies in order in a file can be used where it lies. The bytes are those that a load gives, and writes
//! stay in the process. A tensor that cannot be mapped is refused with a reason.

use std::fs;
use std::num::NonZeroUsize;

use crate::common::samples::{all_samples, write_sample};
use ckptfs::loader::{LoadError, LoadOptions, MapRefusal, MappedTensor};

#[allow(unsafe_code)]
fn bytes(mapped: &mut MappedTensor) -> &mut [u8] {
    // SAFETY: the memory lives as long as the mapping, may be written, and only this test uses it.
    unsafe { std::slice::from_raw_parts_mut(mapped.as_mut_ptr(), mapped.len()) }
}

#[test]
fn a_mapping_equals_a_load_and_writes_stay_private() {
    let mut in_place = 0;
    for (name, (_folder, path)) in all_samples() {
        let opened = ckptfs::open(&path).unwrap();
        for tensor in opened.tensors() {
            let Ok(mut mapped) = opened.map(tensor).unwrap() else { continue };
            assert_eq!(mapped.as_mut_ptr().addr() % (tensor.dtype.bits() as usize).div_ceil(8), 0);
            assert!(bytes(&mut mapped)[..] == opened.load(tensor).unwrap()[..], "{name}");
            bytes(&mut mapped).fill(7);
            assert!(
                bytes(&mut mapped)[..] != opened.load(tensor).unwrap()[..] || mapped.is_empty()
            );
            in_place += 1;
        }
    }
    assert!(in_place > 10);
}

/// A safetensors file in which one tensor begins at an odd byte.
fn odd() -> Vec<u8> {
    let header = r#"{"a":{"dtype":"U8","shape":[1],"data_offsets":[0,1]},"b":{"dtype":"F32","shape":[1],"data_offsets":[1,5]}}"#;
    assert!(header.len().is_multiple_of(2));
    [&(header.len() as u64).to_le_bytes()[..], header.as_bytes(), &[1, 2, 3, 4, 5]].concat()
}

#[test]
fn tensors_that_cannot_be_mapped_are_refused_with_a_reason() {
    let mut reasons = Vec::new();
    for (_, (_folder, path)) in all_samples() {
        let opened = ckptfs::open(&path).unwrap();
        reasons.extend(opened.tensors().iter().filter_map(|t| opened.map(t).unwrap().err()));
    }
    assert!(reasons.contains(&MapRefusal::NotContiguous), "{reasons:?}");
    let (_folder, path) = write_sample(&odd());
    let opened = ckptfs::open(&path).unwrap();
    let map = |name| opened.map(opened.tensor(name).unwrap()).unwrap();
    assert_eq!(map("b").err(), Some(MapRefusal::Misaligned));
    assert_eq!(map("a").unwrap().len(), 1);
    let in_memory = LoadOptions::default().open_bytes(&odd()).unwrap();
    let why = in_memory.map(in_memory.tensor("a").unwrap()).unwrap().err();
    assert_eq!(why, Some(MapRefusal::NotInFile));
    assert_eq!(in_memory.load(in_memory.tensor("b").unwrap()).unwrap()[..], [2, 3, 4, 5]);
}

#[test]
fn a_file_that_changed_is_not_mapped() {
    let (_folder, path) = write_sample(&odd());
    let opened = ckptfs::open(&path).unwrap();
    fs::write(&path, [odd(), vec![0]].concat()).unwrap();
    assert!(opened.map(opened.tensor("a").unwrap()).is_err());
}

#[test]
fn less_memory_than_a_buffer_is_refused() {
    let (_, (_folder, path)) = all_samples().into_iter().next().unwrap();
    let with = |memory| {
        let threads = NonZeroUsize::new(8);
        LoadOptions { buffer_bytes: Some(memory), threads, ..LoadOptions::default() }.open(&path)
    };
    let Err(LoadError::MemoryLimit { needed, allowed: 5, .. }) = with(5) else { panic!() };
    assert!(matches!(with(needed - 1), Err(LoadError::MemoryLimit { .. })));
    let opened = with(needed).unwrap();
    assert!(!opened.load_all(opened.tensors()).unwrap().is_empty());
}
