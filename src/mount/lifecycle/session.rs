//! The session of a mount: the threads that reply to the kernel.
//!
//! A [`MountSession`] ends by itself with its last reader, after the mount was detached. Its owner decides when the
//! process ends.

use std::fmt;
use std::io;
use std::os::fd::OwnedFd;
use std::path::Path;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use tokio::sync::Notify;

use crate::threads::{lock, spawn};

use super::attach::AttachedMount;
use super::liveness::{self, Liveness};
use crate::mount::error::MountError;
use crate::mount::stats::{MountStats, StatsReporter};
use crate::mount::survey::MountSurvey;

/// A mount that this process serves. Dropping it detaches it.
pub struct MountSession {
    attached: Arc<AttachedMount>,
    end: Arc<SessionEnd>,
    stats_reporter: StatsReporter,
    pub(in crate::mount) is_privileged: bool,
    pub(in crate::mount) survey: MountSurvey,
}

/// The time limit for the first reply of a mount. Milliseconds are usual, but a machine that is short of memory or
/// processors should not lose its mounts.
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
        // No thread can panic while it changes this value.
        lock(&self.outcome)
    }

    fn set(&self, outcome: Result<(), String>) {
        *self.outcome() = Some(outcome);
        self.changed.notify_all();
        self.notify.notify_waiters();
    }
}

/// Cleans up when the session's thread ends, even by a panic. It detaches the mount, fails the requests that wait for a
/// reply, and reports the end.
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

/// Replies to the kernel's first request, starts the threads, and waits until the mount answers.
pub(in crate::mount) fn start<F: fuser::Filesystem + 'static>(
    filesystem: F,
    (fd, attached): (OwnedFd, AttachedMount),
    config: fuser::Config,
    numbers: StatsReporter,
    on_notifier: impl FnOnce(fuser::Notifier),
) -> Result<MountSession, MountError> {
    let path = attached.mountpoint().to_path_buf();
    let failed =
        |action| move |source: io::Error| MountError::Io { path: path.clone(), action, source };
    // From here on, an error drops the session, which detaches the mount.
    let attached = Arc::new(attached);
    let mounted = MountSession {
        attached: Arc::clone(&attached),
        end: Arc::default(),
        stats_reporter: numbers,
        is_privileged: false,
        survey: MountSurvey::default(),
    };
    // Without `allow_other`, the kernel itself keeps other users out.
    let acl = fuser::SessionACL::All;
    let session = fuser::Session::from_fd(filesystem, fd, acl, config)
        .map_err(failed.clone()("agree with the kernel"))?;
    on_notifier(session.notifier());
    let end = Arc::clone(&mounted.end);
    let outcome = Err("its thread panicked".to_owned());
    let cleanup = SessionCleanup { attached, end, outcome };
    let serve = move || {
        // Moves the whole value into this thread, whose end drops it.
        let mut cleanup = cleanup;
        cleanup.outcome = session.run().map_err(|error| error.to_string());
    };
    spawn("ckptfs session", serve).map_err(failed("start a thread"))?;
    match liveness::probe(mounted.mountpoint(), FIRST_REPLY_TIMEOUT) {
        // The mode of its root may deny access even to its owner.
        Liveness::Alive(_) | Liveness::NotPermitted => Ok(mounted),
        Liveness::Failed(e) => Err(MountError::io(mounted.mountpoint(), "use the mount", e)),
        Liveness::Dead | Liveness::Silent => {
            Err(MountError::Silent { path: mounted.mountpoint().to_path_buf() })
        }
    }
}

impl MountSession {
    /// The mountpoint, absolute and without links.
    pub fn mountpoint(&self) -> &Path {
        self.attached.mountpoint()
    }

    /// Whether it has the features that need root: passthrough, and a larger readahead of the kernel.
    pub fn is_privileged(&self) -> bool {
        self.is_privileged
    }

    /// What it showed when it was made.
    pub fn survey(&self) -> &MountSurvey {
        &self.survey
    }

    /// The mount in the tree.
    pub fn attached(&self) -> &AttachedMount {
        &self.attached
    }

    /// Detaches it from the tree at once, and no other mount at its path. Readers of open files go on, and the session
    /// ends with the last one.
    pub fn detach(&self) -> Result<(), MountError> {
        self.attached.detach()
    }

    /// Whether the session has ended.
    pub fn has_ended(&self) -> bool {
        self.end.outcome().is_some()
    }

    /// The error that ended the session, if one did.
    pub fn failure(&self) -> Option<String> {
        self.end.outcome().clone()?.err()
    }

    /// Waits for the session to end, for at most `limit`. Returns whether it has ended.
    pub fn wait(&self, limit: Duration) -> bool {
        let deadline = Instant::now() + limit;
        let mut outcome = self.end.outcome();
        while outcome.is_none() {
            let remaining = deadline.saturating_duration_since(Instant::now());
            if remaining.is_zero() {
                return false;
            }
            let woken = self.end.changed.wait_timeout(outcome, remaining);
            outcome = woken.unwrap_or_else(PoisonError::into_inner).0;
        }
        true
    }

    /// Waits for the session to end, in a task.
    pub async fn wait_for_end(&self) {
        loop {
            // Enabled before the check, so that an end in between is not missed.
            let notified = self.end.notify.notified();
            tokio::pin!(notified);
            notified.as_mut().enable();
            if self.has_ended() {
                return;
            }
            notified.await;
        }
    }

    /// The statistics of the mount.
    pub fn stats(&self) -> MountStats {
        (self.stats_reporter)()
    }

    /// Gives the statistics at any time.
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
