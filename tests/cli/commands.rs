//! Commands as people and programs run them: results, messages and exit codes.

use std::fs;
use std::path::Path;
use std::process::Command;

use crate::common::command;
use crate::common::command::{names_in, path, run, run_in_shell, write_model};
use crate::common::safetensors::{entry, file};

#[test]
fn a_directory_with_one_checkpoint_is_that_checkpoint() {
    let folder = tempfile::tempdir().unwrap();
    write_model(&folder.path().join("model.safetensors"), 2, 8);
    fs::write(folder.path().join("config.json"), "{}").unwrap();
    fs::write(folder.path().join("tokenizer.bin"), "not a checkpoint").unwrap();
    for kept in [
        "optimizer.pt",
        "scheduler.bin",
        "rng_state_0.pth",
        "training_args.bin",
        "mp_rank_00_model_states.pt",
    ] {
        // A checkpoint by its content, and still not the directory's default.
        command::write_transposed(&folder.path().join(kept), 2);
    }
    let outcome = run(&["inspect", folder.path().to_str().unwrap()]);
    assert_eq!(outcome.code, 0, "{}", outcome.stderr);
    assert!(outcome.stdout.contains("2 U8 (16 bytes)"), "{}", outcome.stdout);
}

#[test]
fn the_columns_of_tensors_are_aligned_for_types_of_any_name() {
    let folder = tempfile::tempdir().unwrap();
    let tensors = [("a", "U8", "[2]", 0, 2), ("long.name", "F8_E4M3FNUZ", "[1,1]", 2, 3)];
    let entries =
        tensors.map(|(name, dtype, shape, start, end)| entry(name, dtype, shape, start, end));
    let model = folder.path().join("model.safetensors");
    fs::write(&model, file(&format!("{{{}}}", entries.join(",")), 3)).unwrap();
    let outcome = run(&["inspect", "--tensors", model.to_str().unwrap()]);
    let rows: Vec<&str> = outcome.stdout.lines().filter(|line| line.contains('[')).collect();
    let [first, second] = rows[..] else { panic!("{}", outcome.stdout) };
    let ends = |row: &str, text: &str| row.find(text).map(|start| start + text.len());
    assert_eq!(first.find('['), second.find('['), "{}", outcome.stdout);
    assert_eq!(first.find("U8"), second.find("F8"), "{}", outcome.stdout);
    assert_eq!(ends(first, "2 bytes"), ends(second, "1 bytes"), "{}", outcome.stdout);
}

#[test]
fn commands_of_the_python_package_are_explained_and_not_listed() {
    let folder = tempfile::tempdir().unwrap();
    // A directory of that name is not used as the source, as with every other command.
    fs::create_dir(folder.path().join("bench")).unwrap();
    fs::create_dir(folder.path().join("there")).unwrap();
    for name in ["run", "bench", "enable", "disable"] {
        for words in [
            vec![name],
            vec![name, "there"],
            vec![name, "--help"],
            vec!["help", name],
            vec!["-q", name, "there"],
            vec!["--quiet", "help", name],
        ] {
            let mut command = Command::new(command::ckptfs());
            let outcome = command::run_command(command.current_dir(folder.path()).args(&words));
            assert_eq!(outcome.code, 2, "{words:?}: {}", outcome.stderr);
            assert!(outcome.stdout.is_empty(), "{words:?}: {}", outcome.stdout);
            let messages = format!("ckptfs: {name}: only the Python package has this command");
            assert!(outcome.stderr.starts_with(&messages), "{words:?}: {}", outcome.stderr);
            let remedy = concat!("pip install dist/ckptfs-", env!("CARGO_PKG_VERSION"), "-*.whl");
            assert!(outcome.stderr.contains(remedy), "{words:?}: {}", outcome.stderr);
        }
    }
    for words in [vec!["--help"], vec!["help"], vec![]] {
        let outcome = run(&words);
        let listed = outcome.stdout + &outcome.stderr;
        assert!(listed.contains("  export "), "{listed}");
        for name in ["run", "bench", "enable", "disable"] {
            assert!(!listed.contains(&format!("  {name} ")), "{listed}");
        }
    }
}

#[test]
fn a_file_whose_name_begins_with_a_dash_is_told_from_an_option() {
    let folder = tempfile::tempdir().unwrap();
    write_model(&folder.path().join("it's.safetensors"), 1, 8);
    for name in ["-x.safetensors", "--two words.safetensors", "-q.safetensors"] {
        write_model(&folder.path().join(name), 1, 8);
        for words in [vec!["inspect", name], vec!["verify", "it's.safetensors", name, "--quiet"]] {
            let mut command = Command::new(command::ckptfs());
            let outcome = command::run_command(command.current_dir(folder.path()).args(&words));
            assert_eq!(outcome.code, 2, "{words:?}: {}", outcome.stderr);
            let says = format!("ckptfs: {name}: begins with a dash, and was taken for an option\n");
            assert!(outcome.stderr.starts_with(&says), "{words:?}: {}", outcome.stderr);
            // What it says to type works.
            let (_, remedy) = outcome.stderr.split_once("type it as a path: ckptfs ").unwrap();
            let script = format!("cd {} && $CKPTFS {remedy}", folder.path().display());
            let outcome = run_in_shell(Command::new("bash"), &script, &[]);
            assert_eq!(outcome.code, 0, "{script}: {}", outcome.stderr);
        }
    }
    // An option that is none stays one.
    let mut command = Command::new(command::ckptfs());
    let outcome = command::run_command(command.current_dir(folder.path()).args(["ls", "-y"]));
    assert!(outcome.stderr.contains("unexpected argument '-y'"), "{}", outcome.stderr);
}

#[test]
fn a_path_without_a_command_is_told_from_a_wrong_command() {
    let folder = tempfile::tempdir().unwrap();
    fs::create_dir(folder.path().join("models")).unwrap();
    for words in [vec!["models"], vec!["-q", "models"]] {
        let mut command = Command::new(command::ckptfs());
        let outcome = command::run_command(command.current_dir(folder.path()).args(&words));
        let says = "ckptfs: models: is a path, and a command must come first\n  \
                    what to do: describe it: ckptfs inspect models; or ";
        assert_eq!(outcome.code, 2, "{}", outcome.stderr);
        assert!(outcome.stderr.starts_with(says), "{}", outcome.stderr);
    }
}

#[test]
fn help_fits_80_columns_without_a_terminal() {
    let list = run(&["help"]).stdout;
    let (_, commands) = list.split_once("Commands:\n").unwrap();
    let names = commands.lines().map_while(|line| line.strip_prefix("  ")?.split(' ').next());
    let mut names: Vec<&str> = names.filter(|name| !name.is_empty()).collect();
    assert!(names.contains(&"mount") && names.contains(&"man"), "{names:?}");
    names.retain(|name| *name != "help");
    for words in names.iter().map(|name| vec![*name, "--help"]).chain([vec!["--help"]]) {
        let mut command = Command::new(command::ckptfs());
        let outcome = command::run_command(command.args(&words));
        assert_eq!(outcome.code, 0, "{words:?}: {}", outcome.stderr);
        let long = outcome.stdout.lines().filter(|line| line.chars().count() > 80);
        assert_eq!(long.collect::<Vec<&str>>(), Vec::<&str>::new(), "{words:?}");
    }
}

#[test]
fn a_directory_with_several_checkpoints_needs_one_named() {
    let folder = tempfile::tempdir().unwrap();
    for name in ["a.safetensors", "b-00001-of-00002.safetensors", "b-00002-of-00002.safetensors"] {
        let shard = folder.path().join(name);
        let tensors = write_model(&shard, 1, 8);
        // Each shard has its own name.
        let view =
            safetensors::tensor::TensorView::new(safetensors::Dtype::U8, vec![8], &tensors[0].1)
                .unwrap();
        safetensors::serialize_to_file([(name, view)], None, &shard).unwrap();
    }
    let whole = folder.path().to_str().unwrap();
    for command in
        [vec!["inspect", whole], vec!["verify", whole], vec!["export", whole, "/nowhere/out"]]
    {
        let outcome = run(&command);
        assert_eq!(outcome.code, 2);
        for name in ["a.safetensors", "b.safetensors"] {
            assert!(outcome.stderr.contains(&path(folder.path(), name)), "{}", outcome.stderr);
        }
    }
    let set = run(&["inspect", "--tensors", &path(folder.path(), "b.safetensors")]);
    assert_eq!(set.code, 0, "{}", set.stderr);
    assert!(set.stdout.contains("b-00002-of-00002.safetensors"), "{}", set.stdout);
    let shard = run(&["inspect", &path(folder.path(), "b-00001-of-00002.safetensors")]);
    assert_eq!(shard.code, 0);
    assert!(shard.stdout.contains("only shard 1 of 2"), "{}", shard.stdout);
}

#[test]
fn a_file_beside_leftover_shards_of_its_name_is_the_checkpoint() {
    let folder = tempfile::tempdir().unwrap();
    write_model(&folder.path().join("model.safetensors"), 2, 8);
    let rest = ["model-00001-of-00002.safetensors", "model.safetensors.index.json"];
    write_model(&folder.path().join(rest[0]), 3, 8);
    fs::write(folder.path().join(rest[1]), format!(r#"{{"weight_map": {{"x": "{}"}}}}"#, rest[0]))
        .unwrap();
    let (whole, out) = (folder.path().to_str().unwrap(), path(folder.path(), "out"));
    let outcome = run(&["inspect", whole]);
    assert_eq!(outcome.code, 0, "{}", outcome.stderr);
    assert!(outcome.stdout.contains("2 U8 (16 bytes)"), "{}", outcome.stdout);
    let exported = run(&["export", whole, &out]);
    assert_eq!(exported.code, 0, "{}", exported.stderr);
    for name in rest {
        assert!(outcome.stdout.contains(name), "{}", outcome.stdout);
        assert!(exported.stderr.contains(name), "{}", exported.stderr);
    }
}

#[test]
fn exit_codes_tell_failures_apart() {
    let folder = tempfile::tempdir().unwrap();
    let (good, bad) =
        (path(folder.path(), "good.safetensors"), path(folder.path(), "bad.safetensors"));
    write_model(Path::new(&good), 1, 8);
    fs::write(&bad, "\x08\0\0\0\0\0\0\0{\"a\":1}").unwrap();
    assert_eq!(run(&["inspect", &good]).code, 0);
    assert_eq!(run(&["inspect", &path(folder.path(), "missing")]).code, 1);
    assert_eq!(run(&["inspect"]).code, 2);
    assert_eq!(run(&["inspect", "--no-such-flag", &good]).code, 2);
    assert_eq!(run(&[]).code, 2);
    for args in [vec!["inspect", &bad], vec!["verify", &bad], vec!["export", &bad, "/nowhere/out"]]
    {
        let outcome = run(&args);
        assert_eq!(outcome.code, 3, "{}", outcome.stderr);
        assert!(
            outcome.stderr.contains("bad.safetensors") && outcome.stderr.contains("what to do:"),
            "{}",
            outcome.stderr
        );
    }
}

#[test]
fn the_json_has_all_fields_refused_or_not() {
    let folder = tempfile::tempdir().unwrap();
    let (good, bad) =
        (path(folder.path(), "good.safetensors"), path(folder.path(), "bad.safetensors"));
    write_model(Path::new(&good), 2, 8);
    fs::write(&bad, "\x08\0\0\0\0\0\0\0{\"a\":1}").unwrap();
    for (file, code) in [(&good, 0), (&bad, 3)] {
        let outcome = run(&["inspect", "--json", file]);
        assert_eq!(outcome.code, code);
        let report: serde_json::Value = serde_json::from_str(&outcome.stdout).unwrap();
        let fields: Vec<_> = report.as_object().unwrap().keys().cloned().collect();
        assert_eq!(
            fields,
            [
                if code == 0 { &[][..] } else { &["error"] },
                &[
                    "files",
                    "format",
                    "metadata",
                    "notes",
                    "path",
                    "refused",
                    "tensors",
                    "virtual_file"
                ]
            ]
            .concat()
        );
        assert_eq!(report["virtual_file"].is_null(), code == 3);
        assert_eq!(report["refused"].as_array().unwrap().is_empty(), code == 0);
    }
    let report: serde_json::Value =
        serde_json::from_str(&run(&["inspect", "--json", &good]).stdout).unwrap();
    assert_eq!(report["format"], "safetensors");
    assert_eq!(report["metadata"]["format"], "pt");
    let tensor = serde_json::json!({
        "name": "layer.0.weight", "dtype": "U8", "shape": [8], "nbytes": 8, "layout": "run", "shares_with": []
    });
    assert_eq!(report["tensors"][0], tensor);
    assert_eq!(report["virtual_file"]["header_size"], 4096);
    assert_eq!(report["virtual_file"]["size"], 4096 + 16);
}

#[test]
fn verify_names_the_differences() {
    let folder = tempfile::tempdir().unwrap();
    let save = |name: &str, tensors: &[(&str, safetensors::Dtype, usize, &[u8])]| {
        let views = tensors.iter().map(|&(name, dtype, len, data)| {
            (name, safetensors::tensor::TensorView::new(dtype, vec![len], data).unwrap())
        });
        safetensors::serialize_to_file(views, None, &folder.path().join(name)).unwrap();
        path(folder.path(), name)
    };
    use safetensors::Dtype::{I8, U8, U16};
    let first = save(
        "a.safetensors",
        &[
            ("same", U8, 2, b"xy"),
            ("kind", U8, 2, b"xy"),
            ("mine", U8, 1, b"x"),
            ("values", U16, 2, b"abcd"),
        ],
    );
    let second = save(
        "b.safetensors",
        &[
            ("same", U8, 2, b"xy"),
            ("kind", I8, 2, b"xy"),
            ("yours", U8, 1, b"x"),
            ("values", U16, 2, b"abXd"),
        ],
    );
    assert_eq!(run(&["verify", &first]).code, 0);
    assert_eq!(run(&["verify", &first, "--against", &first]).code, 0);
    let outcome = run(&["verify", &first, "--against", &second]);
    assert_eq!(outcome.code, 1);
    let expected = "\
`kind` is U8 [2] in the first and I8 [2] in the second
`mine` is only in the first
`values` differs in its values, first in element 1
`yours` is only in the second
4 differences
";
    assert_eq!(outcome.stdout, expected);
}

#[test]
fn an_element_of_less_than_a_byte_is_named() {
    let dir = tempfile::tempdir().unwrap();
    let save = |name: &str, last: u8| {
        let header = r#"{"t":{"dtype":"F4","shape":[8],"data_offsets":[0,4]}}"#;
        let path = dir.path().join(name);
        let len = (header.len() as u64).to_le_bytes();
        std::fs::write(&path, [&len[..], header.as_bytes(), &[0, 0, 0, last]].concat()).unwrap();
        path.to_str().unwrap().to_owned()
    };
    let first = save("a.safetensors", 0);
    for (last, element) in [(0x01, 6), (0x10, 7)] {
        let outcome = run(&["verify", &first, "--against", &save("b.safetensors", last)]);
        assert!(outcome.stdout.contains(&format!("first in element {element}\n")), "{outcome:?}");
    }
}

#[test]
fn output_closed_by_its_reader_is_no_failure() {
    let folder = tempfile::tempdir().unwrap();
    let file = path(folder.path(), "model.safetensors");
    write_model(Path::new(&file), 20_000, 1);
    let script = r#"set -o pipefail; "$CKPTFS" inspect --tensors "$1" | head -1"#;
    let outcome = run_in_shell(Command::new("bash"), script, &[&file]);
    assert_eq!((outcome.code, outcome.stderr.as_str()), (0, ""));
    // The verdict is the same, whether the output is read or not.
    let other = path(folder.path(), "other.safetensors");
    write_model(Path::new(&other), 20_000, 2);
    let script = r#"set -o pipefail; "$CKPTFS" verify "$1" --against "$2" | head -1"#;
    let outcome = run_in_shell(Command::new("bash"), script, &[&file, &other]);
    assert_eq!((outcome.code, outcome.stderr.as_str()), (1, ""));
}

#[test]
fn entries_left_out_are_reported() {
    let folder = tempfile::tempdir().unwrap();
    let (shard, out) =
        (path(folder.path(), "m-00001-of-00002.safetensors"), path(folder.path(), "out"));
    write_model(Path::new(&shard), 1, 1);
    for outcome in [run(&["export", &shard, &out]), run(&["verify", &shard])] {
        assert_eq!(outcome.code, 0);
        assert!(outcome.stderr.contains("note: this is only shard 1 of 2"), "{}", outcome.stderr);
    }
}

#[test]
fn completions_and_man_pages_know_every_command() {
    for shell in ["bash", "zsh", "fish", "elvish", "powershell"] {
        let outcome = run(&["completions", shell]);
        assert_eq!(outcome.code, 0);
        assert!(outcome.stdout.contains("allow-partial"), "{shell}");
    }
    let folder = tempfile::tempdir().unwrap();
    assert_eq!(run(&["man", "--dir", folder.path().to_str().unwrap()]).code, 0);
    let pages = names_in(folder.path());
    let commands = ["inspect", "export", "verify", "mount", "unmount", "status", "doctor"];
    for command in ["", "-completions", "-man"]
        .into_iter()
        .map(str::to_owned)
        .chain(commands.map(|command| format!("-{command}")))
    {
        assert!(pages.contains(&format!("ckptfs{command}.1")), "{pages:?}");
    }
    assert!(run(&["man"]).stdout.contains("inspect"));
}

/// The examples of the help work as typed, in a home directory that has nothing yet.
#[test]
fn the_examples_of_completions_work_as_typed() {
    let home = tempfile::tempdir().unwrap();
    let help = run(&["completions", "--help"]).stdout;
    let examples = help.split_once("Examples:\n").unwrap().1;
    let script = format!("set -e\nckptfs() {{ \"$CKPTFS\" \"$@\"; }}\n{examples}");
    let mut shell = Command::new("bash");
    shell.env("HOME", home.path());
    let outcome = run_in_shell(shell, &script, &[]);
    assert_eq!((outcome.code, outcome.stderr.as_str()), (0, ""), "{script}");
    for file in [
        ".local/share/bash-completion/completions/ckptfs",
        ".zfunc/_ckptfs",
        ".config/fish/completions/ckptfs.fish",
    ] {
        let text = fs::read_to_string(home.path().join(file)).unwrap();
        assert!(text.contains("allow-partial"), "{file}");
    }
}

#[test]
fn a_progress_bar_is_for_terminals() {
    let folder = tempfile::tempdir().unwrap();
    let (file, out) = (path(folder.path(), "model.safetensors"), path(folder.path(), "out"));
    write_model(Path::new(&file), 4, 1 << 20);
    let outcome = run(&["export", &file, &out]);
    assert_eq!((outcome.code, outcome.stderr.as_str()), (0, ""));
}
