//! Promise: an index stays where loaders need it, is true of what is shown, and stays nowhere else.
//!
//! Loaders that take every `.safetensors` need it where other weights lie beside a model in shards. Loaders of
//! any model need it where the model is not called `model.safetensors`.

use std::collections::BTreeMap;
use std::fs;
use std::path::Path;
use std::sync::Arc;

use crate::common::command;
use crate::common::safetensors::valid;
use crate::common::shards::index;
use crate::common::view::{hidden, shown, view, view_of_all, write};
use ckptfs::view::{ShownFile, View, ViewEntry};
use serde_json::{Value, json};

const INDEX: &str = "model.safetensors.index.json";
const SHARDS: [&str; 2] = ["model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"];

/// A model in two shards, `a` and `b`, and files beside it.
fn model(beside: &[&str]) -> tempfile::TempDir {
    let folder = tempfile::tempdir().unwrap();
    let text = index(&[("a", SHARDS[0]), ("b", SHARDS[1])]);
    write(folder.path(), &[(SHARDS[0], &valid(&["a"])), (SHARDS[1], &valid(&["b"]))]);
    write(folder.path(), &[(INDEX, text.as_bytes()), ("config.json", b"{}")]);
    for name in beside {
        write(folder.path(), &[(name, &valid(&["other"]))]);
    }
    folder
}

fn made(view: &View, name: &str) -> Arc<ShownFile> {
    match view.lookup(Path::new(""), name.as_ref()).unwrap() {
        Some(ViewEntry::Index(index)) => index,
        other => panic!("{name} is {other:?}"),
    }
}

fn content(view: &View, shown: &ShownFile) -> Value {
    let virtual_file = view.virtual_file(shown).unwrap();
    assert_eq!(virtual_file.size(), shown.metadata().size);
    let mut bytes = vec![0; virtual_file.size() as usize + 1];
    let n = ckptfs::virtual_file::VirtualFileReader::open(&virtual_file)
        .unwrap()
        .read_at(&mut bytes, 0)
        .unwrap();
    assert_eq!(n as u64, virtual_file.size());
    serde_json::from_slice(&bytes[..n]).unwrap()
}

#[test]
fn the_index_names_the_virtual_file_for_every_tensor() {
    for beside in ["consolidated.safetensors", "adapter_model.safetensors", "extra.safetensors"] {
        let folder = model(&[beside]);
        let view = view(folder.path());
        let mut names =
            ["config.json", "model.safetensors*", "model.safetensors.index.json+", beside];
        names.sort_by_key(|name| name.trim_end_matches(['*', '+']));
        assert_eq!(shown(&view, ""), names);
        assert_eq!(hidden(&view, ""), SHARDS);
        let index = made(&view, INDEX);
        assert!(index.is_index());
        let read = content(&view, &index);
        let all = BTreeMap::from([("a", "model.safetensors"), ("b", "model.safetensors")]);
        assert_eq!(read["weight_map"], json!(all));
        let virtual_file = match view.lookup(Path::new(""), "model.safetensors".as_ref()).unwrap() {
            Some(ViewEntry::VirtualFile(virtual_file)) => view.virtual_file(&virtual_file).unwrap(),
            other => panic!("{other:?}"),
        };
        assert_eq!(
            read["metadata"]["total_size"],
            virtual_file.size() - virtual_file.header_size()
        );
    }
}

#[test]
fn a_virtual_file_alone_has_no_index() {
    for beside in [&[][..], &["tokenizer.json"], &["optimizer.pt"]] {
        let folder = model(beside);
        let view = view(folder.path());
        assert!(!shown(&view, "").iter().any(|name| name.contains("index")), "{beside:?}");
        assert!(view.lookup(Path::new(""), INDEX.as_ref()).unwrap().is_none());
    }
    // A set without an index gets none.
    let folder = model(&["consolidated.safetensors"]);
    fs::remove_file(folder.path().join(INDEX)).unwrap();
    let names = ["config.json", "consolidated.safetensors", "model.safetensors*"];
    assert_eq!(shown(&view(folder.path()), ""), names);
}

#[test]
fn a_set_not_called_model_keeps_its_index() {
    for (stem, end, index_name) in [
        ("diffusion_pytorch_model", "", "diffusion_pytorch_model.safetensors.index.json"),
        ("diffusion_pytorch_model", ".fp16", "diffusion_pytorch_model.safetensors.index.fp16.json"),
        ("adapter_model", "", "adapter_model.safetensors.index.json"),
        ("flux1-dev", "", "flux1-dev.safetensors.index.json"),
    ] {
        let folder = tempfile::tempdir().unwrap();
        let shards = [1, 2].map(|n| format!("{stem}{end}-0000{n}-of-00002.safetensors"));
        let text = index(&[("a", &shards[0]), ("b", &shards[1])]);
        write(folder.path(), &[(&shards[0], &valid(&["a"])), (&shards[1], &valid(&["b"]))]);
        write(folder.path(), &[(index_name, text.as_bytes())]);
        let view = view(folder.path());
        let virtual_file = format!("{stem}{end}.safetensors");
        let mut names = [format!("{virtual_file}*"), format!("{index_name}+")];
        names.sort();
        let mut found = shown(&view, "");
        found.sort();
        assert_eq!(found, names);
        assert_eq!(hidden(&view, ""), shards);
        let all = BTreeMap::from([("a", &virtual_file), ("b", &virtual_file)]);
        assert_eq!(content(&view, &made(&view, index_name))["weight_map"], json!(all));
    }
}

#[test]
fn two_models_in_one_folder_have_an_index_each() {
    let folder = model(&[]);
    let half = ["model.fp16-00001-of-00001.safetensors", "model.safetensors.index.fp16.json"];
    let text = index(&[("a", half[0])]);
    write(folder.path(), &[(half[0], &valid(&["a"])), (half[1], text.as_bytes())]);
    let view = view(folder.path());
    let read = content(&view, &made(&view, half[1]));
    assert_eq!(read["weight_map"], json!({"a": "model.fp16.safetensors"}));
    assert_eq!(content(&view, &made(&view, INDEX))["weight_map"].as_object().unwrap().len(), 2);
}

#[test]
fn originals_that_are_shown_keep_their_own_index() {
    let folder = model(&["consolidated.safetensors"]);
    let all = view_of_all(folder.path());
    assert!(shown(&all, "").contains(&INDEX.to_owned()));
    assert!(matches!(all.lookup(Path::new(""), INDEX.as_ref()), Ok(Some(ViewEntry::Source(_)))));
    // A set that cannot be shown as a virtual file keeps its index too.
    fs::remove_file(folder.path().join(SHARDS[1])).unwrap();
    let names = ["config.json", "consolidated.safetensors", SHARDS[0], INDEX];
    assert_eq!(shown(&view(folder.path()), ""), names);
}

#[test]
fn a_changed_model_has_another_index() {
    let folder = model(&["consolidated.safetensors"]);
    let before = made(&view(folder.path()), INDEX).identity();
    let view = view(folder.path());
    assert_eq!(made(&view, INDEX).identity(), before);
    let text = index(&[("a", SHARDS[0]), ("longer", SHARDS[1])]);
    write(folder.path(), &[(SHARDS[1], &valid(&["longer"])), (INDEX, text.as_bytes())]);
    let after = made(&View::new(folder.path(), Default::default()).unwrap(), INDEX);
    assert_ne!(after.identity(), before);
    assert!(content(&view, &after)["weight_map"].get("longer").is_some());
}

#[test]
fn ls_reports_the_index() {
    let folder = model(&["consolidated.safetensors"]);
    let path = folder.path().to_str().unwrap();
    let outcome = command::run(&["ls", "--json", path]);
    let listed: Value = serde_json::from_str(&outcome.stdout).unwrap();
    let entries = listed[0]["entries"].as_array().unwrap();
    let entry = entries.iter().find(|entry| entry["name"] == INDEX).unwrap();
    assert_eq!(entry["kind"], "index");
    let text = command::run(&["ls", path]).stdout;
    let line = text.lines().find(|line| line.contains("made for")).unwrap();
    assert!(line.contains(INDEX) && line.contains("names only the virtual file"), "{line}");
}
