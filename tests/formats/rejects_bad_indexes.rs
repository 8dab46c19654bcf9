//! A set of shards is shown whole, as its index says, or refused.

use std::fs;
use std::os::unix::fs::symlink;

use crate::common;
use crate::common::safetensors::valid;
use crate::common::shards::{A, B, INDEX, error, index, names, open, open_following, set};
use ckptfs::checkpoint::{self, CheckpointError, IndexError};

#[test]
fn a_set_is_shown_whole() {
    let set = set(&[(A, &["a", "b"]), (B, &["c"])], &[("a", A), ("b", A), ("c", B)]);
    for path in [set.path().to_path_buf(), set.path().join(INDEX)] {
        let checkpoint = open(&path).unwrap();
        assert_eq!(names(&checkpoint), ["a", "b", "c"]);
        assert!(checkpoint.is_sharded && !checkpoint.index_files.is_empty());
        assert!(checkpoint.notes.is_empty());
    }
}

#[test]
fn a_missing_shard() {
    let set = set(&[(A, &["a"])], &[("a", A), ("c", B)]);
    assert!(matches!(error(open(set.path())), IndexError::MissingShard { shard } if shard == B));
    // Following links does not change that.
    assert!(matches!(error(open_following(set.path())), IndexError::MissingShard { .. }));
    symlink("nowhere", set.path().join(B)).unwrap();
    assert!(matches!(error(open(set.path())), IndexError::MissingShard { shard } if shard == B));
}

#[test]
fn a_tensor_that_its_shard_lacks() {
    let set = set(&[(A, &["a"]), (B, &["c"])], &[("a", A), ("b", B), ("c", B)]);
    let error = error(open(set.path()));
    assert!(
        matches!(error, IndexError::MissingTensor { tensor, shard } if tensor == "b" && shard == B)
    );
}

#[test]
fn a_tensor_in_two_shards() {
    let set = set(&[(A, &["a", "b"]), (B, &["b"])], &[("a", A), ("b", B)]);
    let twice = open(set.path()).unwrap_err();
    assert!(
        matches!(twice, CheckpointError::DuplicateTensor { tensor, other, .. } if tensor == "b" && other.ends_with(A))
    );
}

#[test]
fn what_is_left_over_from_another_set_is_not_opened() {
    let set = set(&[(A, &["a"]), (B, &["b"])], &[("a", A), ("b", B)]);
    // Opening it would fail: with a link out, as with a shard that hangs.
    let left = ["model-00001-of-00003.safetensors", "model-00003-of-00003.safetensors"];
    for name in left {
        symlink("/proc/self/mem", set.path().join(name)).unwrap();
    }
    for path in [set.path().to_path_buf(), set.path().join(INDEX)] {
        let checkpoint = open(&path).unwrap();
        assert_eq!(names(&checkpoint), ["a", "b"]);
        assert!(checkpoint.notes.iter().any(|note| note.contains("00003-of-00003")));
    }
}

#[test]
fn fewer_shards_than_are_there() {
    let set = set(&[(A, &["a"]), (B, &["a", "b"])], &[("a", A)]);
    let checkpoint = open(set.path()).unwrap();
    assert_eq!(names(&checkpoint), ["a"]);
    assert!(checkpoint.notes.iter().any(|note| note.contains("left out") && note.contains(B)));
}

#[test]
fn text_that_is_not_utf_8_wherever_it_stands() {
    let set = set(&[(A, &["a"]), (B, &["b"])], &[("a", A), ("b", B)]);
    let path = set.path().join(INDEX);
    let mut bytes = br#"{"metadata":{"author":"Ren"#.to_vec();
    bytes.push(0xe9);
    bytes.extend_from_slice(format!(r#""}},"weight_map":{{"a":{A:?},"b":{B:?}}}}}"#).as_bytes());
    fs::write(&path, &bytes).unwrap();
    assert!(matches!(error(open(set.path())), IndexError::Json(why) if why.contains("utf-8")));
}

/// Python's `json` writes and reads these, and so do loaders in Python.
#[test]
fn numbers_that_only_python_has_are_read() {
    let set = set(&[(A, &["a"]), (B, &["b"])], &[]);
    let shards = format!(r#""weight_map":{{"a":{A:?},"b":{B:?}}}"#);
    for metadata in [
        r#"{"loss":NaN,"total_size":8}"#,
        r#"{"least":-Infinity,"most":Infinity}"#,
        r#"{"NaN":"NaN \"","list":[NaN, Infinity,-Infinity]}"#,
    ] {
        let text = format!(r#"{{"metadata":{metadata},{shards},"x":NaN}}"#);
        fs::write(set.path().join(INDEX), text).unwrap();
        for path in [set.path().to_path_buf(), set.path().join(INDEX)] {
            assert_eq!(names(&open(&path).unwrap()), ["a", "b"]);
        }
    }
    for metadata in ["-NaN", "nan", "1NaN", "+Infinity", "Inf", "{NaN:1}"] {
        let text = format!(r#"{{"metadata":{metadata},{shards}}}"#);
        fs::write(set.path().join(INDEX), text).unwrap();
        assert!(matches!(error(open(set.path())), IndexError::Json(_)), "{metadata}");
    }
    fs::write(set.path().join(INDEX), r#"{"weight_map":{"a":NaN}}"#).unwrap();
    assert!(matches!(error(open(set.path())), IndexError::Json(_)));
}

#[test]
fn a_byte_order_mark_is_refused_as_loaders_do() {
    let set = set(&[(A, &["a"])], &[]);
    let text = index(&[("a", A)]);
    fs::write(set.path().join(INDEX), format!("\u{feff}{text}")).unwrap();
    assert!(matches!(error(open(set.path())), IndexError::ByteOrderMark));
}

#[test]
fn one_file_under_two_names() {
    let set = set(&[(A, &["a"])], &[("a", A), ("b", B)]);
    symlink(A, set.path().join(B)).unwrap();
    let error = error(open(set.path()));
    assert!(
        matches!(error, IndexError::MissingTensor { tensor, shard } if tensor == "b" && shard == B)
    );
}

#[test]
fn tensors_that_the_index_does_not_name_are_kept_with_a_note() {
    let set = set(&[(A, &["a", "extra"]), (B, &["c"])], &[("a", A), ("c", B)]);
    let checkpoint = open(set.path()).unwrap();
    assert_eq!(names(&checkpoint), ["a", "c", "extra"]);
    assert!(checkpoint.notes.iter().any(|note| note.contains("`extra`")), "{:?}", checkpoint.notes);
}

#[test]
fn shards_that_the_index_does_not_name_are_left_out_with_a_note() {
    let c = "model-00003-of-00003.safetensors";
    let set = set(&[(A, &["a"]), (B, &["b"]), (c, &["c"])], &[("a", A), ("b", B)]);
    let checkpoint = open(set.path()).unwrap();
    assert_eq!(names(&checkpoint), ["a", "b"]);
    assert!(checkpoint.notes.iter().any(|note| note.contains(c)), "{:?}", checkpoint.notes);
}

#[test]
fn numbered_sets_without_an_index() {
    let directory = tempfile::tempdir().unwrap();
    let third = "model-00003-of-00003.safetensors";
    for (shard, tensor) in [("model-00001-of-00003.safetensors", "a"), (third, "c")] {
        fs::write(directory.path().join(shard), valid(&[tensor])).unwrap();
    }
    let typed = directory.path().join("model.safetensors");
    for path in [directory.path(), &typed] {
        let incomplete = open(path).unwrap_err();
        assert!(
            matches!(&incomplete, CheckpointError::IncompleteSet { missing: 1, total: 3, first, .. } if first == "model-00002-of-00003.safetensors"),
            "{incomplete}"
        );
        let message = "incomplete: 1 of 3 shards is missing: model-00002-of-00003.safetensors";
        assert!(incomplete.to_string().ends_with(message), "{incomplete}");
    }
    fs::write(directory.path().join("model-00002-of-00003.safetensors"), valid(&["b"])).unwrap();
    for path in [directory.path(), &typed] {
        let checkpoint = open(path).unwrap();
        assert_eq!(names(&checkpoint), ["a", "b", "c"]);
        assert!(checkpoint.is_sharded);
    }
    // A number past the end, and the first that is not: no complete set.
    fs::rename(
        directory.path().join(third),
        directory.path().join("model-00004-of-00003.safetensors"),
    )
    .unwrap();
    assert!(matches!(open(directory.path()), Err(CheckpointError::IncompleteSet { .. })));
}

#[test]
fn numbered_sets_of_other_lengths_do_not_mix() {
    let directory = tempfile::tempdir().unwrap();
    fs::write(directory.path().join("model-00001-of-00002.safetensors"), valid(&["a"])).unwrap();
    fs::write(directory.path().join("model-00002-of-00003.safetensors"), valid(&["b"])).unwrap();
    assert!(
        matches!(open(directory.path()), Err(CheckpointError::SeveralCheckpoints { names, .. }) if names.len() == 2)
    );
}

#[test]
fn a_set_that_says_it_has_more_shards_than_can_be() {
    let directory = tempfile::tempdir().unwrap();
    fs::write(directory.path().join("model-00000001-of-99999999.safetensors"), valid(&["a"]))
        .unwrap();
    let path = directory.path().to_path_buf();
    let answer = common::in_bounded_time(move || open(&path));
    let error = answer.unwrap_err();
    assert!(matches!(error, CheckpointError::IncompleteSet { missing: 99_999_998, .. }));
    assert!(error.to_string().ends_with(" and 99999997 more"), "{error}");
}

#[test]
fn an_index_that_is_not_what_it_must_be() {
    let json = |text: &[u8]| match checkpoint::parse_index(text, false).expect_err("refused") {
        IndexError::Json(what) => what,
        other => panic!("refused for another reason: {other}"),
    };
    json(b"");
    json(b"[]");
    json(b"{}");
    json(b"\xff");
    json(br#"{"weight_map":null}"#);
    json(br#"{"weight_map":{"a":1}}"#);
    json(br#"{"weight_map":{"a":["x"]}}"#);
    json(br#"{"weight_map":{"a":"x"}} {}"#);
    json(br#"{"weight_map":{"a":"x"}"#);
    json(format!(r#"{{"metadata":{}"#, "[".repeat(1 << 20)).as_bytes());
    assert!(json(br#"{"weight_map":{"a":"x","a":"y"}}"#).contains("`a` is there twice"));
    assert!(json(br#"{"weight_map":{"a":"x","\u0061":"x"}}"#).contains("`a` is there twice"));
    assert!(json(br#"{"weight_map":{"a":"x"},"weight_map":{}}"#).contains("weight_map"));
    let empty = checkpoint::parse_index(br#"{"metadata":{},"weight_map":{}}"#, false);
    assert!(matches!(empty, Err(IndexError::NoShards)));
    // A name that the system could not open.
    let set = set(&[(A, &["a"])], &[("a", A)]);
    fs::write(set.path().join(INDEX), r#"{"weight_map":{"a":"x\u0000y"}}"#).unwrap();
    assert!(open(set.path()).is_err());
}

#[test]
fn an_index_cut_off_at_any_byte() {
    let text = index(&[("a", A), ("b", B)]);
    for len in 0..text.len() {
        assert!(checkpoint::parse_index(&text.as_bytes()[..len], true).is_err(), "{len}");
    }
}

#[test]
fn an_index_too_large_is_refused_before_it_is_read() {
    let set = set(&[(A, &["a"])], &[("a", A)]);
    let sparse = fs::OpenOptions::new().write(true).open(set.path().join(INDEX)).unwrap();
    sparse.set_len(1 << 40).unwrap();
    assert!(matches!(error(open(set.path())), IndexError::TooLarge { size } if size == 1 << 40));
}

#[test]
fn shards_of_which_one_is_bad() {
    let set = set(&[(A, &["a"]), (B, &["c"])], &[("a", A), ("c", B)]);
    let bytes = valid(&["c"]);
    fs::write(set.path().join(B), &bytes[..bytes.len() - 1]).unwrap();
    assert!(
        matches!(open(set.path()), Err(CheckpointError::Header { path, .. }) if path.ends_with(B))
    );
}
