//! Probes whether a mount answers, within a time limit.
//!
//! A thread that waits for a stuck daemon cannot be killed, and a process with such a thread cannot end. So the command
//! probes by a child process, which can be left behind ([`probe_by_process`]). Other programs that use the library
//! probe by a thread.

use std::io::Read;
use std::path::Path;
use std::process::{Child, Stdio};
use std::sync::OnceLock;
use std::sync::mpsc::{Receiver, RecvTimeoutError, channel};
use std::time::Duration;

use rustix::io::Errno;

use super::respawn;
use crate::mount::stats::{MAX_STATS_BYTES, MountStats, STATS_ATTRIBUTE};
use crate::threads::spawn;

/// The result of a probe.
#[derive(Clone, Debug, PartialEq)]
pub enum Liveness {
    /// The daemon lives. The statistics, if it sent them.
    Alive(Option<Box<MountStats>>),
    /// The daemon is gone.
    Dead,
    /// The mount denies access to this user, so the state of its daemon is unknown.
    NotPermitted,
    /// The mount did not answer in time.
    Silent,
    /// The system call failed.
    Failed(Errno),
}

/// A probe that runs.
#[derive(Debug)]
pub struct LivenessProbe {
    receiver: Receiver<Liveness>,
    child: Option<Child>,
}

/// The first argument of a child process that probes; see [`run_probe_command`].
pub const PROBE_COMMAND: &str = "__ask-a-mount";

static USES_PROCESSES: OnceLock<()> = OnceLock::new();

/// Makes later probes run in child processes.
///
/// A child is this command ([`respawn`]) with the arguments [`PROBE_COMMAND`] and the path. It must then call
/// [`run_probe_command`].
pub fn probe_by_process() {
    // A second call changes nothing.
    let _ = USES_PROCESSES.set(());
}

impl LivenessProbe {
    /// Starts a probe of the mount at a path.
    pub fn start(path: &Path) -> LivenessProbe {
        if USES_PROCESSES.get().is_some()
            && let Some(question) = LivenessProbe::start_process(path)
        {
            return question;
        }
        let (send, answers) = channel();
        let path = path.to_path_buf();
        let ask = move || {
            // This fails if the probe was dropped meanwhile.
            let _ = send.send(interpret(read_stats(&path)));
        };
        // Without a thread the channel closes, and `wait` returns an error.
        let _ = spawn("ask a mount", ask);
        LivenessProbe { receiver: answers, child: None }
    }

    fn start_process(path: &Path) -> Option<LivenessProbe> {
        let mut command = respawn::command("ckptfs".as_ref());
        command.arg(PROBE_COMMAND).arg(path).current_dir("/");
        let child = command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::null());
        let mut child = child.spawn().ok()?;
        let stdout = child.stdout.take()?;
        let (send, answers) = channel();
        let listen = move || {
            let mut output = Vec::new();
            let limit = MAX_STATS_BYTES as u64 + 1;
            let is_read = stdout.take(limit).read_to_end(&mut output).is_ok();
            let _ = send.send(if is_read {
                parse_output(&output)
            } else {
                Liveness::Failed(Errno::IO)
            });
        };
        spawn("ask a mount", listen).ok()?;
        Some(LivenessProbe { receiver: answers, child: Some(child) })
    }

    /// Waits for the result, for at most `limit`. A later call may still return it.
    pub fn wait(&mut self, limit: Duration) -> Option<Liveness> {
        match self.receiver.recv_timeout(limit) {
            Ok(liveness) => {
                if let Some(mut child) = self.child.take() {
                    // It has written its result and is about to end.
                    let _ = child.wait();
                }
                Some(liveness)
            }
            Err(RecvTimeoutError::Timeout) => None,
            Err(RecvTimeoutError::Disconnected) => Some(Liveness::Failed(Errno::AGAIN)),
        }
    }
}

impl Drop for LivenessProbe {
    fn drop(&mut self) {
        if let Some(mut child) = self.child.take() {
            // A stuck child may never end, so a thread waits for it, which does not keep this process from ending.
            // Without that thread, the child would stay a zombie as long as this process runs.
            let _ = child.kill();
            let _ = spawn("reap a child", move || child.wait());
        }
    }
}

/// Probes a mount for at most `limit`.
pub fn probe(path: &Path, limit: Duration) -> Liveness {
    LivenessProbe::start(path).wait(limit).unwrap_or(Liveness::Silent)
}

fn read_stats(path: &Path) -> Result<Vec<u8>, Errno> {
    let mut value = Vec::with_capacity(MAX_STATS_BYTES);
    rustix::fs::lgetxattr(path, STATS_ATTRIBUTE, rustix::buffer::spare_capacity(&mut value))?;
    Ok(value)
}

fn interpret(read: Result<Vec<u8>, Errno>) -> Liveness {
    match read {
        Ok(value) => {
            let stats = serde_json::from_slice::<MountStats>(&value).ok();
            Liveness::Alive(stats.filter(|stats| stats.version > 0).map(Box::new))
        }
        Err(Errno::NOTCONN | Errno::CONNABORTED) => Liveness::Dead,
        Err(Errno::ACCESS | Errno::PERM) => Liveness::NotPermitted,
        // It answers, but has no statistics.
        Err(Errno::NODATA | Errno::NOTSUP | Errno::RANGE | Errno::NOSYS) => Liveness::Alive(None),
        Err(e) => Liveness::Failed(e),
    }
}

/// The work of a child process: probes a mount, and writes the result to `out`.
pub fn run_probe_command(path: &Path, out: &mut dyn std::io::Write) -> std::io::Result<()> {
    match read_stats(path) {
        Ok(value) => {
            out.write_all(b"+")?;
            out.write_all(&value)
        }
        Err(e) => write!(out, "-{}", e.raw_os_error()),
    }
}

fn parse_output(output: &[u8]) -> Liveness {
    match output.split_first() {
        Some((b'+', value)) => interpret(Ok(value.to_vec())),
        Some((b'-', number)) => {
            let number = std::str::from_utf8(number).ok().and_then(|text| text.parse().ok());
            interpret(Err(number.map_or(Errno::IO, Errno::from_raw_os_error)))
        }
        _ => Liveness::Failed(Errno::IO),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_the_child_says_is_what_was_answered() {
        for (read, expected) in [
            (Err(Errno::NOTCONN), Liveness::Dead),
            (Err(Errno::ACCESS), Liveness::NotPermitted),
            (Err(Errno::NODATA), Liveness::Alive(None)),
            (Err(Errno::IO), Liveness::Failed(Errno::IO)),
            (Ok(b"no json".to_vec()), Liveness::Alive(None)),
        ] {
            assert_eq!(interpret(read), expected);
        }
        assert_eq!(parse_output(b"-107"), Liveness::Dead);
        assert_eq!(parse_output(b"+{}"), Liveness::Alive(None));
        for hostile in [&b""[..], b"-", b"-x", b"?"] {
            assert!(matches!(parse_output(hostile), Liveness::Failed(_)), "{hostile:?}");
        }
        let mut out = Vec::new();
        run_probe_command(Path::new("/"), &mut out).unwrap();
        assert_eq!(parse_output(&out), Liveness::Alive(None));
    }
}
