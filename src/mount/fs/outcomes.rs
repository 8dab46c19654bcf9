//! What became of the kernel's requests: how many were answered, and why the last ones failed. A read's reply counts
//! itself.
//!
//! Every error that a lookup, an open or a read of the mount returns is recorded here, so that the statistics explain
//! it. A name that is not shown (ENOENT) is no error: programs ask for many names that may be missing.

use std::collections::VecDeque;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::{Path, PathBuf};
#[cfg(debug_assertions)]
use std::sync::atomic::AtomicBool;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::time::{SystemTime, UNIX_EPOCH};

use fuser::{Errno, ReplyData};

use crate::cache::CacheError;
use crate::clipped_text::clip;
use crate::log_throttle::LogThrottle;
use crate::mount::stats::RecentError;
use crate::source::SourceError;
use crate::threads::lock;
use crate::view::ViewError;

use super::attr::{source_errno, view_errno};
use super::inodes::InodeTable;

/// Errors that are kept: more than fail at once for different reasons. All of them fit `MAX_STATS_BYTES`.
const MAX_RECENT_COUNT: usize = 16;

/// The remedy for a fault in the program.
const REPORT_REMEDY: &str =
    "try again; if it fails again, report it with the log (ckptfs status says where it is)";

/// The counters of a mount, and its last errors. Each counter is exact by itself; together they are no snapshot.
pub struct RequestOutcomes {
    inodes: Arc<InodeTable>,
    mountpoint: PathBuf,
    bytes: AtomicU64,
    reads: AtomicU64,
    errors: AtomicU64,
    /// The newest last.
    recent: Mutex<VecDeque<RecentError>>,
    /// Sources whose failures were logged.
    log_throttle: LogThrottle,
}

/// Why a request fails.
#[derive(Debug)]
pub struct RequestFailure {
    errno: Errno,
    message: String,
    remedy: String,
    /// The source at fault, about which one line a minute is logged; `None` if the failure is in the log already.
    log_path: Option<PathBuf>,
}

impl RequestFailure {
    pub fn new(errno: Errno, message: impl ToString, remedy: impl ToString) -> RequestFailure {
        let (message, remedy) = (message.to_string(), remedy.to_string());
        RequestFailure { errno, message, remedy, log_path: None }
    }

    fn with_log_path(self, path: &Path) -> RequestFailure {
        RequestFailure { log_path: Some(path.to_path_buf()), ..self }
    }

    /// The same with another errno.
    pub fn with_errno(self, errno: Errno) -> RequestFailure {
        RequestFailure { errno, ..self }
    }

    /// The failure of a request about an inode that the kernel was never told, or forgot.
    pub fn forgotten_inode() -> RequestFailure {
        let message = "the kernel asked for a file that it has forgotten";
        RequestFailure::new(Errno::ESTALE, message, "open it again by its path")
    }

    /// The failure of a read from a handle that is not open.
    pub fn closed_handle() -> RequestFailure {
        let message = "the kernel read from a file that is not open";
        RequestFailure::new(Errno::EBADF, message, REPORT_REMEDY)
    }

    /// The failure of a request whose handler panicked.
    pub fn internal_fault() -> RequestFailure {
        let message = "the request could not be answered: a fault in ckptfs";
        RequestFailure::new(Errno::EIO, message, REPORT_REMEDY)
    }

    /// The failure of a read that was given up without an answer.
    pub fn abandoned() -> RequestFailure {
        let message = "the read was given up: the mount was ending, or this is a fault in ckptfs";
        RequestFailure::new(Errno::EIO, message, REPORT_REMEDY)
    }
}

impl From<&ViewError> for RequestFailure {
    fn from(error: &ViewError) -> RequestFailure {
        let failure = RequestFailure::new(view_errno(error), error, error.remedy());
        if error.is_outage() { failure } else { failure.with_log_path(error.path()) }
    }
}

impl From<&SourceError> for RequestFailure {
    fn from(error: &SourceError) -> RequestFailure {
        let failure = RequestFailure::new(source_errno(error), error, error.remedy());
        if error.is_outage() { failure } else { failure.with_log_path(error.path()) }
    }
}

/// The cache logs its errors itself: it knows which ones it has logged before.
impl From<&CacheError> for RequestFailure {
    fn from(error: &CacheError) -> RequestFailure {
        RequestFailure::new(Errno::EIO, error, error.remedy())
    }
}

impl RequestOutcomes {
    pub fn new(inodes: Arc<InodeTable>, mountpoint: PathBuf) -> RequestOutcomes {
        RequestOutcomes {
            inodes,
            mountpoint,
            bytes: AtomicU64::new(0),
            reads: AtomicU64::new(0),
            errors: AtomicU64::new(0),
            recent: Mutex::default(),
            log_throttle: LogThrottle::default(),
        }
    }

    pub fn count_read(&self, bytes: usize) {
        self.reads.fetch_add(1, Ordering::Relaxed);
        self.bytes.fetch_add(bytes as u64, Ordering::Relaxed);
    }

    pub fn bytes(&self) -> u64 {
        self.bytes.load(Ordering::Relaxed)
    }

    pub fn reads(&self) -> u64 {
        self.reads.load(Ordering::Relaxed)
    }

    pub fn errors(&self) -> u64 {
        self.errors.load(Ordering::Relaxed)
    }

    /// The last errors, the newest first.
    pub fn recent(&self) -> Vec<RecentError> {
        lock(&self.recent).iter().rev().cloned().collect()
    }

    /// Records the failure of a request about an inode, and returns its errno.
    pub fn record(&self, number: u64, failure: &RequestFailure) -> Errno {
        let path = self.inodes.get(number).map(|inode| inode.path.to_path());
        self.record_path(&path.unwrap_or_default(), failure)
    }

    /// Records the failure of a request about a path in the view, and returns its errno.
    pub fn record_path(&self, path: &Path, failure: &RequestFailure) -> Errno {
        self.errors.fetch_add(1, Ordering::Relaxed);
        let RequestFailure { errno, message, remedy, log_path } = failure;
        if log_path.as_deref().is_some_and(|path| self.log_throttle.should_log(path)) {
            tracing::warn!("{message}; what to do: {remedy}");
        }
        // Joined with an empty path, the mountpoint would end with a slash.
        let path = match path.as_os_str().is_empty() {
            true => self.mountpoint.clone(),
            false => self.mountpoint.join(path),
        };
        let now = SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |since| since.as_secs());
        let new = RecentError {
            time: now,
            count: 1,
            path: clip(&path.to_string_lossy()),
            errno: errno_name(*errno),
            message: clip(message),
            remedy: clip(remedy),
        };
        push_recent(&mut lock(&self.recent), new);
        *errno
    }

    /// Runs the work of a request about an inode. A panic becomes EIO: one request is lost, and the mount lives.
    pub fn catch_panic<T>(
        &self,
        number: u64,
        request: impl FnOnce() -> Result<T, Errno>,
    ) -> Result<T, Errno> {
        log_panic(request)
            .unwrap_or_else(|_| Err(self.record(number, &RequestFailure::internal_fault())))
    }
}

/// The reply to one read. If it is dropped instead, the kernel gets EIO.
pub struct ReadReply {
    reply: Option<ReplyData>,
    /// The inode number of the file.
    number: u64,
    outcomes: Arc<RequestOutcomes>,
}

impl ReadReply {
    pub fn new(reply: ReplyData, number: u64, outcomes: Arc<RequestOutcomes>) -> ReadReply {
        ReadReply { reply: Some(reply), number, outcomes }
    }

    pub fn send(mut self, bytes: &[u8]) {
        if let Some(reply) = self.reply.take() {
            self.outcomes.count_read(bytes.len());
            reply.data(bytes);
        }
    }

    pub fn fail(mut self, failure: &RequestFailure) {
        self.send_failure(failure);
    }

    /// Declines a read whose bytes no program waits for. It is no error of the mount.
    pub fn decline(mut self) {
        if let Some(reply) = self.reply.take() {
            reply.error(Errno::EBADF);
        }
    }

    fn send_failure(&mut self, failure: &RequestFailure) {
        if let Some(reply) = self.reply.take() {
            reply.error(self.outcomes.record(self.number, failure));
        }
    }
}

impl Drop for ReadReply {
    fn drop(&mut self) {
        if self.reply.is_some() {
            let failure = match std::thread::panicking() {
                true => RequestFailure::internal_fault(),
                false => RequestFailure::abandoned(),
            };
            self.send_failure(&failure);
        }
    }
}

/// The next read of a debug build panics: a test asked for it.
#[cfg(debug_assertions)]
pub static PANICS_ON_READ: AtomicBool = AtomicBool::new(false);

/// Panics if a test asked for it.
pub fn panic_if_asked() {
    #[cfg(debug_assertions)]
    assert!(!PANICS_ON_READ.swap(false, Ordering::Relaxed), "asked to");
}

/// Runs the work of a request, and logs a panic in it.
pub fn log_panic<T>(request: impl FnOnce() -> T) -> std::thread::Result<T> {
    // State that a panic leaves half changed is behind a lock, or belongs to this request alone.
    catch_unwind(AssertUnwindSafe(request)).inspect_err(|_| {
        tracing::error!("a request could not be answered: a fault in ckptfs, please report it");
    })
}

/// Adds an error. One that has happened before is counted, and moves to the end; the oldest beyond the limit goes.
fn push_recent(recent: &mut VecDeque<RecentError>, mut new: RecentError) {
    let is_same = |old: &RecentError| {
        (&old.path, &old.errno, &old.message) == (&new.path, &new.errno, &new.message)
    };
    if let Some(old) = recent.iter().position(is_same).and_then(|at| recent.remove(at)) {
        new.count += old.count;
    }
    recent.push_back(new);
    if recent.len() > MAX_RECENT_COUNT {
        recent.pop_front();
    }
}

/// The name of an errno, as manuals have it.
fn errno_name(errno: Errno) -> String {
    const NAMES: [(Errno, &str); 22] = [
        (Errno::EACCES, "EACCES"),
        (Errno::EAGAIN, "EAGAIN"),
        (Errno::EBADF, "EBADF"),
        (Errno::EINTR, "EINTR"),
        (Errno::EINVAL, "EINVAL"),
        (Errno::EIO, "EIO"),
        (Errno::EISDIR, "EISDIR"),
        (Errno::ELOOP, "ELOOP"),
        (Errno::EMFILE, "EMFILE"),
        (Errno::ENAMETOOLONG, "ENAMETOOLONG"),
        (Errno::ENFILE, "ENFILE"),
        (Errno::ENODEV, "ENODEV"),
        (Errno::ENOENT, "ENOENT"),
        (Errno::ENOMEM, "ENOMEM"),
        (Errno::ENOTCONN, "ENOTCONN"),
        (Errno::ENOTDIR, "ENOTDIR"),
        (Errno::ENXIO, "ENXIO"),
        (Errno::EOVERFLOW, "EOVERFLOW"),
        (Errno::EPERM, "EPERM"),
        (Errno::EROFS, "EROFS"),
        (Errno::ESTALE, "ESTALE"),
        (Errno::ETIMEDOUT, "ETIMEDOUT"),
    ];
    let known = NAMES.iter().find(|(known, _)| known.code() == errno.code());
    known.map_or_else(|| format!("errno {}", errno.code()), |(_, name)| (*name).to_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn error(path: &str, message: &str) -> RecentError {
        let (path, message) = (path.to_owned(), message.to_owned());
        RecentError { time: 1, count: 1, path, message, ..RecentError::default() }
    }

    #[test]
    fn a_repeated_error_is_counted_and_is_the_newest() {
        let mut recent = VecDeque::new();
        for (path, message) in [("a", "x"), ("b", "x"), ("a", "y"), ("a", "x")] {
            push_recent(&mut recent, error(path, message));
        }
        let found: Vec<(&str, &str, u64)> =
            recent.iter().map(|e| (&*e.path, &*e.message, e.count)).collect();
        assert_eq!(found, [("b", "x", 1), ("a", "y", 1), ("a", "x", 2)]);
    }

    #[test]
    fn the_oldest_errors_go_first() {
        let mut recent = VecDeque::new();
        (0..100).for_each(|n| push_recent(&mut recent, error(&n.to_string(), "x")));
        assert_eq!((recent.len(), &*recent[0].path), (MAX_RECENT_COUNT, "84"));
    }

    #[test]
    fn errnos_have_their_names() {
        assert_eq!(errno_name(Errno::EIO), "EIO");
        assert_eq!(errno_name(Errno::from_i32(4_000)), "errno 4000");
    }
}
