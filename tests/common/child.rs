//! A test that has a process of its own: what the environment says is read once in a process, and what
//! ends the process must not end other tests.

use std::process::{Command, Output};

const CHILD: &str = "CKPTFS_TEST_IN_CHILD";

/// In the child, does the body, and there is no output. Elsewhere, runs the test of this name in a child that
/// is prepared first.
pub fn in_child(
    test: &str,
    prepare: impl FnOnce(&mut Command),
    body: impl FnOnce(),
) -> Option<Output> {
    if std::env::var_os(CHILD).is_some_and(|name| name == test) {
        body();
        return None;
    }
    let mut command = Command::new(std::env::current_exe().expect("a test is a program"));
    command.args(["--exact", test, "--nocapture", "--include-ignored"]).env(CHILD, test);
    prepare(&mut command);
    Some(command.output().expect("the test runs again"))
}

/// The child did its one test, and that passed.
#[track_caller]
pub fn must_pass(output: &Output) {
    let [said, told] = [&output.stdout, &output.stderr].map(|text| String::from_utf8_lossy(text));
    let passed = output.status.success() && said.contains("test result: ok. 1 passed");
    assert!(passed, "{}\n{said}\n{told}", output.status);
}
