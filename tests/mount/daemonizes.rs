//! The command returns when the mount answers, and leaves nothing of its caller in the daemon.

use std::fs::{self, File};
use std::io::{Read, Write};
use std::net::TcpStream;
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::time::Duration;

use crate::common::command;
use crate::common::command::{ckptfs, names_in, run, run_command, run_in_shell, two_shards};
use crate::common::failing_source::{Behavior, FailingSource};
use crate::common::mounting::{
    Daemon, MountFixture, arguments, daemons_of, run_program, wait_until,
};

#[test]
fn the_command_returns_when_the_mount_answers() {
    let fixture = MountFixture::new();
    let outcome = fixture.try_mount(&["--quiet"]);
    assert_eq!((outcome.code, outcome.stdout.as_str(), outcome.stderr.as_str()), (0, "", ""));
    fixture.wait_until_alive();
    let daemon = fixture.daemon().unwrap();
    assert_eq!(
        arguments(daemon.0)[1..],
        ["mount", &fixture.source, &fixture.mountpoint, "--quiet"]
    );
    let name = fs::read_to_string(format!("/proc/{}/comm", daemon.0)).unwrap();
    assert_eq!(name, "ckptfs\n");
}

#[test]
fn the_daemon_inherits_nothing_of_its_caller() {
    let fixture = MountFixture::new();
    let held = fixture.path("held by the caller");
    // `run` reads to the end of every pipe that the daemon might still hold open, this one included.
    let script = r#"exec 7>"$3" 5>&1; cd "$4"; "$CKPTFS" mount -q source mnt; ps -o sid= -p $$"#;
    let folder = Path::new(&fixture.source).parent().unwrap().to_str().unwrap();
    let arguments = [&fixture.source, &fixture.mountpoint, &held, folder];
    let outcome = run_in_shell(Command::new("bash"), script, &arguments);
    assert_eq!((outcome.code, outcome.stderr.as_str()), (0, ""));
    let daemon = daemons_of("mnt").into_iter().find(|daemon| is_at(&fixture, daemon.0)).unwrap();

    let process = |name: &str| format!("/proc/{}/{name}", daemon.0);
    for entry in fs::read_dir(process("fd")).unwrap() {
        let target = fs::read_link(entry.unwrap().path()).unwrap();
        let target = target.to_str().unwrap();
        let logs = format!("{}/ckptfs", command::state_folder());
        let is_its_own =
            ["/dev/null", "/dev/fuse", "socket:", "anon_inode:", &fixture.source, &logs]
                .iter()
                .any(|own| target.starts_with(own));
        assert!(is_its_own, "{target}");
    }
    assert_eq!(fs::read_link(process("cwd")).unwrap(), Path::new("/"));
    let about = fs::read_to_string(process("stat")).unwrap();
    let fields: Vec<&str> = about.rsplit(") ").next().unwrap().split(' ').collect();
    // The fields are state, parent, group, session and terminal.
    assert_ne!(fields[3], outcome.stdout.trim());
    assert_eq!(fields[4], "0");
    assert_eq!(fixture.unmount(&[]).code, 0);
}

/// Tells whether the daemon serves the fixture, where it was given a relative path.
fn is_at(fixture: &MountFixture, pid: u32) -> bool {
    let outcome = run(&["status", "--json"]).stdout;
    let all: serde_json::Value = serde_json::from_str(&outcome).unwrap();
    let is = |mount: &serde_json::Value| {
        mount["mountpoint"] == fixture.mountpoint.as_str() && mount["stats"]["pid"] == pid
    };
    all.as_array().unwrap().iter().any(is)
}

/// Starts a mount whose daemon waits for its source. Returns the source, the caller and the daemon.
fn start_waiting_mount(fixture: &MountFixture) -> (FailingSource, Child, Daemon) {
    let far = FailingSource::new(&fixture.path("far"), two_shards(1, 8));
    far.set(Behavior::HangsOnReads);
    let source = fixture.path("far/model-00001-of-00002.safetensors");
    let mut command = Command::new(ckptfs());
    command.args(["mount", &source, &fixture.mountpoint]);
    let caller = command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
    wait_until("the daemon reads", || far.pending() > 0);
    let daemons = daemons_of(&source);
    let daemon = daemons.into_iter().find(|found| found.0 != caller.id()).unwrap();
    (far, caller, daemon)
}

#[test]
fn a_daemon_that_dies_silently_is_reported() {
    let fixture = MountFixture::new();
    let (far, caller, daemon) = start_waiting_mount(&fixture);
    daemon.kill("KILL");
    far.set(Behavior::Works);
    let output = caller.wait_with_output().unwrap();
    let messages = String::from_utf8(output.stderr).unwrap();
    assert_eq!(output.status.code(), Some(1));
    assert!(
        messages.contains("ended before its mount answered") && messages.contains("SIGKILL"),
        "{messages}"
    );
}

#[test]
fn a_caller_that_goes_away_leaves_no_mount() {
    let fixture = MountFixture::new();
    let (far, mut caller, daemon) = start_waiting_mount(&fixture);
    caller.kill().unwrap();
    caller.wait().unwrap();
    // Now the daemon goes on, and its caller is gone.
    far.set(Behavior::Works);
    wait_until("the daemon ends", || !daemon.runs());
    assert_eq!(fixture.mounts(), 0);
}

#[test]
fn the_daemon_variable_alone_makes_no_daemon() {
    let fixture = MountFixture::new();
    let mut command = Command::new(ckptfs());
    command.args(["mount", "-q", &fixture.source, &fixture.mountpoint]);
    command.env("CKPTFS_DAEMON", "pipe:[1]");
    let outcome = run_command(&mut command);
    assert_eq!((outcome.code, outcome.stdout.as_str(), outcome.stderr.as_str()), (0, "", ""));
    fixture.wait_until_alive();
}

#[test]
fn the_kernels_readahead_is_raised() {
    let fixture = MountFixture::new();
    fixture.mount(&[]);
    let table = fs::read_to_string("/proc/self/mountinfo").unwrap();
    let mut lines = table.lines().map(|line| line.split(' ').collect::<Vec<_>>());
    let line = lines.find(|fields| fields[4] == fixture.mountpoint).unwrap();
    let set = fs::read_to_string(format!("/sys/class/bdi/{}/read_ahead_kb", line[2])).unwrap();
    assert_eq!(set, "4096\n");
}

#[test]
fn the_log_goes_to_its_file() {
    let fixture = MountFixture::new();
    let log = fixture.path("log");
    fixture.mount(&["-v", "--log-file", &log]);
    assert_eq!(fixture.unmount(&[]).code, 0);
    let text = fs::read_to_string(&log).unwrap();
    assert!(text.contains("mounted at") && text.contains("unmounted"), "{text}");
    assert!(!text.contains('\x1b'), "{text}");
    let foreground = fixture.mount_in_foreground(&["-v"]);
    foreground.kill("TERM");
    let (_, messages) = foreground.ends();
    assert!(messages.contains("SIGTERM"), "{messages}");
}

/// This machine has neither a journal nor a syslog; where there are, see tests/namespaces.
#[test]
fn a_daemon_without_a_log_file_logs_in_the_state_folder() {
    let fixture = MountFixture::new();
    let state = fixture.path("state");
    fs::create_dir(fixture.path("source/sub")).unwrap();
    fs::write(fixture.path("source/sub/broken.ckpt"), b"PK\x03\x04 and no archive").unwrap();
    let mut command = Command::new(ckptfs());
    command.args(["mount", &fixture.source, &fixture.mountpoint]).env("XDG_STATE_HOME", &state);
    assert_eq!(run_command(&mut command).code, 0);
    assert_eq!(names_in(&Path::new(&fixture.mountpoint).join("sub")), ["broken.ckpt"]);
    let log = fixture.status().unwrap()["stats"]["log"].clone();
    if log["target"] != "file" {
        let has_system_log =
            Path::new("/run/systemd/journal/socket").exists() || Path::new("/dev/log").exists();
        return assert!(has_system_log, "{log}");
    }
    let path = log["path"].as_str().unwrap().to_owned();
    let name = fixture.mountpoint.trim_start_matches('/').replace('/', "-");
    assert_eq!(path, format!("{state}/ckptfs/{name}.log"));
    let text = fs::read_to_string(&path).unwrap();
    assert!(text.contains("WARN") && text.contains("broken.ckpt"), "{text}");
    let shown: String = run(&["status"]).stdout.split_whitespace().collect();
    assert!(shown.contains(&format!("log{path}")), "{shown}");
    assert_eq!(fixture.unmount(&[]).code, 0);
    // Without a home directory there is no such file, and the mount works.
    let mut command = Command::new(ckptfs());
    command.args(["mount", "-q", &fixture.source, &fixture.mountpoint]);
    command.env_remove("HOME").env_remove("XDG_STATE_HOME");
    assert_eq!(run_command(&mut command).stderr, "");
    let log = &fixture.status().unwrap()["stats"]["log"];
    assert_eq!((&log["target"], &log["path"]), (&"none".into(), &serde_json::Value::Null));
    assert_eq!(fixture.unmount(&[]).code, 0);
}

/// Its folder would be hidden, and the mountpoint no longer empty.
#[test]
fn no_log_is_made_inside_the_mountpoint() {
    let fixture = MountFixture::new();
    let mut command = Command::new(ckptfs());
    command.args(["mount", "-q", &fixture.source, &fixture.mountpoint]);
    command.env("XDG_STATE_HOME", format!("{}/state", fixture.mountpoint));
    let outcome = run_command(&mut command);
    assert_eq!((outcome.code, outcome.stderr.as_str()), (0, ""));
    let log = fixture.status().unwrap()["stats"]["log"].clone();
    assert_ne!(log["target"], "file", "{log}");
    assert_eq!(fixture.unmount(&[]).code, 0);
    assert_eq!(fs::read_dir(&fixture.mountpoint).unwrap().count(), 0);
}

#[test]
fn a_bad_log_filter_is_reported() {
    let fixture = MountFixture::new();
    let log = fixture.path("log");
    let mount = |messages: &str| {
        let mut command = Command::new(ckptfs());
        command.args(["mount", &fixture.source, &fixture.mountpoint, "-v", "--log-file", &log]);
        let outcome = run_command(command.env("RUST_LOG", messages));
        assert_eq!(outcome.code, 0, "{}", outcome.stderr);
        assert_eq!(fixture.unmount(&[]).code, 0);
        outcome.stderr
    };
    let note = mount("ckptfs=louder");
    assert!(note.contains("note: RUST_LOG=ckptfs=louder is ignored"), "{note}");
    // As the options say instead.
    assert!(fs::read_to_string(&log).unwrap().contains("mounted at"));
    assert!(!mount("ckptfs=debug").contains("RUST_LOG"));
}

#[test]
fn the_help_says_where_the_log_goes_and_where_the_bytes_lie() {
    let help = run(&["mount", "--help"]).stdout;
    let help = help.split_whitespace().collect::<Vec<_>>().join(" ");
    for words in
        ["without it to the journal or the syslog", "user.ckptfs.source", "always read-only"]
    {
        assert!(help.contains(words), "{help}");
    }
}

#[test]
fn an_unwritable_log_loses_nothing_else() {
    let fixture = MountFixture::new();
    let refused = std::path::Path::new(&fixture.source).join("sub");
    fs::create_dir(&refused).unwrap();
    fs::write(refused.join("broken.ckpt"), b"PK\x03\x04 and no archive").unwrap();
    fixture.mount(&["-vv", "--log-file", "/dev/full"]);
    let shown = std::path::Path::new(&fixture.mountpoint).join("sub");
    assert_eq!(names_in(&shown), ["broken.ckpt"]);
    fixture.wait_until_alive();
    assert_eq!(fixture.unmount(&[]).code, 0);
}

#[test]
fn a_log_pipe_that_is_not_read_blocks_nothing() {
    let fixture = MountFixture::new();
    let pipe = fixture.path("pipe");
    assert_eq!(run_program(&["mkfifo", &pipe]).code, 0);
    let mut read = File::options().read(true).write(true).open(&pipe).unwrap();
    fixture.mount(&["-vvv", "--log-file", &pipe]);
    // Logs more than the pipe has room for, while nothing reads it.
    let missing = (0..2000).map(|n| format!("{}/{n}", fixture.mountpoint));
    let mut asking = Command::new("ls").args(missing).stderr(Stdio::null()).spawn().unwrap();
    wait_until("ls is answered", || asking.try_wait().unwrap().is_some());
    assert_eq!(fixture.unmount(&[]).code, 0);
    let mut text = vec![0; 1 << 20];
    let length = read.read(&mut text).unwrap();
    let text = String::from_utf8_lossy(&text[..length]);
    assert!(text.contains("mounted at"), "{text}");
}

#[test]
fn the_standard_error_may_be_the_log_file() {
    let fixture = MountFixture::new();
    let foreground = fixture.mount_in_foreground(&["-v", "--log-file", "/dev/stderr"]);
    foreground.kill("TERM");
    let (_, messages) = foreground.ends();
    assert!(messages.contains("SIGTERM"), "{messages}");
}

#[test]
fn metrics_are_served() {
    let fixture = MountFixture::new();
    let outcome = fixture.try_mount(&["--metrics", "127.0.0.1:0"]);
    assert_eq!(outcome.code, 0, "{}", outcome.stderr);
    let address = outcome.stderr.split("http://").nth(1).unwrap().split('/').next().unwrap();
    let ask = |request: &str| {
        let mut stream = TcpStream::connect(address).unwrap();
        // A refused connection may be cut off while it still sends.
        let _ = stream.write_all(request.as_bytes());
        let mut answer = String::new();
        let _ = stream.read_to_string(&mut answer);
        answer
    };
    let page = ask("GET /metrics HTTP/1.1\r\nHost: here\r\n\r\n");
    assert!(page.starts_with("HTTP/1.1 200 OK\r\nContent-Type: application/openmetrics-text"));
    let line = format!(
        "ckptfs_reads_total{{mountpoint=\"{}\",source=\"{}\"}} ",
        fixture.mountpoint, fixture.source
    );
    assert!(page.contains(&line) && page.ends_with("# EOF\n"), "{page}");
    assert!(ask("GET / HTTP/1.1\r\n\r\n").starts_with("HTTP/1.1 404"));
    assert!(ask("POST /metrics HTTP/1.1\r\n\r\n").starts_with("HTTP/1.1 405"));
    assert!(ask("\0\r\n\r\n").starts_with("HTTP/1.1 405"));
    let long = ask(&format!("GET /{} HTTP/1.1\r\n\r\n", "x".repeat(100_000)));
    assert!(long.is_empty() || long.starts_with("HTTP/1.1 431"), "{long}");
    // Silent clients must not delay the end of the mount.
    let silent: Vec<_> = (0..8).map(|_| TcpStream::connect(address).unwrap()).collect();
    assert_eq!(fixture.unmount(&[]).code, 0);
    drop(silent);
}

/// Opens as many connections as the kernel queues besides those that are accepted.
#[test]
fn half_sent_requests_do_not_block_the_metrics() {
    /// Much longer than an answer takes, and much shorter than the timeouts of all half-sent requests in
    /// turn.
    const ANSWER_TIMEOUT: Duration = Duration::from_secs(20);
    let fixture = MountFixture::new();
    let outcome = fixture.try_mount(&["--metrics", "127.0.0.1:0"]);
    let address = outcome.stderr.split("http://").nth(1).unwrap().split('/').next().unwrap();
    let address = address.parse().unwrap();
    let half_sent = || {
        let mut stream = TcpStream::connect(address).unwrap();
        stream.write_all(b"GET /metrics HT").unwrap();
        stream
    };
    let half_sent: Vec<_> = (0..137).map(|_| half_sent()).collect();
    let mut stream = TcpStream::connect_timeout(&address, ANSWER_TIMEOUT).unwrap();
    stream.set_read_timeout(Some(ANSWER_TIMEOUT)).unwrap();
    stream.write_all(b"GET /metrics HTTP/1.1\r\n\r\n").unwrap();
    let mut answer = String::new();
    stream.read_to_string(&mut answer).unwrap();
    assert!(answer.starts_with("HTTP/1.1 200") && answer.ends_with("# EOF\n"), "{answer}");
    assert_eq!(fixture.unmount(&[]).code, 0);
    drop(half_sent);
}

#[test]
fn the_doctor_finds_this_machine_fit() {
    let fixture = MountFixture::new();
    let outcome = run(&["doctor", &fixture.source]);
    assert_eq!(outcome.code, 0, "{}", outcome.stdout);
    assert!(outcome.stdout.contains("/dev/fuse") && outcome.stdout.contains("O_DIRECT"));
    let outcome = run(&["doctor", "--json", &fixture.path("missing")]);
    assert_eq!(outcome.code, 1);
    let checks: serde_json::Value = serde_json::from_str(&outcome.stdout).unwrap();
    let is_problem = |check: &&serde_json::Value| check["verdict"] == "problem";
    let problems: Vec<_> = checks.as_array().unwrap().iter().filter(is_problem).collect();
    assert!(matches!(problems[..], [problem] if problem["what"] == "source"), "{problems:?}");
}
