//! A safetensors file that any reader could refuse, or that two could read differently, is refused with its
//! error.

use crate::common;
use crate::common::safetensors::{entry, file, raw, valid};
use ckptfs::checkpoint::{CheckpointError, HeaderError, MAX_HEADER_BYTES};

/// The error of a file.
fn error(bytes: &[u8]) -> HeaderError {
    match common::safetensors(bytes).expect_err("refused") {
        CheckpointError::Header { error, .. } => error,
        other => panic!("refused for another reason: {other}"),
    }
}

/// The error of the header's JSON reader.
fn complaint(bytes: &[u8]) -> String {
    match error(bytes) {
        HeaderError::Json(what) => what,
        other => panic!("refused for another reason: {other}"),
    }
}

/// A file with one tensor of that description and `data` bytes.
fn one(dtype: &str, shape: &str, start: u64, end: u64, data: usize) -> Vec<u8> {
    file(&format!("{{{}}}", entry("t", dtype, shape, start, end)), data)
}

/// A file with two F32 tensors of those ranges and `data` bytes.
fn two(first: (u64, u64), second: (u64, u64), data: usize) -> Vec<u8> {
    let shape = |(start, end): (u64, u64)| format!("[{}]", end.wrapping_sub(start) / 4);
    let first = entry("a", "F32", &shape(first), first.0, first.1);
    let second = entry("b", "F32", &shape(second), second.0, second.1);
    file(&format!("{{{first},{second}}}"), data)
}

#[test]
fn a_valid_file_is_read() {
    let checkpoint = common::safetensors(&valid(&["a", "b"])).unwrap();
    let names: Vec<&str> = checkpoint.tensors.iter().map(|t| &*t.name).collect();
    assert_eq!(names, ["a", "b"]);
}

#[test]
fn cut_off_at_any_byte() {
    let bytes = valid(&["a", "b"]);
    for len in 0..bytes.len() {
        assert!(common::safetensors(&bytes[..len]).is_err(), "accepted when cut off at {len}");
    }
}

#[test]
fn a_header_longer_than_the_file_or_than_any_reader_takes() {
    let header = b"{}        ";
    let fits = header.len() as u64;
    assert!(common::safetensors(&raw(fits, header, b"")).is_ok());
    assert!(matches!(error(&raw(fits + 1, header, b"")), HeaderError::Truncated { .. }));
    assert!(matches!(error(&raw(MAX_HEADER_BYTES, header, b"")), HeaderError::Truncated { .. }));
    for stated in [MAX_HEADER_BYTES + 1, 1 << 63, u64::MAX - 7, u64::MAX] {
        assert!(
            matches!(error(&raw(stated, header, b"")), HeaderError::TooLong { len } if len == stated)
        );
    }
    assert!(matches!(error(&raw(0, header, b"")), HeaderError::Json(_)));
}

#[test]
fn a_header_that_is_not_utf8_or_not_json() {
    let mut bytes = valid(&["name"]);
    let place = bytes.windows(4).position(|w| w == b"name").unwrap();
    bytes[place] = 0xff;
    complaint(&bytes);
    for header in [
        "          ",
        "[]        ",
        "null      ",
        " {}       ",
        "{         ",
        "{}}       ",
        "{} {}     ",
        "{}\0\0\0\0\0\0\0\0",
        "{,}       ",
        "{\"a\":     ",
        "{\"a\": 1}  ",
        "{\"a\": {}} ",
        "{a: 1}    ",
    ] {
        complaint(&raw(header.len() as u64, header.as_bytes(), b""));
    }
    // A lone surrogate is not text.
    complaint(&file(&format!("{{{}}}", entry("\\ud800", "U8", "[1]", 0, 1)), 1));
    // Brackets deeper than any parser's stack.
    let deep = format!("{{\"a\":{}", "[".repeat(1 << 20));
    complaint(&file(&deep, 0));
}

#[test]
fn the_same_key_twice() {
    let a = entry("a", "U8", "[1]", 0, 1);
    let same = entry("a", "U8", "[1]", 1, 2);
    assert!(complaint(&file(&format!("{{{a},{same}}}"), 2)).contains("`a` is there twice"));
    let spelled_otherwise = entry("\\u0061", "U8", "[1]", 1, 2);
    let twice = file(&format!("{{{a},{spelled_otherwise}}}"), 2);
    assert!(complaint(&twice).contains("`a` is there twice"));

    let twice = r#"{"__metadata__":{"k":"1","k":"2"}}"#;
    assert!(complaint(&file(twice, 0)).contains("`k` is there twice"));
    let twice = r#"{"__metadata__":{},"__metadata__":{}}"#;
    assert!(complaint(&file(twice, 0)).contains("`__metadata__` is there twice"));
    let twice = r#"{"a":{"dtype":"U8","dtype":"I8","shape":[1],"data_offsets":[0,1]}}"#;
    assert!(complaint(&file(twice, 1)).contains("dtype"));
}

/// Fields that the format does not have are read or refused as by the reference reader.
#[test]
fn unknown_fields_are_read_as_the_reference_reader_does() {
    let nested = |depth: usize, open: &str, close: &str| {
        format!("{}1{}", open.repeat(depth), close.repeat(depth))
    };
    let mut values: Vec<String> = [1, 2, 10, 5_000, 100_000]
        .into_iter()
        .chain(115..135)
        .flat_map(|depth| [nested(depth, "[", "]"), nested(depth, r#"{"a":"#, "}")])
        .collect();
    let plain = [
        "null",
        "true",
        "-1",
        "1.5",
        "1e999",
        "-0",
        "01",
        "18446744073709551616",
        "NaN",
        "-Infinity",
        "9".repeat(400).leak(),
        r#""\u00e9""#,
        r#""\ud800""#,
        r#""\x""#,
        "\"\t\"",
        r#"{"a":1,"a":2}"#,
        r#"{"\ud800":1}"#,
        "{1:1}",
        "[1,]",
    ];
    values.extend(plain.map(str::to_owned));
    let (mut taken, mut refused) = (0, 0);
    for value in &values {
        let info = format!(r#""dtype":"U8","shape":[1],"data_offsets":[0,1],"x":{value}"#);
        for bytes in
            [file(&format!(r#"{{"t":{{{info}}}}}"#), 1), file(&format!(r#"{{"t":{value}}}"#), 1)]
        {
            let reference = safetensors::SafeTensors::deserialize(&bytes);
            let ours = common::safetensors(&bytes);
            assert_eq!(ours.is_ok(), reference.is_ok(), "{:.200}: {ours:?}", value);
            *if ours.is_ok() { &mut taken } else { &mut refused } += 1;
        }
    }
    assert!(taken > 20 && refused > 20, "{taken} taken, {refused} refused");
}

/// The reference reader also takes a list of the fields; readers that look fields up by name do not.
#[test]
fn a_tensor_that_is_no_object_is_refused() {
    complaint(&file(r#"{"t":["U8",[1],[0,1]]}"#, 1));
}

#[test]
fn metadata_that_is_not_text_to_text() {
    for metadata in [r#"{"k":1}"#, r#"{"k":null}"#, r#"{"k":{}}"#, "[]", "1", r#""text""#] {
        complaint(&file(&format!(r#"{{"__metadata__":{metadata}}}"#), 0));
    }
}

#[test]
fn ranges_that_do_not_tile_the_data() {
    assert!(common::safetensors(&two((0, 8), (8, 16), 16)).is_ok());
    assert!(common::safetensors(&two((8, 16), (0, 8), 16)).is_ok(), "order is free");
    let gap = |error| matches!(error, HeaderError::Gap { .. });
    assert!(gap(error(&two((0, 8), (4, 12), 12))), "overlapping");
    assert!(gap(error(&two((0, 8), (0, 8), 8))), "the same");
    assert!(gap(error(&two((0, 16), (4, 8), 16))), "one inside the other");
    assert!(gap(error(&two((0, 8), (12, 20), 20))), "a hole");
    assert!(gap(error(&two((4, 8), (8, 16), 16))), "a hole in front");
    assert!(matches!(error(&one("U8", "[4]", 8, 4, 8)), HeaderError::Reversed { .. }));
    assert!(matches!(error(&one("U8", "[8]", 0, 8, 7)), HeaderError::PastEnd { .. }));
    assert!(matches!(error(&one("U8", "[8]", 0, 8, 9)), HeaderError::TrailingBytes { extra: 1 }));
    assert!(matches!(error(&file("{}      ", 3)), HeaderError::TrailingBytes { extra: 3 }));
}

#[test]
fn ranges_whose_numbers_overflow() {
    let end = u64::MAX;
    let past = |error| matches!(error, HeaderError::PastEnd { .. });
    assert!(past(error(&one("U8", &format!("[{end}]"), 0, end, 4))));
    assert!(past(error(&one("U8", "[4]", end - 4, end, 4))));
    assert!(past(error(&one("U8", "[0]", end, end, 0))));
    for offsets in ["[0,18446744073709551616]", "[-1,4]", "[0,4.0]", "[0]", "[0,1,2]", "[0,1e0]"] {
        let header = format!(r#"{{"a":{{"dtype":"U8","shape":[4],"data_offsets":{offsets}}}}}"#);
        complaint(&file(&header, 4));
    }
}

#[test]
fn dtypes_that_nobody_knows() {
    for dtype in ["", "f32", "F32 ", "FLOAT", "F128", "Q8_0", "BF8"] {
        let unknown = error(&one(dtype, "[1]", 0, 4, 4));
        assert!(
            matches!(&unknown, HeaderError::UnknownDtype { tensor, dtype: name } if tensor == "t" && name == dtype),
            "{unknown}"
        );
    }
}

#[test]
fn shapes_that_overflow() {
    let size = |error| matches!(error, HeaderError::SizeMismatch { .. });
    assert!(size(error(&one("U8", "[4294967296,4294967296]", 0, 0, 0))));
    assert!(size(error(&one("F64", "[2305843009213693952]", 0, 0, 0))));
    assert!(size(error(&one("U8", "[18446744073709551615,18446744073709551615]", 0, 1, 1))));
    for shape in ["[18446744073709551616]", "[-1]", "[1.5]", "null", "[[1]]", "{}"] {
        complaint(&one("U8", shape, 0, 1, 1));
    }
}

/// The reference reader multiplies the dimensions in their order, and refuses a file in which the product
/// overflows before it reaches the zero. No virtual file may have such a shape.
#[test]
fn shapes_that_overflow_on_the_way_to_an_empty_tensor() {
    let bytes = one("U8", "[18446744073709551615,2,0]", 0, 0, 0);
    assert!(safetensors::SafeTensors::deserialize(&bytes).is_err(), "as the reference reader does");
    assert!(matches!(error(&bytes), HeaderError::SizeMismatch { .. }));
}

#[test]
fn shapes_that_do_not_take_the_bytes_of_their_range() {
    let size = |error| matches!(error, HeaderError::SizeMismatch { .. });
    assert!(size(error(&one("F32", "[2]", 0, 4, 4))));
    assert!(size(error(&one("F32", "[]", 0, 8, 8))));
    assert!(size(error(&one("F32", "[0]", 0, 4, 4))));
    assert!(size(error(&one("F32", "[1]", 0, 0, 0))));
    assert!(common::safetensors(&one("F32", "[]", 0, 4, 4)).is_ok());
    assert!(common::safetensors(&one("F32", "[0,7]", 0, 0, 0)).is_ok());
}

#[test]
fn elements_that_end_inside_a_byte() {
    let size = |error| matches!(error, HeaderError::SizeMismatch { .. });
    assert!(size(error(&one("F4", "[3]", 0, 1, 1))));
    assert!(size(error(&one("F4", "[3]", 0, 2, 2))));
    assert!(size(error(&one("F6_E2M3", "[3]", 0, 2, 2))));
    assert!(size(error(&one("F6_E3M2", "[1]", 0, 1, 1))));
    assert!(common::safetensors(&one("F4", "[4]", 0, 2, 2)).is_ok());
    assert!(common::safetensors(&one("F6_E2M3", "[4]", 0, 3, 3)).is_ok());
}
