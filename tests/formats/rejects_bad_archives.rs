//! An archive that two programs could read differently is refused, and so is a damaged one.

use crate::common;
use crate::common::pickle::{Tensor, dict, pickle};
use crate::common::zip::{DEFLATED, Record, archive, checkpoint, floats, one_tensor};
use ckptfs::checkpoint::{CheckpointError, LayoutKind, UnreadFormat, ZipError};

/// The error of an archive.
fn error(bytes: &[u8]) -> ZipError {
    match common::torch(bytes).expect_err("refused") {
        CheckpointError::Zip { error, .. } => error,
        other => panic!("refused for another reason: {other}"),
    }
}

/// The checkpoint of one tensor with another record.
fn with(record: Record) -> Vec<u8> {
    let mut records = one_tensor();
    records.push(record);
    archive(&records)
}

/// The checkpoint of one tensor with a record changed.
fn changed(place: usize, change: impl Fn(&mut Record)) -> Vec<u8> {
    let mut records = one_tensor();
    change(&mut records[place]);
    archive(&records)
}

const PICKLE: usize = 0;
const BYTE_ORDER: usize = 1;
const STORAGE: usize = 2;

fn disagrees(error: ZipError) -> bool {
    matches!(error, ZipError::HeaderMismatch(_))
}

#[test]
fn a_valid_archive_is_read() {
    let checkpoint = common::torch(&archive(&one_tensor())).unwrap();
    assert_eq!(common::tensor_bytes(checkpoint, "w"), floats());
}

#[test]
fn cut_off_at_any_byte() {
    let bytes = archive(&one_tensor());
    for len in 0..bytes.len() {
        assert!(common::torch(&bytes[..len]).is_err(), "accepted when cut off at {len}");
    }
}

#[test]
fn the_same_name_twice() {
    let twice = |name: &str| {
        matches!(error(&with(Record::stored(name, b"x"))), ZipError::DuplicateRecord(_))
    };
    assert!(twice("archive/data.pkl"));
    assert!(twice("archive/data/0"));
    assert!(twice("archive/Data.pkl"), "for readers that fold case");
    assert!(twice("archive/DATA/0"), "for readers that fold case");
}

#[test]
fn names_outside_the_one_folder() {
    for name in ["other/data.pkl", "data.pkl", "/data.pkl", "Archive/data.pkl", "", "archive"] {
        let bytes = with(Record::stored(name, b"x"));
        assert!(matches!(error(&bytes), ZipError::OutsideFolder(_)), "{name:?}");
    }
}

#[test]
fn names_that_are_no_names() {
    let name = |raw: &[u8]| {
        let record = Record::stored("", b"").both(|header| header.name = raw.to_vec());
        matches!(error(&with(record)), ZipError::InvalidName)
    };
    assert!(name(b"archive/\xff"));
    assert!(name(b"archive/data.pkl\0.txt"));
}

#[test]
fn no_pickle() {
    let records = one_tensor();
    let is_other_archive = |bytes: &[u8]| {
        let format = UnreadFormat::ZipArchive { has_arrays: false };
        matches!(common::torch(bytes), Err(CheckpointError::UnreadFormat { format: found, .. }) if found == format)
    };
    assert!(is_other_archive(&archive(&records[BYTE_ORDER..])));
    assert!(is_other_archive(&with_no_records()));
}

/// An archive begins with the signature of its first record. So one without records has a record that its
/// directory does not name.
fn with_no_records() -> Vec<u8> {
    let records = common::zip::body(&one_tensor()).records;
    let end = common::zip::end(0, 0, records.len() as u32);
    [records, end].concat()
}

#[test]
fn a_record_whose_own_header_disagrees() {
    for place in [PICKLE, BYTE_ORDER, STORAGE] {
        assert!(disagrees(error(&changed(place, |r| r.local.name = b"archive/data.pkx".to_vec()))));
        assert!(disagrees(error(&changed(place, |r| r.local.name[0] = b'A'))));
        assert!(disagrees(error(&changed(place, |r| r.local.method = DEFLATED))));
        assert!(disagrees(error(&changed(place, |r| r.local.stored += 1))));
        assert!(disagrees(error(&changed(place, |r| r.local.size += 1))));
        assert!(disagrees(error(&changed(place, |r| r.local.crc ^= 1))));
        assert!(disagrees(error(&changed(place, |r| r.local.flags = 1 << 3))));
        assert!(disagrees(error(&changed(place, |r| r.local.flags = 1))));
        assert!(disagrees(error(&changed(place, |r| r.central.size -= 1))));
        assert!(disagrees(error(&changed(place, |r| r.at = Some(1)))));
        assert!(disagrees(error(&changed(place, |r| r.at = Some(u32::MAX - 1)))));
    }
}

#[test]
fn stored_bytes_of_another_size_than_they_state() {
    let bytes = changed(STORAGE, |r| *r = r.clone().both(|header| header.size -= 4));
    assert!(disagrees(error(&bytes)));
    let bytes = changed(STORAGE, |r| {
        *r = r.clone().both(|header| (header.size, header.stored) = (1 << 20, 1 << 20));
    });
    assert!(disagrees(error(&bytes)), "past the end");
}

#[test]
fn sizes_left_to_what_follows_the_data() {
    let bytes = changed(STORAGE, |record| {
        *record = record.clone().both(|header| header.flags = 1 << 3);
        (record.local.stored, record.local.size, record.local.crc) = (0, 0, 0);
    });
    assert_eq!(common::tensor_bytes(common::torch(&bytes).unwrap(), "w"), floats());
    // Without the flag, zero is a size.
    let bytes = changed(STORAGE, |record| (record.local.stored, record.local.size) = (0, 0));
    assert!(disagrees(error(&bytes)));
}

#[test]
fn encryption_and_other_features() {
    for flag in [1, 1 << 6, 1 << 13] {
        let bytes = changed(STORAGE, |r| *r = r.clone().both(|header| header.flags = flag));
        assert!(matches!(error(&bytes), ZipError::Encrypted(_)), "{flag:#x}");
    }
    for flag in [1 << 4, 1 << 5, 1 << 7, 1 << 12, 1 << 15] {
        let bytes = changed(STORAGE, |r| *r = r.clone().both(|header| header.flags = flag));
        assert!(matches!(error(&bytes), ZipError::UnknownFlags(_)), "{flag:#x}");
    }
    let bytes = changed(STORAGE, |record| record.disk = 1);
    assert!(matches!(error(&bytes), ZipError::SeveralDisks));
}

#[test]
fn records_that_overlap() {
    let mut records = one_tensor();
    // The directory names the second record's header for a record of the same name and size.
    let inner = records[BYTE_ORDER].clone();
    let whole = common::zip::body(std::slice::from_ref(&inner)).records;
    records[STORAGE] = Record::stored("archive/data/0", &whole);
    let first = common::zip::body(&records[..STORAGE]).records.len();
    let start_inside = first + 30 + "archive/data/0".len();
    records[BYTE_ORDER] = Record { at: Some(start_inside as u32), ..inner };
    assert!(matches!(error(&archive(&records)), ZipError::Overlap(_)));
}

#[test]
fn two_records_at_one_place() {
    let mut records = one_tensor();
    let place = common::zip::body(&records[..BYTE_ORDER]).records.len() as u32;
    let mut twin = records[BYTE_ORDER].clone();
    twin.at = Some(place);
    twin.central.name = b"archive/byteordex".to_vec();
    records.push(twin);
    assert!(disagrees(error(&archive(&records))));
}

#[test]
fn methods_that_are_not_read() {
    for method in [1, 9, 12, 14, 93, 99] {
        let bytes = changed(STORAGE, |r| *r = r.clone().both(|header| header.method = method));
        assert!(matches!(error(&bytes), ZipError::Compressed(_)), "{method}");
    }
}

#[test]
fn deflated_records_are_unpacked() {
    let mut records = one_tensor();
    let state = dict(&[("w", Tensor::default().bytes())]);
    records[PICKLE] = Record::deflated("archive/data.pkl", &pickle(&state));
    records[BYTE_ORDER] = Record::deflated("archive/byteorder", b"little");
    records[STORAGE] = Record::deflated("archive/data/0", &floats());
    let checkpoint = common::torch(&archive(&records)).unwrap();
    assert_eq!(checkpoint.tensors[0].layout_kind(&checkpoint.origins), LayoutKind::Memory);
    assert!(checkpoint.notes.iter().any(|note| note.contains("compressed")));
    assert_eq!(common::tensor_bytes(checkpoint, "w"), floats());
}

#[test]
fn deflated_records_that_are_damaged_or_unpack_to_another_size() {
    let packed = Record::deflated("archive/data/0", &floats());
    let mut broken = packed.clone();
    broken.data.fill(0xff);
    let longer = packed.clone().both(|header| header.size += 4);
    let shorter = packed.clone().both(|header| header.size -= 4);
    for storage in [broken, longer, shorter] {
        let bytes = changed(STORAGE, |record| *record = storage.clone());
        let refused = common::refused(common::torch(&bytes).unwrap());
        assert!(refused.to_string().contains("compressed"), "{refused}");
    }
    let mut records = one_tensor();
    records[PICKLE] = Record::packed("archive/data.pkl", DEFLATED, b"\xff\xff".to_vec(), 100);
    assert!(matches!(error(&archive(&records)), ZipError::Compressed(_)));
}

#[test]
fn deflated_records_that_unpack_to_more_than_memory() {
    const MIB: usize = 1 << 20;
    let large = miniz_oxide::deflate::compress_to_vec(&vec![0; 65 * MIB], 1);
    let storage = Record::packed("archive/data/0", DEFLATED, large.clone(), 65 * MIB);
    let elements = (65 * MIB / 4) as i128;
    let tensor = Tensor { count: elements, shape: vec![1], stride: vec![1], ..Tensor::default() };
    let mut records = checkpoint(&pickle(&dict(&[("w", tensor.bytes())])));
    records[STORAGE] = storage;
    let refused = common::refused(common::torch(&archive(&records)).unwrap());
    assert!(refused.to_string().contains("too large"), "{refused}");

    // Unpacking stops at the stated size.
    let lying = Record::packed("archive/data/0", DEFLATED, large, 24);
    let bytes = changed(STORAGE, |record| *record = lying.clone());
    common::refused(common::torch(&bytes).unwrap());
    // A record that states an impossible size is refused before its memory is asked for.
    let pickle = Record::packed("archive/data.pkl", DEFLATED, vec![3, 0], u32::MAX as usize - 1);
    let bytes = changed(PICKLE, |record| *record = pickle.clone());
    assert!(matches!(error(&bytes), ZipError::Compressed(_)));
}

#[test]
fn programs_are_no_checkpoints() {
    for name in ["archive/constants.pkl", "archive/code/__torch__.py"] {
        let bytes = with(Record::stored(name, b"x"));
        assert!(
            matches!(
                common::torch(&bytes),
                Err(CheckpointError::UnreadFormat { format: UnreadFormat::TorchScript, .. })
            ),
            "{name}"
        );
    }
}

#[test]
fn a_byte_order_that_is_none() {
    for order in [&b""[..], b"middle", b"little\n", b"Little", b"littlelittlelittle"] {
        let record = Record::stored("archive/byteorder", order);
        let bytes = changed(BYTE_ORDER, |r| *r = record.clone());
        assert!(
            matches!(error(&bytes), ZipError::ByteOrder | ZipError::Compressed(_)),
            "{order:?}"
        );
    }
}

#[test]
fn the_other_byte_order_is_turned_round() {
    let bytes = changed(BYTE_ORDER, |r| *r = Record::stored("archive/byteorder", b"big"));
    let checkpoint = common::torch(&bytes).unwrap();
    assert_eq!(checkpoint.tensors[0].bytes.len(), 24);
    let turned: Vec<u8> = floats().chunks_exact(4).flat_map(|f| f.iter().rev().copied()).collect();
    assert_eq!(common::tensor_bytes(checkpoint, "w"), turned);
}
