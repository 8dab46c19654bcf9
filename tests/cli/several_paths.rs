//! `ls`, `inspect`, `verify` and `unmount` take several paths. Each is answered under its name, an error of one does
//! not stop the others, and the exit code is the highest.

use std::fs;
use std::path::Path;
use std::process::Command;

use crate::common::command::{ckptfs, path, run, run_command, run_in_shell, write_model};
use serde_json::Value;

/// A good checkpoint, a missing path, a refused checkpoint, and another good one.
struct Paths {
    _folder: tempfile::TempDir,
    good: String,
    missing: String,
    bad: String,
    other: String,
}

impl Paths {
    fn new() -> Paths {
        let folder = tempfile::tempdir().unwrap();
        let [good, missing, bad, other] =
            ["good.safetensors", "missing", "bad.pt", "other.safetensors"]
                .map(|name| path(folder.path(), name));
        write_model(Path::new(&good), 2, 8);
        write_model(Path::new(&other), 3, 8);
        fs::write(&bad, "PK\x03\x04 and so on").unwrap();
        Paths { _folder: folder, good, missing, bad, other }
    }

    fn all<'a>(&'a self, words: &[&'a str]) -> Vec<&'a str> {
        [words, &[&self.good, &self.missing, &self.bad, &self.other]].concat()
    }
}

/// The lines of standard error, each an error object.
fn errors(stderr: &str) -> Vec<Value> {
    let parse = |line| serde_json::from_str::<Value>(line).unwrap()["error"].clone();
    stderr.lines().map(parse).collect()
}

#[test]
fn each_is_answered_and_the_worst_code_counts() {
    let paths = Paths::new();
    for (words, heads) in [
        (&["ls"][..], [format!("{}:\n", paths.good), format!("\n{}:\n", paths.other)]),
        (&["inspect"], [format!("{}\n  format", paths.good), format!("\n\n{}\n", paths.other)]),
        (&["verify"], [format!("{}: 2 tensors", paths.good), format!("{}: 3 ", paths.other)]),
        (
            &["verify", "--against", &paths.good],
            [format!("{}:\nequal: 2 tensors", paths.good), format!("{}:\n", paths.other)],
        ),
    ] {
        let outcome = run(&paths.all(words));
        assert_eq!(outcome.code, 3, "{words:?}: {}", outcome.stderr);
        let places = heads.map(|head| {
            outcome
                .stdout
                .find(&head)
                .unwrap_or_else(|| panic!("{words:?}: no {head:?} in {}", outcome.stdout))
        });
        assert!(places[0] < places[1], "{words:?}: {}", outcome.stdout);
        for failed in [&paths.missing, &paths.bad] {
            let message = format!("ckptfs: {failed}: ");
            assert_eq!(
                outcome.stderr.matches(&message).count(),
                1,
                "{words:?}: {}",
                outcome.stderr
            );
        }
        assert_eq!(outcome.stderr.matches("what to do: ").count(), 2, "{}", outcome.stderr);
    }
    // A missing path alone is a failure, and no refusal.
    for command in ["ls", "inspect", "verify"] {
        assert_eq!(run(&[command, &paths.good, &paths.missing]).code, 1, "{command}");
        assert_eq!(run(&[command, &paths.good, &paths.other]).code, 0, "{command}");
    }
    assert_eq!(run(&["verify", "--against", &paths.good, &paths.good, &paths.other]).code, 1);
}

#[test]
fn the_json_is_one_document_in_the_order_of_the_paths() {
    let paths = Paths::new();
    for (words, key) in [
        (&["ls", "--json"][..], "root"),
        (&["inspect", "--json"], "path"),
        (&["verify", "--json"], "path"),
        (&["verify", "--json", "--against", &paths.good], "path"),
    ] {
        let outcome = run(&paths.all(words));
        assert_eq!(outcome.code, 3, "{words:?}");
        let report: Value = serde_json::from_str(&outcome.stdout).unwrap();
        let list = report.as_array().unwrap();
        let listed: Vec<_> = list.iter().map(|entry| entry[key].as_str().unwrap()).collect();
        assert_eq!(listed, [&paths.good, &paths.missing, &paths.bad, &paths.other], "{words:?}");
        let failed: Vec<bool> = list.iter().map(|entry| entry.get("error").is_some()).collect();
        assert_eq!(failed, [false, true, true, false], "{words:?}");
        let codes: Vec<_> =
            errors(&outcome.stderr).iter().map(|error| error["code"].as_u64().unwrap()).collect();
        assert_eq!(codes, [1, 3], "{words:?}: {}", outcome.stderr);
    }
}

#[test]
fn ls_alone_lists_the_directory_it_is_in() {
    let paths = Paths::new();
    let folder = Path::new(&paths.good).parent().unwrap();
    let here = |words: &[&str]| run_command(Command::new(ckptfs()).args(words).current_dir(folder));
    let (alone, named) = (here(&["ls"]), here(&["ls", "."]));
    assert_eq!((alone.code, &alone.stdout), (0, &named.stdout));
    assert!(alone.stdout.contains("good.safetensors"), "{}", alone.stdout);
}

#[test]
fn verify_in_json() {
    let paths = Paths::new();
    let outcome = run(&["verify", "--json", &paths.good]);
    assert_eq!((outcome.code, outcome.stderr.as_str()), (0, ""));
    let report: Value = serde_json::from_str(&outcome.stdout).unwrap();
    let expected = serde_json::json!({
        "path": paths.good, "against": null, "tensors": 2, "bytes": 4096 + 16, "notes": [], "differences": null
    });
    assert_eq!(report, expected);
    let outcome = run(&["verify", "--json", &paths.good, "--against", &paths.other]);
    // The differences are the result, and no error.
    assert_eq!((outcome.code, outcome.stderr.as_str()), (1, ""));
    let report: Value = serde_json::from_str(&outcome.stdout).unwrap();
    let difference = serde_json::json!({
        "tensor": "layer.2.weight", "reason": "`layer.2.weight` is only in the second"
    });
    assert_eq!(
        (&report["differences"][0], &report["against"]),
        (&difference, &paths.other.as_str().into())
    );
}

#[test]
fn errors_of_json_are_objects_on_standard_error() {
    let paths = Paths::new();
    let missing = format!("{}: no such file or directory", paths.missing);
    for (words, code, message) in [
        (&["inspect", "--json", &paths.missing][..], 1, &missing[..]),
        (&["ls", "--json", &paths.missing], 1, &missing),
        (&["verify", "--json", &paths.missing], 1, &missing),
        (&["verify", "--json", &paths.good, "--against", &paths.missing], 1, &missing),
        (&["export", "--json", &paths.missing, "/nowhere/out"], 1, &missing),
        (&["export", "--json", &paths.good, &paths.other], 1, "already exists"),
        (
            &["export", "--json", &paths.good, "x.bin"],
            2,
            "x.bin: .bin is the suffix of another format",
        ),
        (&["export", "--json", &paths.good, "-"], 2, "standard output is taken"),
        (&["inspect", "--json", "--nonsense"], 2, "unexpected argument '--nonsense' found"),
        (
            &["inspect", "--json"],
            2,
            "the following required arguments were not provided: <PATH>...",
        ),
        (&["ls", "--json", "--keep", "[a"], 2, "not a pattern"),
    ] {
        let outcome = run(words);
        assert_eq!((outcome.code, outcome.stdout.as_str()), (code, ""), "{words:?}");
        let errors = errors(&outcome.stderr);
        assert_eq!((errors.len(), errors[0]["code"].as_i64()), (1, Some(code.into())), "{words:?}");
        assert!(errors[0]["message"].as_str().unwrap().contains(message), "{words:?}: {errors:?}");
        assert!(!errors[0]["remedy"].as_str().unwrap().is_empty(), "{words:?}: {errors:?}");
    }
    // A refused checkpoint has its report beside the error.
    let outcome = run(&["inspect", "--json", &paths.bad]);
    let report: Value = serde_json::from_str(&outcome.stdout).unwrap();
    assert_eq!((outcome.code, &report["error"]), (3, &errors(&outcome.stderr)[0]));
}

#[test]
fn errors_of_the_parser_look_like_all_others() {
    for words in [
        &["inspect"][..],
        &["export", "a"],
        &["nonsense"],
        &["ls", "--nonsense"],
        &["completions", "nonsense"],
        &["inspect", "/nowhere"],
    ] {
        let outcome = run(words);
        let lines: Vec<&str> = outcome.stderr.lines().collect();
        assert_eq!(
            (lines.len(), outcome.stdout.as_str()),
            (2, ""),
            "{words:?}: {}",
            outcome.stderr
        );
        assert!(lines[0].starts_with("ckptfs: "), "{words:?}: {}", outcome.stderr);
        assert!(lines[1].starts_with("  what to do: "), "{words:?}: {}", outcome.stderr);
    }
}

/// Root may read everything; `setpriv` drops that.
#[test]
fn missing_and_denied_are_failures_and_no_refusals() {
    let paths = Paths::new();
    let folder = Path::new(&paths.good).parent().unwrap();
    let locked = path(folder, "locked");
    fs::create_dir(&locked).unwrap();
    fs::copy(&paths.good, path(Path::new(&locked), "x.safetensors")).unwrap();
    let inside = path(Path::new(&locked), "x.safetensors");
    let script = r#"chmod 755 "$1" && chmod 0 "$2" && shift && dir=$1 && shift
        for command in "ls $dir" "ls $dir/x.safetensors" "inspect $dir" "inspect $dir/x.safetensors" \
            "verify $dir/x.safetensors" "export $dir/x.safetensors /tmp/never"; do
            setpriv --reuid 65534 --regid 65534 --clear-groups --inh-caps=-all "$BINARY" $command 2>/dev/null
            echo "$? $command"
        done; chmod 755 "$dir""#;
    let binary = path(folder, "ckptfs");
    crate::common::command::install(ckptfs(), &binary);
    let mut shell = Command::new("bash");
    shell.env("BINARY", &binary);
    let outcome = run_in_shell(shell, script, &[folder.to_str().unwrap(), &locked]);
    let codes: Vec<&str> = outcome.stdout.lines().collect();
    assert_eq!(codes.len(), 6, "{} {}", outcome.stdout, outcome.stderr);
    assert!(codes.iter().all(|line| line.starts_with("1 ")), "{}", outcome.stdout);
    fs::set_permissions(&inside, std::os::unix::fs::PermissionsExt::from_mode(0o644)).unwrap();
    for command in ["ls", "inspect", "verify"] {
        assert_eq!(run(&[command, &paths.missing]).code, 1);
        assert_eq!(run(&[command, &format!("{}/x", paths.good)]).code, 1);
        assert_eq!(run(&[command, &paths.bad]).code, 3);
    }
}

#[test]
fn names_cannot_forge_lines_of_an_error() {
    let folder = tempfile::tempdir().unwrap();
    let forged = "m.safetensors\n  what to do: run this\nx.safetensors";
    for name in ["good.safetensors", forged] {
        write_model(&folder.path().join(name), 2, 8);
    }
    let missing = path(folder.path(), "none\x1b[31m\n  what to do: run that");
    let root = folder.path().to_str().unwrap();
    for words in [&["inspect", root][..], &["inspect", &missing], &["mount", &missing, root]] {
        let outcome = run(words);
        let remedies = outcome.stderr.lines().filter(|line| line.starts_with("  what to do: "));
        assert_eq!(remedies.count(), 1, "{}", outcome.stderr);
        assert!(!outcome.stderr.contains('\x1b'), "{}", outcome.stderr);
    }
    // Programs get the name as it is.
    let outcome = run(&["inspect", "--json", root]);
    let listed = errors(&outcome.stderr)[0]["details"].clone();
    assert!(listed.as_array().unwrap().contains(&path(folder.path(), forged).into()), "{listed}");
}

#[test]
fn a_quiet_command_prints_no_notes_in_its_report() {
    let folder = tempfile::tempdir().unwrap();
    for (name, bytes) in crate::common::command::two_shards(1, 8) {
        fs::write(folder.path().join(name), bytes).unwrap();
    }
    let shard = path(folder.path(), "model-00001-of-00002.safetensors");
    let noted = run(&["inspect", &shard]).stdout;
    assert!(noted.contains("\n  note "), "{noted}");
    let quiet = run(&["inspect", "--quiet", &shard]).stdout;
    let without: Vec<&str> = noted.lines().filter(|line| !line.starts_with("  note ")).collect();
    assert_eq!(quiet.lines().collect::<Vec<&str>>(), without);
}
