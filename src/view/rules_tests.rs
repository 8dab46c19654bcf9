//! Tests of what the names of a directory decide.

use std::fs;

use super::*;
use crate::checkpoint::{candidates_by_name, is_training_file};
use crate::source::{self, Root};

/// The virtual files of a directory with these names, each as `virtual file < checkpoint`.
fn planned(names: &[&str]) -> Vec<String> {
    planned_with(names, &[], &KeepRules::default()).0
}

/// Also what is skipped; with indexes that name shards, and names to keep.
fn planned_with(
    names: &[&str],
    indexes: &[(&str, &[&str])],
    keep: &KeepRules,
) -> (Vec<String>, Vec<(String, String)>) {
    let folder = tempfile::tempdir().unwrap();
    for (index, shards) in indexes {
        let shards: Vec<String> =
            shards.iter().enumerate().map(|(n, shard)| format!("\"t{n}\":{shard:?}")).collect();
        let json = format!("{{\"weight_map\":{{{}}}}}", shards.join(","));
        fs::write(folder.path().join(index), json).unwrap();
    }
    let (root, directory) = Root::for_directory(folder.path(), source::LinkPolicy::Inside).unwrap();
    let indexes = indexes.iter().map(|(index, _)| *index);
    let mut names: Vec<String> = names.iter().copied().chain(indexes).map(str::to_owned).collect();
    names.sort();
    let candidates = candidates_by_name(&root, &directory, &names, &|name| keep.matches(name));
    let NamePlan { files, skipped } = plan_names(&names, candidates, keep);
    (files.into_iter().map(|p| format!("{} < {}", p.name, p.source_name())).collect(), skipped)
}

/// The skipped names, and why.
fn skipped(names: &[&str]) -> Vec<(String, String)> {
    planned_with(names, &[], &KeepRules::default()).1
}

const NOTHING: [&str; 0] = [];

#[test]
fn single_files_that_loaders_look_for() {
    for (file, shown) in [
        ("pytorch_model.bin", "model.safetensors"),
        ("pytorch_model.fp16.bin", "model.fp16.safetensors"),
        ("pytorch_model.non_ema.bin", "model.non_ema.safetensors"),
        ("diffusion_pytorch_model.bin", "diffusion_pytorch_model.safetensors"),
        ("diffusion_pytorch_model.fp16.bin", "diffusion_pytorch_model.fp16.safetensors"),
        ("adapter_model.bin", "adapter_model.safetensors"),
        ("pytorch_lora_weights.bin", "pytorch_lora_weights.safetensors"),
    ] {
        assert_eq!(planned(&[file]), [format!("{shown} < {file}")]);
        assert_eq!(planned(&["config.json", file]), [format!("{shown} < {file}")]);
        // What is safetensors already is as it should be, and so is what lies beside it.
        assert_eq!(planned(&[shown]), NOTHING);
        assert_eq!(planned(&[file, shown]), NOTHING);
        assert_eq!(
            skipped(&[file, shown]),
            [(file.into(), format!("a real {shown} lies beside it"))]
        );
    }
}

#[test]
fn sets_in_every_spelling() {
    for (stem, whole) in [
        ("pytorch_model", "model"),
        ("diffusion_pytorch_model", "diffusion_pytorch_model"),
        ("adapter_model", "adapter_model"),
        ("pytorch_lora_weights", "pytorch_lora_weights"),
        ("model", "model"),
    ] {
        let extension = if stem == "model" { "safetensors" } else { "bin" };
        let first = format!("{stem}-00001-of-00002.{extension}");
        let second = format!("{stem}-00002-of-00002.{extension}");
        let index = format!("{stem}.{extension}.index.json");
        let shards = [first.as_str(), second.as_str()];
        assert_eq!(planned(&shards), [format!("{whole}.safetensors < {stem}.{extension}")]);
        let with_index = planned_with(&shards, &[(&index, &shards)], &KeepRules::default()).0;
        assert_eq!(with_index, [format!("{whole}.safetensors < {index}")]);

        let before = [1, 2].map(|n| format!("{stem}.fp16-0000{n}-of-00002.{extension}"));
        let after = [1, 2].map(|n| format!("{stem}-0000{n}-of-00002.fp16.{extension}"));
        let before_index = format!("{stem}.fp16.{extension}.index.json");
        let after_index = format!("{stem}.{extension}.index.fp16.json");
        let shown = format!("{whole}.fp16.safetensors");
        for shards in [before, after] {
            let shards = shards.each_ref().map(String::as_str);
            assert_eq!(planned(&shards), [format!("{shown} < {stem}.fp16.{extension}")]);
            for index in [&before_index, &after_index] {
                let with_index = planned_with(&shards, &[(index, &shards)], &KeepRules::default());
                // Never the one without the variant.
                assert_eq!(with_index, (vec![format!("{shown} < {index}")], vec![]));
            }
        }
    }
}

#[test]
fn two_indexes_of_one_set_leave_it_alone() {
    let shards = ["model.fp16-00001-of-00002.safetensors", "model.fp16-00002-of-00002.safetensors"];
    let indexes = ["model.safetensors.index.fp16.json", "model.fp16.safetensors.index.json"];
    let both = indexes.map(|index| (index, shards.as_slice()));
    let (plans, skipped) = planned_with(&shards, &both, &KeepRules::default());
    assert_eq!(plans, NOTHING);
    assert_eq!(
        skipped.iter().map(|(name, _)| name.as_str()).collect::<Vec<_>>(),
        [indexes[1], indexes[0]]
    );
}

#[test]
fn a_model_and_its_variant_are_two() {
    assert_eq!(
        planned(&["pytorch_model.bin", "pytorch_model.fp16.bin"]),
        [
            "model.fp16.safetensors < pytorch_model.fp16.bin",
            "model.safetensors < pytorch_model.bin",
        ]
    );
}

#[test]
fn never_a_second_beside_a_model() {
    let shards = ["model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"];
    for torch in [
        "pytorch_model.bin",
        "pytorch_model.fp16.bin",
        "adapter_model.bin",
        "diffusion_pytorch_model.bin",
        "pytorch_lora_weights.bin",
    ] {
        for real in ["model.fp32.safetensors", "adapter_model.other.safetensors"] {
            assert_eq!(planned(&[torch, real]), NOTHING, "{torch} beside {real}");
            let (name, reason) = &skipped(&[torch, real])[0];
            assert_eq!(name, torch);
            assert!(reason.contains(real), "{reason}");
        }
        let beside_a_set = [torch, shards[0], shards[1]];
        assert_eq!(planned(&beside_a_set), ["model.safetensors < model.safetensors"], "{torch}");
        assert_eq!(skipped(&beside_a_set)[0].0, torch);
    }
    let index: (&str, &[&str]) = ("model.safetensors.index.json", &shards);
    let names = [shards[0], shards[1], "pytorch_model.bin"];
    let (plans, skipped) = planned_with(&names, &[index], &KeepRules::default());
    assert_eq!(plans, ["model.safetensors < model.safetensors.index.json"]);
    assert_eq!(skipped[0].0, "pytorch_model.bin");
    // A real one of the name leaves even its own shards alone.
    let names = [shards[0], shards[1], "model.safetensors"];
    assert_eq!(planned_with(&names, &[index], &KeepRules::default()).0, NOTHING);
}

#[test]
fn anything_else_in_a_models_folder_stays() {
    let others =
        ["foo.pt", "foo.pth", "foo.ckpt", "vae.bin", "ema-00001-of-00001.bin", "pytorch_model.pt"];
    for mark in ["config.json", "pytorch_model.bin", "adapter_model.safetensors"] {
        for other in others {
            let plans = planned(&[mark, other]);
            assert!(!plans.iter().any(|plan| plan.ends_with(other)), "{mark}: {plans:?}");
            assert_eq!(skipped(&[mark, other]).len(), 1, "{mark}, {other}");
        }
    }
    assert_eq!(planned(&["config.json", "foo.pt"]), NOTHING);
    // Names that only look like those that loaders look for.
    for other in ["pytorch_models.bin", "my_pytorch_model.bin", "model.bin", "model_ema.pt"] {
        assert_eq!(planned(&["config.json", other]), NOTHING);
        assert_eq!(planned(&[other]).len(), 1, "{other}");
    }
}

#[test]
fn in_any_other_folder_each_checkpoint_is_shown() {
    assert_eq!(
        planned(&["a.pt", "b.pth", "c.ckpt", "d.bin", "e.safetensors", "f.sft"]),
        [
            "a.safetensors < a.pt",
            "b.safetensors < b.pth",
            "c.safetensors < c.ckpt",
            "d.safetensors < d.bin",
        ]
    );
    assert_eq!(planned(&["v1.5-pruned.ckpt"]), ["v1.5-pruned.safetensors < v1.5-pruned.ckpt"]);
    let set = ["flux-00001-of-00002.safetensors", "flux-00002-of-00002.safetensors"];
    assert_eq!(planned(&set), ["flux.safetensors < flux.safetensors"]);
    let index: (&str, &[&str]) = ("flux.safetensors.index.json", &set);
    let with_index = planned_with(&set, &[index], &KeepRules::default()).0;
    assert_eq!(with_index, ["flux.safetensors < flux.safetensors.index.json"]);
    for other in ["a.gguf", "a.onnx", "a.pkl", "a.pt2", "a.h5", "a.PT", "pt", "a.pt.part", "a"] {
        assert_eq!(planned(&[other]), NOTHING);
        assert_eq!(skipped(&[other]), []);
    }
}

#[test]
fn two_for_one_name_stay() {
    for names in [
        vec!["foo.pt", "foo.bin"],
        vec!["foo.pt", "foo.pth", "foo.ckpt"],
        vec!["foo.pt", "foo-00001-of-00001.bin"],
        vec!["foo-00001-of-00001.pt", "foo-00001-of-00001.safetensors"],
        vec!["foo-00001-of-00001.bin", "foo-00001-of-00002.bin"],
    ] {
        assert_eq!(planned(&names), NOTHING, "{names:?}");
        assert_eq!(skipped(&names).len(), names.len(), "{names:?}");
        let mut with_other = names.clone();
        with_other.push("other.pt");
        assert_eq!(planned(&with_other), ["other.safetensors < other.pt"]);
    }
    assert_eq!(planned(&["foo.pt", "foo.safetensors"]), NOTHING);
}

#[test]
fn in_a_models_folder_the_loaders_first_choice_is_shown() {
    let set = ["pytorch_model-00001-of-00002.bin", "pytorch_model-00002-of-00002.bin"];
    let names = ["pytorch_model.bin", set[0], set[1]];
    let index: (&str, &[&str]) = ("pytorch_model.bin.index.json", &set);
    for indexes in [&[][..], &[index]] {
        let (plans, skipped) = planned_with(&names, indexes, &KeepRules::default());
        assert_eq!(plans, ["model.safetensors < pytorch_model.bin"]);
        assert_eq!(skipped.len(), 1);
        assert_eq!(skipped[0].1, "model.safetensors is made of pytorch_model.bin");
    }
    // Neither of two sets comes first.
    let two = ["pytorch_model-00001-of-00001.bin", "pytorch_model-00001-of-00002.bin"];
    assert_eq!(planned(&two), NOTHING);
    assert_eq!(skipped(&two).len(), 2);
}

#[test]
fn numbered_files_that_the_index_does_not_name_go_with_it() {
    let stale = "model-00001-of-00003.safetensors";
    let own = "model-00001-of-00001.safetensors";
    let folder = tempfile::tempdir().unwrap();
    let index = "model.safetensors.index.json";
    fs::write(folder.path().join(index), format!("{{\"weight_map\":{{\"a\":{own:?}}}}}")).unwrap();
    let (root, directory) = Root::for_directory(folder.path(), source::LinkPolicy::Inside).unwrap();
    let names = [index, own, stale].map(str::to_owned);
    let candidates = candidates_by_name(&root, &directory, &names, &is_training_file);
    let NamePlan { files, skipped } = plan_names(&names, candidates, &KeepRules::default());
    assert_eq!(skipped, []);
    let [plan] = files.try_into().unwrap();
    assert_eq!(plan.original_names(), [index, own, stale]);
}

#[test]
fn kept_names_stay() {
    for name in [
        "optimizer.pt",
        "optimizer.bin",
        "optimizer_1.bin",
        "scheduler.pt",
        "rng_state_3.pth",
        "training_args.bin",
        "mp_rank_00_model_states.pt",
        "optimizer-00001-of-00001.bin",
    ] {
        assert_eq!(planned(&[name]), NOTHING);
        assert_eq!(planned(&["config.json", name]), NOTHING);
    }
    let keep = KeepRules::new(["*.ckpt", "special?.pt", "flux*"]).unwrap();
    let names = ["a.ckpt", "special1.pt", "special.pt", "a.pt", "flux-00001-of-00001.pt"];
    let (plans, _) = planned_with(&names, &[], &keep);
    assert_eq!(plans, ["a.safetensors < a.pt", "special.safetensors < special.pt"]);
    // A set is kept if one of its files is, or its index.
    let set = ["big-00001-of-00002.bin", "big-00002-of-00002.bin"];
    let index: (&str, &[&str]) = ("big.bin.index.json", &set);
    for pattern in ["*.index.json", "big-00002*", "big.bin"] {
        let keep = KeepRules::new([pattern]).unwrap();
        let (plans, skipped) = planned_with(&set, &[index], &keep);
        assert_eq!(plans, NOTHING, "{pattern}");
        assert_eq!(skipped[0].0, index.0);
    }
    assert!(KeepRules::new(["[a"]).is_err());
}

#[test]
fn kept_names_still_mark_a_models_folder() {
    let keep = KeepRules::new(["model.safetensors", "pytorch_model.bin"]).unwrap();
    let beside = |name, other| planned_with(&[name, other], &[], &keep).0;
    assert_eq!(beside("model.safetensors", "adapter_model.bin"), NOTHING);
    assert_eq!(beside("pytorch_model.bin", "foo.pt"), NOTHING);
}

#[test]
fn a_name_taken_by_anything_is_not_shown_twice() {
    // Not a file: it is among the names and no candidate.
    let candidates = vec![Candidate::single("foo.pt".to_owned())];
    let names = ["foo.pt", "foo.safetensors"].map(str::to_owned);
    let NamePlan { files, skipped } = plan_names(&names, candidates, &KeepRules::default());
    assert!(files.is_empty());
    assert_eq!(skipped[0].1, "a real foo.safetensors lies beside it");
}

#[test]
fn hostile_names_are_planned_like_others() {
    for name in [".bin", ".pt", ".safetensors", ".sft", "..", "."] {
        assert_eq!(planned(&[name]), NOTHING, "{name}");
    }
    for (name, shown) in [
        ("-00001-of-00002.bin", "-00001-of-00002.safetensors"),
        ("a-1-of-2.bin", "a-1-of-2.safetensors"),
        ("*.pt", "*.safetensors"),
        ("a-*-of-00002.bin", "a-*-of-00002.safetensors"),
        ("\u{1b}[31m\n.pt", "\u{1b}[31m\n.safetensors"),
        ("...pt", "...safetensors"),
        (".hidden.pt", ".hidden.safetensors"),
        (" .pt", " .safetensors"),
        ("é.ckpt", "é.safetensors"),
    ] {
        assert_eq!(planned(&[name]), [format!("{shown} < {name}")]);
    }
    let longest = |stem: usize| format!("{}.bin", "x".repeat(stem));
    assert_eq!(planned(&[&longest(243)]).len(), 1);
    assert_eq!(planned(&[&longest(244)]), NOTHING);
    let (name, reason) = &skipped(&[&longest(251)])[0];
    assert_eq!((name, reason.as_str()), (&longest(251), "its name would be too long"));
}
