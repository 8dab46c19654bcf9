//! Mounts as a user does, and leaves nothing behind, however the test ends.

use std::fs;
use std::io::Read;
use std::os::unix::fs::PermissionsExt;
use std::path::Path;
use std::process::{Child, Command, ExitStatus, Stdio};
use std::time::{Duration, Instant};

use serde_json::Value;

use super::command::{Outcome, ckptfs, run, run_command, write_model};

/// Longer than anything here takes on the slowest machine. Only a failing test waits for it.
pub const WAIT_TIMEOUT: Duration = Duration::from_secs(40);

/// A source with a model, and an empty directory to mount it at. Dropping it kills the daemon and unmounts.
pub struct MountFixture {
    folder: tempfile::TempDir,
    pub source: String,
    pub mountpoint: String,
}

impl MountFixture {
    pub fn new() -> MountFixture {
        assert!(Path::new("/dev/fuse").exists(), "these tests need /dev/fuse");
        let uid = Command::new("id").arg("-u").output().unwrap();
        assert_eq!(uid.stdout, b"0\n", "these tests need root");
        let folder = tempfile::tempdir().unwrap();
        // Other users must be able to pass through the directory.
        fs::set_permissions(folder.path(), fs::Permissions::from_mode(0o755)).unwrap();
        let path = |name: &str| folder.path().join(name).to_str().unwrap().to_owned();
        let (source, mountpoint) = (path("source"), path("mnt"));
        fs::create_dir(&source).unwrap();
        fs::create_dir(&mountpoint).unwrap();
        write_model(&Path::new(&source).join("model.safetensors"), 2, 8);
        MountFixture { folder, source, mountpoint }
    }

    /// A mount whose daemon was killed.
    pub fn dead() -> MountFixture {
        let fixture = MountFixture::new();
        fixture.mount(&[]).kill_and_wait();
        fixture
    }

    /// The directory that has the source and the mountpoint.
    pub fn parent(&self) -> &str {
        self.folder.path().to_str().unwrap()
    }

    /// A path beside the source and the mountpoint.
    pub fn path(&self, name: &str) -> String {
        self.folder.path().join(name).to_str().unwrap().to_owned()
    }

    /// Mounts as a daemon, which must work.
    pub fn mount(&self, options: &[&str]) -> Daemon {
        let outcome = self.try_mount(options);
        assert_eq!((outcome.code, outcome.stdout.as_str()), (0, ""), "{}", outcome.stderr);
        self.daemon().unwrap()
    }

    pub fn try_mount(&self, options: &[&str]) -> Outcome {
        run(&[&["mount", &self.source, &self.mountpoint], options].concat())
    }

    /// Mounts in the foreground without notes, and returns when the mount answers.
    pub fn mount_in_foreground(&self, options: &[&str]) -> ForegroundMount {
        let mut command = Command::new(ckptfs());
        command.args(["mount", "-fq", &self.source, &self.mountpoint]).args(options);
        let child = command.stderr(Stdio::piped()).spawn().unwrap();
        let foreground = ForegroundMount { child };
        self.wait_until_alive();
        foreground
    }

    pub fn unmount(&self, options: &[&str]) -> Outcome {
        run(&[&["unmount", &self.mountpoint], options].concat())
    }

    /// How many mounts there are at the mountpoint.
    pub fn mounts(&self) -> usize {
        mounts_at(&self.mountpoint)
    }

    /// The state that `status` reports for this mount.
    pub fn state(&self) -> String {
        self.status().map_or("none".to_owned(), |mount| mount["state"].as_str().unwrap().to_owned())
    }

    /// Waits until the daemon answers: on a busy machine it may take longer than `status` waits.
    pub fn wait_until_alive(&self) {
        wait_until("the daemon answers", || self.state() == "alive");
    }

    /// This mount's entry of `status --json`.
    pub fn status(&self) -> Option<Value> {
        let outcome = run(&["status", "--json"]);
        assert_eq!(outcome.code, 0, "{}", outcome.stderr);
        let Ok(Value::Array(mut mounts)) = serde_json::from_str(&outcome.stdout) else {
            panic!("no list of mounts: {}", outcome.stdout);
        };
        mounts.retain(|mount| mount["mountpoint"] == self.mountpoint.as_str());
        assert!(mounts.len() <= 1, "{mounts:?}");
        mounts.pop()
    }

    /// The process that serves the mountpoint.
    pub fn daemon(&self) -> Option<Daemon> {
        let mut found = daemons_of(&self.mountpoint);
        assert!(found.len() <= 1, "{found:?}");
        found.pop()
    }
}

impl Drop for MountFixture {
    fn drop(&mut self) {
        for daemon in daemons_of(self.folder.path().to_str().unwrap()) {
            signal("KILL", daemon.0);
        }
        // One unmount for each mount in the table, the topmost first.
        for _ in 0..16 {
            let table = fs::read_to_string("/proc/self/mountinfo").unwrap_or_default();
            let inside = self.folder.path().to_str().unwrap();
            let mut points = table.lines().rev().filter_map(|line| line.split(' ').nth(4));
            let Some(point) = points.find(|point| point.starts_with(inside)) else {
                break;
            };
            let _ = Command::new("umount").args(["-l", point]).stderr(Stdio::null()).status();
        }
    }
}

/// The number of mounts at a path.
pub fn mounts_at(path: &str) -> usize {
    let table = fs::read_to_string("/proc/self/mountinfo").unwrap();
    table.lines().filter(|line| line.split(' ').nth(4) == Some(path)).count()
}

/// Running processes of ours that have an argument that begins so.
pub fn daemons_of(argument: &str) -> Vec<Daemon> {
    let mut found = Vec::new();
    for entry in fs::read_dir("/proc").unwrap() {
        let Ok(pid) = entry.unwrap().file_name().to_str().unwrap_or_default().parse() else {
            continue;
        };
        let arguments = arguments(pid);
        // A `status` anywhere on the machine asks every mount, by a process of its own.
        let asks = arguments
            .get(1)
            .is_some_and(|argument| argument == ckptfs::mount::lifecycle::liveness::PROBE_COMMAND);
        let is_ours = arguments.first().is_some_and(|name| name.ends_with("ckptfs")) && !asks;
        if is_ours
            && arguments.iter().any(|found| found.starts_with(argument))
            && Daemon(pid).runs()
        {
            found.push(Daemon(pid));
        }
    }
    found
}

/// The command line of a process.
pub fn arguments(pid: u32) -> Vec<String> {
    let line = fs::read(format!("/proc/{pid}/cmdline")).unwrap_or_default();
    let words =
        line.split(|&byte| byte == 0).map(|word| String::from_utf8_lossy(word).into_owned());
    let mut words: Vec<String> = words.collect();
    words.pop();
    words
}

/// A process that serves a mount, and is no child of the test.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Daemon(pub u32);

impl Daemon {
    /// A zombie has ended, too.
    pub fn runs(self) -> bool {
        let about = fs::read_to_string(format!("/proc/{}/stat", self.0)).unwrap_or_default();
        let state = about.rsplit(") ").next().unwrap_or_default().chars().next();
        state.is_some_and(|state| !"ZX".contains(state))
    }

    pub fn kill(self, name: &str) {
        signal(name, self.0);
    }

    pub fn kill_and_wait(self) {
        self.kill("KILL");
        wait_until("the daemon is gone", || !self.runs());
    }

    /// Stops the daemon. After the signal alone its threads still answer for a moment.
    pub fn stop(self) {
        self.kill("STOP");
        let is_stopped = |thread: fs::DirEntry| {
            let about = fs::read_to_string(thread.path().join("stat")).unwrap_or_default();
            about.rsplit(") ").next().unwrap_or_default().starts_with('T')
        };
        wait_until("every thread of it is stopped", || {
            let mut threads = fs::read_dir(format!("/proc/{}/task", self.0)).unwrap();
            threads.all(|thread| is_stopped(thread.unwrap()))
        });
    }
}

/// A mount that is a child of the test.
pub struct ForegroundMount {
    child: Child,
}

impl ForegroundMount {
    pub fn kill(&self, name: &str) {
        signal(name, self.child.id());
    }

    pub fn runs(&mut self) -> bool {
        self.child.try_wait().unwrap().is_none()
    }

    /// Waits for its end: exit status and standard error.
    pub fn ends(mut self) -> (ExitStatus, String) {
        wait_until("the mount ends", || !self.runs());
        let mut messages = String::new();
        self.child.stderr.take().unwrap().read_to_string(&mut messages).unwrap();
        (self.child.wait().unwrap(), messages)
    }
}

impl Drop for ForegroundMount {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

pub fn signal(name: &str, pid: u32) {
    let _ =
        Command::new("kill").args(["-s", name, &pid.to_string()]).stderr(Stdio::null()).status();
}

/// Waits until something holds; fails if it never does.
#[track_caller]
pub fn wait_until(what: &str, mut holds: impl FnMut() -> bool) {
    let began = Instant::now();
    while !holds() {
        assert!(began.elapsed() < WAIT_TIMEOUT, "still not so: {what}");
        std::thread::sleep(Duration::from_millis(20));
    }
}

/// Runs another program.
pub fn run_program(words: &[&str]) -> Outcome {
    run_command(Command::new(words[0]).args(&words[1..]))
}
