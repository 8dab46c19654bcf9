//! Tests in processes of their own. The environment is read once in a process, and a fault that ends the process must
//! not end other tests.

use std::process::{Command, Output};

const CHILD: &str = "CKPTFS_TEST_IN_CHILD";

/// Runs the body if this is the child; there is no output then. Elsewhere, runs the test of this name in a
/// prepared child.
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

/// Asserts that the child ran its one test, and that it passed.
#[track_caller]
pub fn must_pass(output: &Output) {
    let [messages, errors] =
        [&output.stdout, &output.stderr].map(|text| String::from_utf8_lossy(text));
    let passed = output.status.success() && messages.contains("test result: ok. 1 passed");
    assert!(passed, "{}\n{messages}\n{errors}", output.status);
}
