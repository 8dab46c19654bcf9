//! Notes on standard error may be lost: a closed or full one changes no verdict. The output may not: a
//! command fails where it cannot write it, unless the reader closed the pipe.

use std::fs;
use std::process::Command;

use crate::common::command::{Outcome, path, run_in_shell, two_shards};

/// A checkpoint with a note: a shard that is named by itself.
struct Noted {
    folder: tempfile::TempDir,
}

impl Noted {
    fn new() -> Noted {
        let folder = tempfile::tempdir().unwrap();
        for (name, bytes) in two_shards(1, 8) {
            fs::write(folder.path().join(name), bytes).unwrap();
        }
        Noted { folder }
    }

    /// Runs a script with the shard as `$1`, and a free name for output as `$2`.
    fn run(&self, script: &str) -> Outcome {
        let out = path(self.folder.path(), "out.safetensors");
        let shard = path(self.folder.path(), "model-00001-of-00002.safetensors");
        let outcome = run_in_shell(Command::new("bash"), script, &[&shard, &out]);
        // The script wrote a whole file, or none.
        if let Ok(written) = fs::metadata(&out) {
            assert!(written.len() > 8, "{script}");
            fs::remove_file(&out).unwrap();
        }
        outcome
    }
}

const COMMANDS: [&str; 3] = [
    r#""$CKPTFS" verify "$1""#,
    r#""$CKPTFS" verify "$1" --against "$1""#,
    r#""$CKPTFS" export "$1" "$2""#,
];

#[test]
fn notes_that_cannot_be_said_change_no_verdict() {
    let noted = Noted::new();
    for command in COMMANDS {
        let whole = noted.run(command);
        assert_eq!(whole.code, 0);
        assert!(whole.stderr.contains("note: ") && !whole.stdout.is_empty(), "{whole:?}");
        for lost in ["2>/dev/full", "2>&-", "2> >(exec 0<&-)"] {
            let outcome = noted.run(&format!("{command} {lost}"));
            assert_eq!(
                (outcome.code, outcome.stdout),
                (0, whole.stdout.clone()),
                "{command} {lost}"
            );
        }
    }
    // A bad verdict stays what it is as well.
    for lost in ["2>/dev/full", "2>&-"] {
        assert_eq!(noted.run(&format!(r#""$CKPTFS" verify "$2" {lost}"#)).code, 1);
        assert_eq!(noted.run(&format!(r#""$CKPTFS" verify "$CKPTFS" {lost}"#)).code, 3);
        assert_eq!(noted.run(&format!(r#""$CKPTFS" verify --what {lost}"#)).code, 2);
    }
}

#[test]
fn output_that_cannot_be_written_is_a_failure() {
    let noted = Noted::new();
    for command in COMMANDS {
        let outcome = noted.run(&format!("{command} >/dev/full"));
        assert_eq!(outcome.code, 1, "{command}");
        assert!(outcome.stderr.contains("cannot write the output"), "{}", outcome.stderr);
        assert!(outcome.stderr.contains("free space on the device"), "{}", outcome.stderr);
        let quiet =
            noted.run(&format!("{command} 2>/dev/null | exec 0<&-; exit ${{PIPESTATUS[0]}}"));
        assert_eq!((quiet.code, quiet.stdout.as_str(), quiet.stderr.as_str()), (0, "", ""));
    }
}
