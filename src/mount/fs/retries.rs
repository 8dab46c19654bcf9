//! Opens that the kernel tries a second time.
//!
//! The kernel opens the file that a name stood for at its lookup. If that file is gone (ESTALE), the kernel looks
//! the name up again and tries once more. It tries only twice, and a rename can come before each try. So the
//! second lookup also opens the file, and hands it to the open that follows. The name stood for that file during
//! the call. Only the thread that made the call gets it: for other threads the name may stand for a newer file.

use std::ffi::OsStr;
use std::num::NonZeroUsize;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use fuser::FileAttr;
use lru::LruCache;

use crate::threads::lock;

use super::handles::{HandleTable, PreparedOpen};
use super::inodes::Inode;

/// Threads that may be between two tries at once. Further threads get the error.
const MAX_RETRYING_THREADS: NonZeroUsize = NonZeroUsize::new(64).unwrap();

/// The second try follows within milliseconds. A file whose second try never comes is closed after this time, at
/// the next lookup.
const RETRY_WINDOW: Duration = Duration::from_millis(500);

/// The threads that are between two tries, by number.
pub struct Retries {
    handles: Arc<HandleTable>,
    waiting: Mutex<LruCache<u32, PendingRetry>>,
}

struct PendingRetry {
    path: PathBuf,
    started: Instant,
    file: Option<RetryFile>,
}

/// A file that was found and opened for the second try.
pub struct RetryFile {
    pub inode: Inode,
    pub attr: FileAttr,
    pub prepared: PreparedOpen,
}

impl Retries {
    pub fn new(handles: Arc<HandleTable>) -> Retries {
        Retries { handles, waiting: Mutex::new(LruCache::new(MAX_RETRYING_THREADS)) }
    }

    /// Records that the first try of a thread has failed. Returns whether the second try can be told by its thread:
    /// those of other containers have the number 0 here.
    pub fn record_first_try(&self, thread: u32, path: PathBuf) -> bool {
        let is_known = thread != 0;
        if is_known {
            self.put(thread, PendingRetry { path, started: Instant::now(), file: None });
        }
        is_known
    }

    /// Whether a thread is about to try to open this name again.
    pub fn is_expected(&self, thread: u32, directory: &Path, name: &OsStr) -> bool {
        let mut waiting = lock(&self.waiting);
        if waiting.is_empty() {
            return false;
        }
        let is_over = |retry: &PendingRetry| retry.started.elapsed() > RETRY_WINDOW;
        let expired: Vec<u32> =
            waiting.iter().filter(|(_, retry)| is_over(retry)).map(|(thread, _)| *thread).collect();
        let expired: Vec<PendingRetry> =
            expired.iter().filter_map(|thread| waiting.pop(thread)).collect();
        let is_expected = waiting.peek(&thread).is_some_and(|retry| {
            retry.path.parent() == Some(directory) && retry.path.file_name() == Some(name)
        });
        drop(waiting);
        expired.into_iter().for_each(|retry| self.discard(retry));
        is_expected
    }

    /// The file that was provided for a thread before. The kernel looks a name up twice if it stands for another file.
    pub fn provided_file(&self, thread: u32) -> Option<(Inode, FileAttr)> {
        let waiting = lock(&self.waiting);
        waiting.peek(&thread)?.file.as_ref().map(|file| (file.inode.clone(), file.attr))
    }

    /// Keeps an open file for the second try of a thread.
    pub fn provide(&self, thread: u32, path: PathBuf, file: RetryFile) {
        self.put(thread, PendingRetry { path, started: Instant::now(), file: Some(file) });
    }

    /// Ends the retry of a thread that opens a number. Returns whether there was one, and its file if it has that
    /// number.
    pub fn take(&self, thread: u32, number: u64) -> (bool, Option<PreparedOpen>) {
        let Some(mut retry) = lock(&self.waiting).pop(&thread) else { return (false, None) };
        let is_over = retry.started.elapsed() > RETRY_WINDOW;
        let file = retry.file.take_if(|file| !is_over && file.attr.ino.0 == number);
        self.discard(retry);
        (true, file.map(|file| file.prepared))
    }

    /// Ends the retry of a thread that has nothing to open.
    pub fn end(&self, thread: u32) {
        let retry = lock(&self.waiting).pop(&thread);
        if let Some(retry) = retry {
            self.discard(retry);
        }
    }

    fn put(&self, thread: u32, retry: PendingRetry) {
        let old = lock(&self.waiting).push(thread, retry);
        if let Some((_, old)) = old {
            self.discard(old);
        }
    }

    fn discard(&self, retry: PendingRetry) {
        if let Some(RetryFile { attr, prepared, .. }) = retry.file {
            self.handles.cancel_open(attr.ino.0, prepared);
        }
    }
}
