//! A checkpoint that two programs could read differently is refused.

use std::fs;

use crate::common;
use crate::common::pickle::*;
use crate::common::shards::{names, open};
use crate::common::zip::{archive, checkpoint as records};
use ckptfs::checkpoint::{self, CheckpointError, ParseOptions};

fn tensor() -> Vec<u8> {
    Tensor::default().bytes()
}

/// A dictionary with any keys, equal ones included.
fn entries(entries: &[(Vec<u8>, Vec<u8>)]) -> Vec<u8> {
    let pairs: Vec<Vec<u8>> = entries.iter().map(|(k, v)| [&k[..], v].concat()).collect();
    [EMPTY_DICT, MARK, &pairs.concat(), SET_ITEMS].concat()
}

fn is_collision(state: &[u8], root_key: Option<&str>) -> bool {
    let bytes = archive(&records(&pickle(state)));
    let options = ParseOptions {
        root_key: root_key.map(str::to_owned),
        allow_partial: true,
        ..ParseOptions::default()
    };
    let answer = checkpoint::parse_bytes(&bytes, "x.pt".as_ref(), &options);
    match answer {
        Err(CheckpointError::Selection { error, .. }) => {
            error.to_string().contains("have the name")
        }
        Ok(_) | Err(_) => false,
    }
}

/// Python takes the last of two equal keys.
#[test]
fn equal_keys_anywhere_on_the_way_to_a_tensor() {
    let (key, five) = (text("a"), int(5));
    let twice = entries(&[(key.clone(), tensor()), (key.clone(), five.clone())]);
    assert!(is_collision(&twice, None));
    let inside = dict(&[("net", twice), ("v", tensor())]);
    assert!(is_collision(&inside, None));
    assert!(is_collision(&inside, Some("net")));
    for equal in [int(1), TRUE.to_vec(), b"G\x3f\xf0\0\0\0\0\0\0".to_vec()] {
        assert!(is_collision(&entries(&[(int(1), tensor()), (equal, five.clone())]), None));
    }
    let parts = [(key.clone(), dict(&[("x", tensor())])), (key, dict(&[("y", tensor())]))];
    assert!(is_collision(&dict(&[("m", entries(&parts)), ("v", tensor())]), None));
}

#[test]
fn equal_keys_where_no_tensor_is() {
    let beside = entries(&[(text("a"), int(1)), (text("a"), int(2))]);
    assert!(!is_collision(&dict(&[("w", tensor()), ("counts", beside)]), None));
}

#[test]
fn a_path_with_two_meanings() {
    let state =
        dict(&[("a", dict(&[("b", dict(&[("x", tensor())]))])), ("a.b", dict(&[("y", tensor())]))]);
    assert!(is_collision(&state, Some("a.b")));
    assert!(!is_collision(&state, Some("a")));
}

/// A refused tensor's name counts as taken by its shard.
#[test]
fn a_tensor_refused_in_one_shard_and_shown_in_another() {
    let sparse = call(&global("torch._utils", "_rebuild_sparse_tensor"), &[]);
    let directory = tempfile::tempdir().unwrap();
    for (n, value) in [(1, sparse), (2, tensor())] {
        let bytes = archive(&records(&pickle(&dict(&[("s", value)]))));
        fs::write(directory.path().join(format!("model-0000{n}-of-00002.bin")), bytes).unwrap();
    }
    let options = ParseOptions { allow_partial: true, ..ParseOptions::default() };
    assert!(matches!(
        checkpoint::open(directory.path(), &options),
        Err(CheckpointError::DuplicateTensor { .. })
    ));
}

/// A header's length can begin like a pickle of any protocol.
#[test]
fn a_header_whose_length_looks_like_a_pickle() {
    let json = br#"{"a":{"dtype":"U8","shape":[1],"data_offsets":[0,1]}}"#;
    for len in [0x280usize, 0x380, 0x480, 0x580] {
        let mut bytes = (len as u64).to_le_bytes().to_vec();
        bytes.extend(json);
        bytes.resize(8 + len, b' ');
        bytes.push(7);
        let checkpoint =
            checkpoint::parse_bytes(&bytes, "blob".as_ref(), &ParseOptions::default()).unwrap();
        assert_eq!(names(&checkpoint), ["a"]);
    }
}

#[test]
fn numbered_sets_that_count_from_zero_and_sets_with_a_file_too_many() {
    let zero = directory_of(&["m-00000-of-00002.safetensors", "m-00001-of-00002.safetensors"]);
    assert_eq!(
        names(&open(zero.path()).unwrap()),
        ["m-00000-of-00002.safetensors", "m-00001-of-00002.safetensors"]
    );
    for (numbers, alone) in [([1, 2, 3], 3), ([0, 1, 3], 3)] {
        let files = numbers.map(|n| format!("m-0000{n}-of-00002.safetensors"));
        let directory = directory_of(&files.each_ref().map(String::as_str));
        match open(directory.path()) {
            Err(CheckpointError::SeveralCheckpoints { names, .. }) => {
                let alone = format!("m-0000{alone}-of-00002.safetensors");
                assert_eq!(names, [&alone, "m.safetensors"]);
            }
            other => panic!("{other:?}"),
        }
        assert_eq!(open(&directory.path().join("m.safetensors")).unwrap().tensors.len(), 2);
    }
}

/// Only an index says whether the first or the last file does not belong to the set.
#[test]
fn a_numbered_set_that_is_complete_from_zero_and_from_one() {
    for of in [1, 2, 3] {
        let files: Vec<String> =
            (0..=of).map(|n| format!("m-0000{n}-of-0000{of}.safetensors")).collect();
        let directory = directory_of(&files.iter().map(String::as_str).collect::<Vec<_>>());
        for path in [directory.path(), &directory.path().join("m.safetensors")] {
            let refused = open(path).unwrap_err();
            assert!(refused.is_refusal());
            assert!(
                matches!(&refused, CheckpointError::AmbiguousNumbering { first, last, .. } if *first == files[0] && *last == files[of]),
                "{refused}"
            );
        }
        let map: Vec<String> =
            files[..of].iter().map(|file| format!("{file:?}: {file:?}")).collect();
        let index = format!(r#"{{"weight_map": {{{}}}}}"#, map.join(", "));
        fs::write(directory.path().join("m.safetensors.index.json"), index).unwrap();
        assert_eq!(names(&open(directory.path()).unwrap()), files[..of]);
    }
}

#[test]
fn a_set_of_no_shards_is_a_file_by_itself() {
    let file = "m-00000-of-00000.safetensors";
    assert_eq!(names(&open(directory_of(&[file]).path()).unwrap()), [file]);
}

/// A directory with these files. Each is safetensors, whatever its name, with one tensor named like the
/// file.
fn directory_of(files: &[&str]) -> tempfile::TempDir {
    let directory = tempfile::tempdir().unwrap();
    for file in files {
        let bytes = match file.strip_suffix(".json") {
            None => common::safetensors::valid(&[file]),
            Some(_) => br#"{"weight_map": {"s": "m-00001-of-00002.safetensors"}}"#.to_vec(),
        };
        fs::write(directory.path().join(file), bytes).unwrap();
    }
    directory
}

/// The files that a killed writer leaves between shards and a single file.
#[test]
fn a_file_comes_before_shards_and_an_index_of_its_own_name() {
    for beside in [
        &["m-00001-of-00001.safetensors"][..],
        &["m-00002-of-00002.safetensors"],
        &["m-00001-of-00002.safetensors", "m-00002-of-00002.safetensors"],
        &["m.safetensors.index.json"],
        &[
            "m-00001-of-00002.safetensors",
            "m-00002-of-00002.safetensors",
            "m.safetensors.index.json",
        ],
        &[
            "m-000001-of-000002.safetensors",
            "m-00001-of-00003.safetensors",
            "m.safetensors.index.json",
        ],
        &["m-00000-of-00001.safetensors", "m-00001-of-00001.safetensors"],
    ] {
        let directory = directory_of(&[beside, &["m.safetensors"]].concat());
        let found = open(directory.path()).unwrap();
        assert_eq!(names(&found), ["m.safetensors"]);
        let [note] = &*found.notes else { panic!("{:?}", found.notes) };
        assert!(beside.iter().all(|file| note.contains(&format!("`{file}`"))), "{note}");
    }
}

/// The names that loaders look for, in the order of transformers.
#[test]
fn the_first_of_several_files_of_one_model_is_taken() {
    let set = ["model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"];
    let bins = ["pytorch_model-00001-of-00002.bin", "pytorch_model-00002-of-00002.bin"];
    let unet = "diffusion_pytorch_model.safetensors";
    for (taken, beside) in [
        (&["model.safetensors"][..], &["pytorch_model.bin"][..]),
        (&["model.safetensors"], &["model.fp16.safetensors"]),
        (&["model.safetensors"], &["pytorch_model.fp16.bin", "model.bf16.safetensors"]),
        (&["model.safetensors"], &bins),
        (&["model.safetensors"], &[set[0], "pytorch_model.bin"]),
        (&["pytorch_model.bin"], &["model.fp16.safetensors"]),
        (&["pytorch_model.bin"], &[bins[0]]),
        (&["pytorch_model.bin"], &bins),
        (&["model.fp16.safetensors"], &["pytorch_model.fp16.bin"]),
        (&[unet], &["diffusion_pytorch_model.bin", "diffusion_pytorch_model.non_ema.safetensors"]),
        (&["adapter_model.safetensors"], &["adapter_model.bin"]),
        (&["pytorch_lora_weights.safetensors"], &["pytorch_lora_weights.bin"]),
        (&set, &["pytorch_model.bin"]),
        (&set, &["model.fp16.safetensors", bins[0], bins[1]]),
        (&bins, &["model.fp16.safetensors"]),
    ] {
        let directory = directory_of(&[taken, beside].concat());
        let found = open(directory.path()).unwrap();
        assert_eq!(names(&found), taken, "beside {beside:?}");
        let [note] = &*found.notes else { panic!("{:?}", found.notes) };
        assert!(beside.iter().all(|file| note.contains(&format!("`{file}`"))), "{note}");
        assert!(
            !taken
                .iter()
                .any(|file| note[note.find(';').unwrap()..].contains(&format!("`{file}`")))
        );
    }
}

#[test]
fn a_set_with_an_index_comes_before_pickles() {
    let directory = directory_of(&[
        "model-00001-of-00002.safetensors",
        "model-00002-of-00002.safetensors",
        "pytorch_model.bin",
    ]);
    let map = r#"{"weight_map": {"model-00001-of-00002.safetensors": "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors": "model-00002-of-00002.safetensors"}}"#;
    fs::write(directory.path().join("model.safetensors.index.json"), map).unwrap();
    let found = open(directory.path()).unwrap();
    assert_eq!(found.tensors.len(), 2);
    let note = "`model.safetensors.index.json` was chosen in this directory, as transformers does; left out: `pytorch_model.bin`";
    assert_eq!(found.notes, [note]);
    // A set with an index must have the files that the index names.
    fs::remove_file(directory.path().join("model-00002-of-00002.safetensors")).unwrap();
    assert!(matches!(open(directory.path()), Err(CheckpointError::Index { .. })));
}

/// Any other file beside it makes it one of several.
#[test]
fn a_file_beside_anything_else_is_one_of_several() {
    for files in [
        &["m.safetensors", "n.safetensors"][..],
        &["m.safetensors", "n-00001-of-00001.safetensors"],
        &["m.safetensors", "n.safetensors.index.json"],
        &["m.safetensors", "m-00001-of-00001.safetensors", "n.safetensors"],
        &["m.safetensors", "m.fp16-00001-of-00001.safetensors"],
        &["m.safetensors", "m-00001-of-00001.fp16.safetensors"],
        &["m.safetensors", "m.sft", "m-00001-of-00001.sft"],
        &["m.safetensors", "m-00001-of-00001.bin"],
        &["m.bin", "m-00001-of-00001.bin"],
        &["m.bin", "m-00001-of-00001.safetensors"],
        &["model.safetensors", "adapter_model.safetensors"],
        &["model.safetensors", "consolidated.safetensors"],
        &["model.safetensors", "pytorch_model.bin", "last.ckpt"],
        &["pytorch_model.bin", "pytorch_model.pt"],
        &["model.fp16.safetensors", "model.bf16.safetensors"],
        &["model.fp16.safetensors", "pytorch_model.bf16.bin"],
        &["model-00001-of-00002.safetensors", "pytorch_model.bin"],
        &["pytorch_model-00001-of-00001.bin", "pytorch_model-00001-of-000001.bin"],
    ] {
        let directory = directory_of(files);
        let opened = open(directory.path());
        assert!(
            matches!(&opened, Err(CheckpointError::SeveralCheckpoints { .. })),
            "{files:?}: {opened:?}"
        );
    }
}

#[test]
fn an_index_that_names_other_files_makes_several() {
    for named in ["other.safetensors", "n-00001-of-00001.safetensors"] {
        let directory = directory_of(&["m.safetensors", named]);
        let index = format!(r#"{{"weight_map": {{"s": "{named}"}}}}"#);
        fs::write(directory.path().join("m.safetensors.index.json"), index).unwrap();
        let opened = open(directory.path());
        assert!(
            matches!(&opened, Err(CheckpointError::SeveralCheckpoints { .. })),
            "{named}: {opened:?}"
        );
    }
}

#[test]
fn a_set_beside_a_file_of_its_name_can_still_be_named() {
    let set = "m-00001-of-00001.safetensors";
    let directory = directory_of(&[set, "m.safetensors", "n.safetensors"]);
    let Err(CheckpointError::SeveralCheckpoints { names: listed, .. }) = open(directory.path())
    else {
        panic!("several")
    };
    assert_eq!(listed, ["m-*-of-00001.safetensors", "m.safetensors", "n.safetensors"]);
    for (name, tensor) in listed.iter().zip([set, "m.safetensors", "n.safetensors"]) {
        assert_eq!(names(&open(&directory.path().join(name)).unwrap()), [tensor]);
    }
}

#[test]
fn names_that_are_not_text() {
    use std::os::unix::ffi::OsStrExt;
    let directory = tempfile::tempdir().unwrap();
    let file = directory.path().join(std::ffi::OsStr::from_bytes(b"non\xff.safetensors"));
    fs::write(&file, common::safetensors::valid(&["a"])).unwrap();
    assert_eq!(names(&open(&file).unwrap()), ["a"]);
}
