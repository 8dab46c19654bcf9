//! An archive begins with its first record and ends with its end record. Its directory and end records agree, zip64
//! ones included. Otherwise it is refused.

use crate::common;
use crate::common::zip::{
    Body, END_LEN, Record, archive as whole, body, end, floats, one_tensor, wide_end,
};
use ckptfs::checkpoint::{Checkpoint, CheckpointError, ZipError};

/// The value of a number that the zip64 record has instead.
const ELSEWHERE: u32 = u32::MAX;

fn error(answer: Result<Checkpoint, CheckpointError>) -> ZipError {
    match answer.expect_err("refused") {
        CheckpointError::Zip { error, .. } => error,
        other => panic!("refused for another reason: {other}"),
    }
}

/// The numbers of a zip64 end record.
#[derive(Clone, Copy)]
struct Wide {
    count: u64,
    directory_len: u64,
    directory: u64,
    place: u64,
}

/// The checkpoint of one tensor with a changed zip64 end record, and a given short one.
fn with_wide_end(
    records: &[Record],
    change: impl Fn(&mut Wide),
    short: impl Fn(&Wide) -> Vec<u8>,
) -> Vec<u8> {
    let Body { records, directory, count } = body(records);
    let place = (records.len() + directory.len()) as u64;
    let true_numbers = Wide {
        count: u64::from(count),
        directory_len: directory.len() as u64,
        directory: records.len() as u64,
        place,
    };
    let mut wide = true_numbers;
    change(&mut wide);
    let wide = wide_end(wide.count, wide.directory_len, wide.directory, wide.place);
    [records, directory, wide, short(&true_numbers)].concat()
}

/// A short end record that repeats the true numbers.
fn repeats(wide: &Wide) -> Vec<u8> {
    end(wide.count as u16, wide.directory_len as u32, wide.directory as u32)
}

/// A short end record that leaves the numbers to the zip64 one.
fn leaves(_: &Wide) -> Vec<u8> {
    end(u16::MAX, ELSEWHERE, ELSEWHERE)
}

fn extra(numbers: &[u64]) -> Vec<u8> {
    let mut field = vec![1, 0];
    field.extend((numbers.len() as u16 * 8).to_le_bytes());
    field.extend(numbers.iter().flat_map(|n| n.to_le_bytes()));
    field
}

/// The storage's entry with its sizes in the directory's zip64 field.
fn wide_storage(numbers: &[u64]) -> Vec<Record> {
    let mut records = one_tensor();
    let storage = &mut records[2];
    (storage.central.stored, storage.central.size) = (ELSEWHERE, ELSEWHERE);
    storage.central.extra = extra(numbers);
    records
}

#[test]
fn wide_records_that_agree_are_read() {
    for short in [repeats, leaves] {
        let checkpoint = common::torch(&with_wide_end(&one_tensor(), |_| {}, short)).unwrap();
        assert_eq!(common::tensor_bytes(checkpoint, "w"), floats());
    }
    let bytes = whole(&wide_storage(&[24, 24]));
    assert_eq!(common::tensor_bytes(common::torch(&bytes).unwrap(), "w"), floats());
}

#[test]
fn an_end_record_that_disagrees_with_the_wide_one() {
    let changes: [fn(&mut Wide); 6] = [
        |wide| wide.count += 1,
        |wide| wide.directory_len += 1,
        |wide| wide.directory -= 1,
        |wide| wide.directory = u64::MAX,
        |wide| wide.directory_len = u64::MAX,
        |wide| wide.place += 1,
    ];
    for (number, change) in changes.into_iter().enumerate() {
        for short in [repeats, leaves] {
            let error = error(common::torch(&with_wide_end(&one_tensor(), change, short)));
            assert!(
                matches!(error, ZipError::Directory | ZipError::CountMismatch { .. }),
                "{number}: {error}"
            );
        }
    }
    let other = |_: &Wide| end(1, ELSEWHERE, ELSEWHERE);
    let error = error(common::torch(&with_wide_end(&one_tensor(), |_| {}, other)));
    assert!(matches!(error, ZipError::Directory));
}

#[test]
fn a_second_directory_that_only_some_readers_would_find() {
    // The short record points at one directory, the zip64 record at another.
    let Body { records, directory, count } = body(&one_tensor());
    let other = body(&one_tensor()[..1]).directory;
    let start = records.len();
    let wide_start = (start + directory.len()) as u64;
    let place = wide_start + other.len() as u64;
    let wide = wide_end(1, other.len() as u64, wide_start, place);
    let short = end(count, directory.len() as u32, start as u32);
    let bytes = [records, directory, other, wide, short].concat();
    assert!(matches!(error(common::torch(&bytes)), ZipError::Directory));
}

#[test]
fn numbers_left_to_the_short_record_without_a_wide_one() {
    let Body { records, directory, .. } = body(&one_tensor());
    let bytes = [records, directory, end(u16::MAX, ELSEWHERE, ELSEWHERE)].concat();
    assert!(matches!(error(common::torch(&bytes)), ZipError::Directory));
}

#[test]
fn wide_fields_that_lack_a_number_or_are_there_twice() {
    let directory = |records: &[Record]| {
        let error = error(common::torch(&whole(records)));
        assert!(matches!(error, ZipError::Directory), "{error}");
    };
    directory(&wide_storage(&[24]));
    directory(&wide_storage(&[]));
    let mut twice = wide_storage(&[24, 24]);
    let field = extra(&[24, 24]);
    twice[2].central.extra.extend(field);
    directory(&twice);
    let mut longer_than_the_field = wide_storage(&[24, 24]);
    longer_than_the_field[2].central.extra[2] = 200;
    directory(&longer_than_the_field);
}

#[test]
fn wide_sizes_that_are_not_the_records() {
    for (size, stored) in [(28, 28), (24, 28), (28, 24), (u64::MAX, u64::MAX), (1 << 40, 1 << 40)] {
        let bytes = whole(&wide_storage(&[size, stored]));
        let error = error(common::torch(&bytes));
        assert!(matches!(error, ZipError::HeaderMismatch(_)), "{size} {stored}: {error}");
    }
}

/// A reader that goes from record to record believes the records' own headers.
#[test]
fn a_record_whose_own_wide_field_disagrees() {
    let local = |numbers: &[u64]| {
        let mut records = one_tensor();
        let storage = &mut records[2].local;
        (storage.stored, storage.size) = (ELSEWHERE, ELSEWHERE);
        storage.extra = extra(numbers);
        common::torch(&whole(&records))
    };
    assert_eq!(common::tensor_bytes(local(&[24, 24]).unwrap(), "w"), floats());
    for numbers in [&[28, 28][..], &[24, 20], &[20, 24], &[24], &[]] {
        assert!(matches!(error(local(numbers)), ZipError::HeaderMismatch(_)), "{numbers:?}");
    }
}

#[test]
fn bytes_before_after_and_a_comment() {
    let bytes = whole(&one_tensor());
    // Bytes in front move every offset that the archive states.
    assert!(common::torch(&[b"PK\x03\x04", &bytes[..]].concat()).is_err());
    let hidden = body(&one_tensor()[..1]).records;
    let mut at = hidden.len();
    let mut records = one_tensor();
    for record in &mut records {
        record.at = Some(at as u32);
        at += body(std::slice::from_ref(record)).records.len();
    }
    let body = body(&records);
    let start = (hidden.len() + body.records.len()) as u32;
    let end_record = end(body.count, body.directory.len() as u32, start);
    let bytes_before = [hidden, body.records, body.directory, end_record].concat();
    assert!(matches!(error(common::torch(&bytes_before)), ZipError::LeadingBytes));

    for after in [&b"\0"[..], b"PK\x05\x06", &[0; 100]] {
        assert!(matches!(error(common::torch(&[&bytes, after].concat())), ZipError::NoEnd));
    }
    assert!(matches!(
        error(common::torch(&[&bytes[..], &bytes[..]].concat())),
        ZipError::Directory
    ));

    let mut comment = bytes.clone();
    let len = comment.len();
    comment[len - 2] = 4;
    comment.extend(b"text");
    assert!(matches!(error(common::torch(&comment)), ZipError::NoEnd));
    // A comment that is another end record.
    let mut comment = bytes.clone();
    comment[len - 2] = END_LEN as u8;
    comment.extend(end(0, 0, len as u32));
    assert!(common::torch(&comment).is_err());
}

#[test]
fn an_end_record_that_disagrees_with_the_directory() {
    let bytes = whole(&one_tensor());
    let end = bytes.len() - END_LEN;
    let patched = |field: usize, value: u8| {
        let mut bytes = bytes.clone();
        bytes[end + field] = value;
        error(common::torch(&bytes))
    };
    assert!(matches!(patched(4, 1), ZipError::SeveralDisks));
    assert!(matches!(patched(6, 1), ZipError::SeveralDisks));
    assert!(matches!(patched(8, 2), ZipError::CountMismatch { .. }));
    assert!(matches!(patched(10, 2), ZipError::CountMismatch { .. }));
    let both = |count: u8| {
        let mut bytes = bytes.clone();
        (bytes[end + 8], bytes[end + 10]) = (count, count);
        error(common::torch(&bytes))
    };
    assert!(matches!(both(2), ZipError::CountMismatch { .. }));
    assert!(matches!(both(4), ZipError::CountMismatch { .. }));
    for field in [12, 16] {
        let old = bytes[end + field];
        assert!(matches!(patched(field, old.wrapping_add(1)), ZipError::Directory));
        assert!(matches!(patched(field, old.wrapping_sub(1)), ZipError::Directory));
    }
}

#[test]
fn a_directory_that_is_damaged() {
    let body = body(&one_tensor());
    let start = body.records.len() as u32;
    let rebuilt = |directory: Vec<u8>| {
        let end_record = end(body.count, directory.len() as u32, start);
        [body.records.clone(), directory, end_record].concat()
    };
    assert!(common::torch(&rebuilt(body.directory.clone())).is_ok());
    let mut signature = body.directory.clone();
    signature[0] = b'Q';
    assert!(matches!(error(common::torch(&rebuilt(signature))), ZipError::Directory));
    let cut = body.directory[..body.directory.len() - 1].to_vec();
    assert!(matches!(error(common::torch(&rebuilt(cut))), ZipError::Directory));
    let longer = [&body.directory[..], b"\0"].concat();
    assert!(matches!(error(common::torch(&rebuilt(longer))), ZipError::Directory));
}
