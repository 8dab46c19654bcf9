//! A mount while it is there: the threads that answer the kernel, and how they are stopped.
//!
//! In: a filesystem and the descriptor on which the kernel asks. Out: a [`Mounted`], which can be
//! waited for and taken out of the tree. The session ends by itself when the kernel has nobody
//! left to ask for; the process need not, so whoever owns a [`Mounted`] decides that.

use std::fmt;
use std::io;
use std::os::fd::OwnedFd;
use std::path::Path;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use tokio::sync::Notify;

use crate::threads::lock;

use super::attach::AttachedMount;
use super::liveness::{self, Liveness};
use crate::mount::error::MountError;
use crate::mount::stats::{MountStats, StatsReporter};

/// A filesystem that is mounted and answers. Dropped, it is taken out of the tree.
pub struct MountSession {
    attached: Arc<AttachedMount>,
    end: Arc<SessionEnd>,
    stats_reporter: StatsReporter,
    pub(in crate::mount) is_privileged: bool,
}

/// How long a new mount has for its first answer: milliseconds are usual, and a machine that is short
/// of memory or processors should not lose its mounts for that.
const FIRST_REPLY_TIMEOUT: Duration = Duration::from_secs(20);

/// Whether the session has ended, and how.
#[derive(Default)]
struct SessionEnd {
    outcome: Mutex<Option<Result<(), String>>>,
    changed: Condvar,
    notify: Notify,
}

impl SessionEnd {
    fn outcome(&self) -> MutexGuard<'_, Option<Result<(), String>>> {
        // A plain value: whoever panicked with it left it whole.
        lock(&self.outcome)
    }

    fn set(&self, outcome: Result<(), String>) {
        *self.outcome() = Some(outcome);
        self.changed.notify_all();
        self.notify.notify_waiters();
    }
}

/// What the session's thread leaves behind, also when it panics: nothing in the tree that nobody
/// answers for, nobody waiting for an answer, and word of the end.
struct SessionCleanup {
    attached: Arc<AttachedMount>,
    end: Arc<SessionEnd>,
    outcome: Result<(), String>,
}

impl Drop for SessionCleanup {
    fn drop(&mut self) {
        if let Err(error) = self.attached.detach() {
            tracing::warn!("{error}");
        }
        self.attached.disconnect();
        self.end.set(std::mem::replace(&mut self.outcome, Ok(())));
    }
}

/// Answers the kernel's first question, starts the threads, and sees that the mount answers.
pub(in crate::mount) fn start<F: fuser::Filesystem + 'static>(
    filesystem: F,
    (fd, attached): (OwnedFd, AttachedMount),
    config: fuser::Config,
    numbers: StatsReporter,
    may_tell: impl FnOnce(fuser::Notifier),
) -> Result<MountSession, MountError> {
    let path = attached.mountpoint().to_path_buf();
    let failed =
        |action| move |source: io::Error| MountError::Io { path: path.clone(), action, source };
    // From here on a failure drops it, which takes it out of the tree.
    let attached = Arc::new(attached);
    let mounted = MountSession {
        attached: Arc::clone(&attached),
        end: Arc::default(),
        stats_reporter: numbers,
        is_privileged: false,
    };
    // The kernel itself lets nobody else in unless `allow_other` was said.
    let acl = fuser::SessionACL::All;
    let session = fuser::Session::from_fd(filesystem, fd, acl, config)
        .map_err(failed.clone()("agree with the kernel"))?;
    may_tell(session.notifier());
    let end = Arc::clone(&mounted.end);
    let outcome = Err("its thread panicked".to_owned());
    let will = SessionCleanup { attached, end, outcome };
    let serve = move || {
        // The whole of it, to be dropped at this thread's end and not before.
        let mut will = will;
        will.outcome = session.run().map_err(|error| error.to_string());
    };
    let thread = std::thread::Builder::new().name("ckptfs session".to_owned());
    thread.spawn(serve).map_err(failed("start a thread"))?;
    match liveness::probe(mounted.mountpoint(), FIRST_REPLY_TIMEOUT) {
        // Its root's mode may keep even its owner out, and be right.
        Liveness::Alive(_) | Liveness::NotPermitted => Ok(mounted),
        Liveness::Failed(e) => Err(MountError::io(mounted.mountpoint(), "use the mount", e)),
        Liveness::Dead | Liveness::Silent => {
            Err(MountError::Silent { path: mounted.mountpoint().to_path_buf() })
        }
    }
}

impl MountSession {
    /// Where it is, absolute and without links.
    pub fn mountpoint(&self) -> &Path {
        self.attached.mountpoint()
    }

    /// Whether it has what only privileges give: files that the kernel reads by itself, and a kernel
    /// that reads further ahead.
    pub fn is_privileged(&self) -> bool {
        self.is_privileged
    }

    /// The mount in the tree.
    pub fn attached(&self) -> &AttachedMount {
        &self.attached
    }

    /// Takes it out of the tree at once, and nothing that others have mounted there since. Who has a
    /// file open may go on; the session ends with the last of them.
    pub fn detach(&self) -> Result<(), MountError> {
        self.attached.detach()
    }

    /// Whether the session has ended.
    pub fn has_ended(&self) -> bool {
        self.end.outcome().is_some()
    }

    /// Why the session ended, if something was wrong with that.
    pub fn failure(&self) -> Option<String> {
        self.end.outcome().clone()?.err()
    }

    /// Waits for the session to end, so long at the most; whether it has.
    pub fn wait(&self, limit: Duration) -> bool {
        let until = Instant::now() + limit;
        let mut outcome = self.end.outcome();
        while outcome.is_none() {
            let left = until.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return false;
            }
            let woken = self.end.changed.wait_timeout(outcome, left);
            outcome = woken.unwrap_or_else(PoisonError::into_inner).0;
        }
        true
    }

    /// The same for tasks, without a limit.
    pub async fn wait_for_end(&self) {
        loop {
            // Asked for before looking, so that an end in between is not missed.
            let told = self.end.notify.notified();
            tokio::pin!(told);
            told.as_mut().enable();
            if self.has_ended() {
                return;
            }
            told.await;
        }
    }

    /// The numbers now.
    pub fn stats(&self) -> MountStats {
        (self.stats_reporter)()
    }

    /// The same for those who outlive a borrow.
    pub fn stats_reporter(&self) -> StatsReporter {
        Arc::clone(&self.stats_reporter)
    }
}

impl Drop for MountSession {
    fn drop(&mut self) {
        if let Err(error) = self.detach() {
            tracing::warn!("{error}");
        }
    }
}

impl fmt::Debug for MountSession {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut shown = f.debug_struct("Mounted");
        shown.field("attached", &self.attached).field("ended", &self.has_ended()).finish()
    }
}
