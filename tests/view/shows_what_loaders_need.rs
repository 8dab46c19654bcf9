//! Each loader finds in the view the one name that it needs, and nothing that would lead it to another.
//! Everything else is as it was.

use std::fs;
use std::os::unix::fs::{MetadataExt, PermissionsExt};
use std::path::Path;

use crate::common;
use crate::common::command;
use crate::common::safetensors::valid;
use crate::common::shards::index;
use crate::common::view::{hidden, shown, torch, torch_with, view, view_of_all, write};
use ckptfs::source::ReadAt;
use ckptfs::view::{KeepRules, View, ViewEntry, ViewOptions};
use serde_json::Value;

/// The files of a directory, and what is shown and hidden of it.
struct Row {
    files: Vec<(String, Vec<u8>)>,
    shows: &'static [&'static str],
    hides: usize,
}

fn row(files: &[(&str, &[u8])], shows: &'static [&'static str], hides: usize) -> Row {
    let files = files.iter().map(|(name, bytes)| ((*name).to_owned(), bytes.to_vec())).collect();
    Row { files, shows, hides }
}

/// Two shards of these names with their index.
fn set(names: [&str; 2], index_name: &str, shows: &'static [&'static str]) -> Row {
    let is_torch = names[0].ends_with(".bin");
    let shard = |tensor| if is_torch { torch_with(tensor) } else { valid(&[tensor]) };
    let index = index(&[("a", names[0]), ("b", names[1])]);
    let (a, b) = (shard("a"), shard("b"));
    let files: &[(&str, &[u8])] =
        &[(names[0], &a), (names[1], &b), (index_name, index.as_bytes()), ("config.json", b"{}")];
    row(files, shows, 3)
}

/// The files on disk and what the view shows of them.
fn table() -> Vec<Row> {
    let t: &[u8] = &torch();
    let s: &[u8] = &valid(&["w"]);
    let j: &[u8] = b"{}";
    vec![
        set(
            ["model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"],
            "model.safetensors.index.json",
            &["config.json", "model.safetensors*"],
        ),
        row(
            &[("pytorch_model.bin", t), ("config.json", j)],
            &["config.json", "model.safetensors*"],
            1,
        ),
        set(
            ["pytorch_model-00001-of-00002.bin", "pytorch_model-00002-of-00002.bin"],
            "pytorch_model.bin.index.json",
            &["config.json", "model.safetensors*"],
        ),
        set(
            ["model.fp16-00001-of-00002.safetensors", "model.fp16-00002-of-00002.safetensors"],
            "model.safetensors.index.fp16.json",
            &["config.json", "model.fp16.safetensors*"],
        ),
        set(
            ["model-00001-of-00002.fp16.safetensors", "model-00002-of-00002.fp16.safetensors"],
            "model.fp16.safetensors.index.json",
            &["config.json", "model.fp16.safetensors*"],
        ),
        row(&[("pytorch_model.fp16.bin", t)], &["model.fp16.safetensors*"], 1),
        row(&[("diffusion_pytorch_model.bin", t)], &["diffusion_pytorch_model.safetensors*"], 1),
        set(
            [
                "diffusion_pytorch_model-00001-of-00002.bin",
                "diffusion_pytorch_model-00002-of-00002.bin",
            ],
            "diffusion_pytorch_model.bin.index.json",
            &["config.json", "diffusion_pytorch_model.safetensors*"],
        ),
        set(
            [
                "diffusion_pytorch_model.fp16-00001-of-00002.bin",
                "diffusion_pytorch_model.fp16-00002-of-00002.bin",
            ],
            "diffusion_pytorch_model.bin.index.fp16.json",
            &["config.json", "diffusion_pytorch_model.fp16.safetensors*"],
        ),
        set(
            [
                "diffusion_pytorch_model-00001-of-00002.fp16.bin",
                "diffusion_pytorch_model-00002-of-00002.fp16.bin",
            ],
            "diffusion_pytorch_model.fp16.bin.index.json",
            &["config.json", "diffusion_pytorch_model.fp16.safetensors*"],
        ),
        row(&[("adapter_model.bin", t)], &["adapter_model.safetensors*"], 1),
        row(&[("pytorch_lora_weights.bin", t)], &["pytorch_lora_weights.safetensors*"], 1),
        row(
            &[("a.pt", t), ("b.pth", t), ("c.ckpt", t), ("d.bin", t), ("e.safetensors", s)],
            &[
                "a.safetensors*",
                "b.safetensors*",
                "c.safetensors*",
                "d.safetensors*",
                "e.safetensors",
            ],
            4,
        ),
        row(&[("foo.pt", t), ("foo.bin", t)], &["foo.bin", "foo.pt"], 0),
        row(
            &[("foo.pt", t), ("optimizer.pt", t), ("config.json", j), ("pytorch_model.bin", t)],
            &["config.json", "foo.pt", "model.safetensors*", "optimizer.pt"],
            1,
        ),
        row(
            &[("model.safetensors", s), ("pytorch_model.bin", t), ("pytorch_model.fp16.bin", t)],
            &["model.safetensors", "pytorch_model.bin", "pytorch_model.fp16.bin"],
            0,
        ),
        row(&[("foo.safetensors", s), ("foo.ckpt", t)], &["foo.ckpt", "foo.safetensors"], 0),
        row(
            &[("a.gguf", b"GGUF"), ("b.onnx", b"onnx"), ("c.bin", b"GGUF...."), ("d.pt", b"no")],
            &["a.gguf", "b.onnx", "c.bin", "d.pt"],
            0,
        ),
    ]
}

fn folder_of(row: &Row) -> tempfile::TempDir {
    let folder = tempfile::tempdir().unwrap();
    for (name, bytes) in &row.files {
        write(folder.path(), &[(name, bytes)]);
    }
    folder
}

#[test]
fn every_row_shows_what_loaders_need() {
    for row in table() {
        let folder = folder_of(&row);
        assert_eq!(shown(&view(folder.path()), ""), row.shows);
        assert_eq!(hidden(&view(folder.path()), "").len(), row.hides, "{:?}", row.shows);
        // With the originals, every name that was there, and the virtual files.
        let all = view_of_all(folder.path());
        assert_eq!(hidden(&all, ""), [""; 0]);
        let virtual_files = row.shows.iter().filter(|name| name.ends_with('*')).count();
        assert_eq!(shown(&all, "").len(), row.files.len() + virtual_files);
    }
}

#[test]
fn every_row_is_listed_as_shown() {
    for row in table() {
        let folder = folder_of(&row);
        let listed = listed(folder.path(), &[]);
        let words = listed["entries"].as_array().unwrap().iter().map(|entry| {
            let mark = if entry["kind"] == "virtual_file" { "*" } else { "" };
            format!("{}{mark}", entry["name"].as_str().unwrap())
        });
        assert_eq!(words.collect::<Vec<_>>(), row.shows);
        assert_eq!(listed["hidden"].as_array().unwrap().len(), row.hides);
        assert_eq!(listed["refused"], Value::Array(vec![]));
    }
}

fn listed(path: &Path, more: &[&str]) -> Value {
    let args = [&["ls", "--json", path.to_str().unwrap()], more].concat();
    let outcome = command::run(&args);
    assert_eq!(outcome.code, 0, "{}", outcome.stderr);
    let directories: Value = serde_json::from_str(&outcome.stdout).unwrap();
    directories[0].clone()
}

#[test]
fn a_virtual_file_names_its_originals() {
    let set = set(
        ["pytorch_model-00001-of-00002.bin", "pytorch_model-00002-of-00002.bin"],
        "pytorch_model.bin.index.json",
        &[],
    );
    let folder = folder_of(&set);
    write(folder.path(), &[("pytorch_model-00003-of-00003.bin", b"stale")]);
    let listed = listed(folder.path(), &[]);
    let virtual_file = &listed["entries"][1];
    assert_eq!(virtual_file["name"], "model.safetensors");
    assert_eq!(virtual_file["virtual_file"]["tensors"], 2);
    assert_eq!(virtual_file["virtual_file"]["format"], "torch zip");
    assert_eq!(virtual_file["virtual_file"]["from"].as_array().unwrap().len(), 4);
    assert!(virtual_file["size"].as_u64().unwrap() > 48);
    for hidden in listed["hidden"].as_array().unwrap() {
        assert_eq!(hidden["reason"], "is in model.safetensors");
    }
    let notes = virtual_file["virtual_file"]["notes"].to_string();
    assert!(notes.contains("pytorch_model-00003-of-00003.bin"), "{notes}");
}

#[test]
fn refused_checkpoints_stay_visible_and_are_reported() {
    let folder = tempfile::tempdir().unwrap();
    let whole = torch();
    let first = "b-00001-of-00002.pt";
    write(
        folder.path(),
        &[("a.pt", &whole[..whole.len() - 30]), (first, &whole), ("c.pt", &whole)],
    );
    let two_counts = ["d-00000-of-00001.pt", "d-00001-of-00001.pt"];
    write(folder.path(), &two_counts.map(|name| (name, whole.as_slice())));
    let [zero, one] = two_counts;
    assert_eq!(shown(&view(folder.path()), ""), ["a.pt", first, "c.safetensors*", zero, one]);
    let listed = listed(folder.path(), &[]);
    let refused = listed["refused"].as_array().unwrap();
    let names: Vec<&Value> = refused.iter().map(|refused| &refused["names"][0]).collect();
    assert_eq!(names, ["a.pt", first, zero]);
    for refused in refused {
        assert!(!refused["reason"].as_str().unwrap().is_empty());
        assert!(!refused["remedy"].as_str().unwrap().is_empty());
    }
    let text = command::run(&["ls", folder.path().to_str().unwrap()]).stdout;
    assert!(text.contains("refused") && text.contains("what to do"), "{text}");
}

#[test]
fn source_files_pass_through_unchanged() {
    let folder = tempfile::tempdir().unwrap();
    write(folder.path(), &[("tokenizer.json", b"{\"a\": 1}"), ("sub/notes", b"")]);
    let path = folder.path().join("tokenizer.json");
    fs::set_permissions(&path, fs::Permissions::from_mode(0o640)).unwrap();
    let real = fs::metadata(&path).unwrap();
    let view = view(folder.path());
    let Some(ViewEntry::Source(found)) =
        view.lookup("".as_ref(), "tokenizer.json".as_ref()).unwrap()
    else {
        panic!("as it is")
    };
    assert_eq!((found.size, u32::from(found.mode)), (real.len(), real.mode() & 0o7777));
    assert_eq!((found.uid, found.gid, found.ino), (real.uid(), real.gid(), real.ino()));
    assert_eq!(found.mtime, real.modified().unwrap());
    let open = view.open("tokenizer.json".as_ref()).unwrap();
    let mut bytes = [0; 8];
    open.read_exact_at(&mut bytes, 0).unwrap();
    assert_eq!(&bytes, b"{\"a\": 1}");
    assert_eq!(shown(&view, "sub"), ["notes"]);
}

#[test]
fn a_virtual_file_permits_only_what_all_its_sources_permit() {
    let folder = tempfile::tempdir().unwrap();
    let names = ["m-00001-of-00002.pt", "m-00002-of-00002.pt"];
    for (name, mode) in names.iter().zip([0o644, 0o460]) {
        write(folder.path(), &[(name, &torch_with(name))]);
        fs::set_permissions(folder.path().join(name), fs::Permissions::from_mode(mode)).unwrap();
    }
    let view = view(folder.path());
    let Some(ViewEntry::VirtualFile(virtual_file)) =
        view.lookup("".as_ref(), "m.safetensors".as_ref()).unwrap()
    else {
        panic!("a virtual file")
    };
    assert_eq!(virtual_file.metadata().mode, 0o440);
    let newest = names.map(|n| fs::metadata(folder.path().join(n)).unwrap().modified().unwrap());
    assert_eq!(Some(&virtual_file.metadata().mtime), newest.iter().max());
    assert_eq!(view.virtual_file(&virtual_file).unwrap().size(), virtual_file.metadata().size);
}

#[test]
fn a_root_key_applies_only_where_it_exists() {
    let folder = tempfile::tempdir().unwrap();
    let weights = common::pickle::dict(&[("w", common::pickle::Tensor::default().bytes())]);
    let state = common::pickle::pickle(&common::pickle::dict(&[("ema", weights)]));
    let with = common::zip::archive(&common::zip::checkpoint(&state));
    write(folder.path(), &[("with.pt", &with), ("without.pt", &torch())]);
    write(folder.path(), &[("s-00001-of-00001.safetensors", &valid(&["a"]))]);
    let listed = listed(folder.path(), &["--root", "ema"]);
    let notes = |n: usize| listed["entries"][n]["virtual_file"]["notes"].to_string();
    assert_eq!(listed["entries"].as_array().unwrap().len(), 3);
    assert!(notes(0).contains("has no `ema`"), "{}", notes(0));
    assert!(!notes(1).contains("has no"), "{}", notes(1));
    assert!(notes(2).contains("has no `ema`"), "{}", notes(2));
    // A single checkpoint that was asked for this dictionary is not shown without it.
    let single = folder.path().join("without.pt");
    let outcome = command::run(&["ls", "--root", "ema", single.to_str().unwrap()]);
    assert_eq!(outcome.code, 3, "{} {}", outcome.stdout, outcome.stderr);
    assert!(outcome.stderr.contains("has no `ema`"), "{}", outcome.stderr);
    // Its entries are tensors: none of them is a dictionary to choose.
    assert!(outcome.stderr.contains("what to do: leave --root out"), "{}", outcome.stderr);
    let nested = folder.path().join("with.pt");
    let outcome = command::run(&["ls", "--root", "model", nested.to_str().unwrap()]);
    assert!(outcome.stderr.contains("what to do: choose with --root ema"), "{}", outcome.stderr);
}

#[test]
fn names_to_keep_stay() {
    let folder = tempfile::tempdir().unwrap();
    write(folder.path(), &[("a.ckpt", &torch()), ("b.pt", &torch())]);
    let keep = KeepRules::new(["*.ckpt"]).unwrap();
    let view = View::new(folder.path(), ViewOptions { keep, ..ViewOptions::default() }).unwrap();
    assert_eq!(shown(&view, ""), ["a.ckpt", "b.safetensors*"]);
    let outcome = command::run(&["ls", "--keep", "[", folder.path().to_str().unwrap()]);
    assert_eq!(outcome.code, 2, "{}", outcome.stderr);
}

#[test]
fn a_name_taken_by_a_directory_is_not_shown_twice() {
    let folder = tempfile::tempdir().unwrap();
    write(folder.path(), &[("foo.pt", &torch()), ("foo.safetensors/inner.pt", &torch())]);
    let view = view(folder.path());
    assert_eq!(shown(&view, ""), ["foo.pt", "foo.safetensors/"]);
    assert_eq!(shown(&view, "foo.safetensors"), ["inner.safetensors*"]);
}
