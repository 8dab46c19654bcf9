//! Asking a mount whether it answers, without ever waiting for it longer than we want.
//!
//! In: the path of a mount of ours. Out: an [`Liveness`], within the time that was given.
//!
//! A thread whose question a stuck daemon has taken up cannot be killed, and a process with such a
//! thread cannot end. So the command asks by a child process, which can be left behind
//! ([`probe_by_process`]); other programs that use the library ask by a thread.

use std::io::Read;
use std::path::Path;
use std::process::{Child, Stdio};
use std::sync::OnceLock;
use std::sync::mpsc::{Receiver, RecvTimeoutError, channel};
use std::time::Duration;

use rustix::io::Errno;

use super::respawn;
use crate::mount::stats::{MAX_STATS_BYTES, MountStats, STATS_ATTRIBUTE};

/// What a mount answered.
#[derive(Clone, Debug, PartialEq)]
pub enum Liveness {
    /// Its daemon lives; its numbers, where it gave them.
    Alive(Option<Box<MountStats>>),
    /// Its daemon is gone.
    Dead,
    /// It is there and not for this user; whether its daemon lives cannot be told.
    NotPermitted,
    /// No answer in time.
    Silent,
    /// The system's own answer.
    Failed(Errno),
}

/// A question on its way.
#[derive(Debug)]
pub struct LivenessProbe {
    receiver: Receiver<Liveness>,
    child: Option<Child>,
}

/// The first argument of a child process that asks; see [`run_probe_command`].
pub const PROBE_COMMAND: &str = "__ask-a-mount";

static USES_PROCESSES: OnceLock<()> = OnceLock::new();

/// From now on, questions are asked by child processes: this very command ([`respawn`]) with the
/// arguments [`PROBE_COMMAND`] and the path, which must call [`run_probe_command`] then.
pub fn probe_by_process() {
    // Saying it twice changes nothing.
    let _ = USES_PROCESSES.set(());
}

impl LivenessProbe {
    /// Asks.
    pub fn start(path: &Path) -> LivenessProbe {
        if USES_PROCESSES.get().is_some()
            && let Some(question) = LivenessProbe::start_process(path)
        {
            return question;
        }
        let (send, answers) = channel();
        let path = path.to_path_buf();
        let ask = move || {
            // Nobody may be waiting any more.
            let _ = send.send(interpret(read_stats(&path)));
        };
        // Without a thread there is no answer, and the channel says so.
        let _ = std::thread::Builder::new().name("ask a mount".to_owned()).spawn(ask);
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
            let mut said = Vec::new();
            let limit = MAX_STATS_BYTES as u64 + 1;
            let heard = stdout.take(limit).read_to_end(&mut said).is_ok();
            let _ =
                send.send(if heard { parse_output(&said) } else { Liveness::Failed(Errno::IO) });
        };
        std::thread::Builder::new().name("ask a mount".to_owned()).spawn(listen).ok()?;
        Some(LivenessProbe { receiver: answers, child: Some(child) })
    }

    /// The answer, if it came in that time; afterwards it may still come.
    pub fn wait(&mut self, limit: Duration) -> Option<Liveness> {
        match self.receiver.recv_timeout(limit) {
            Ok(answer) => {
                if let Some(mut child) = self.child.take() {
                    // It has said everything and is about to end.
                    let _ = child.wait();
                }
                Some(answer)
            }
            Err(RecvTimeoutError::Timeout) => None,
            Err(RecvTimeoutError::Disconnected) => Some(Liveness::Failed(Errno::AGAIN)),
        }
    }
}

impl Drop for LivenessProbe {
    fn drop(&mut self) {
        if let Some(mut child) = self.child.take() {
            // It ends when it can, which may be never: a thread waits for it, which never keeps
            // this process from ending. Without one it stays a zombie as long as we are.
            let _ = child.kill();
            let _ = std::thread::Builder::new().spawn(move || child.wait());
        }
    }
}

/// Asks a mount, and takes silence for an answer after that time.
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
        // It answers, though not that.
        Err(Errno::NODATA | Errno::NOTSUP | Errno::RANGE | Errno::NOSYS) => Liveness::Alive(None),
        Err(e) => Liveness::Failed(e),
    }
}

/// The part of the child process: asks, and writes what came to standard output.
pub fn run_probe_command(path: &Path, out: &mut dyn std::io::Write) -> std::io::Result<()> {
    match read_stats(path) {
        Ok(value) => {
            out.write_all(b"+")?;
            out.write_all(&value)
        }
        Err(e) => write!(out, "-{}", e.raw_os_error()),
    }
}

fn parse_output(said: &[u8]) -> Liveness {
    match said.split_first() {
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
