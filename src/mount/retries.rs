//! Opens that the kernel tries a second time.
//!
//! The kernel opens the file that a name stood for at its lookup. If that file is gone (ESTALE), the kernel looks
//! the name up again and tries once more. It tries only twice, and a rename can come before each try. So the
//! second lookup also opens the file, and hands it to the open that follows. The name stood for that file during
//! the call. Only the thread that made the call gets it, because the name may stand for a newer file for others.

use std::ffi::OsStr;
use std::num::NonZeroUsize;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use fuser::FileAttr;
use lru::LruCache;

use crate::threads::lock;

use super::handles::{OpenedFiles, Ready};
use super::inodes::Node;

/// Threads that may be between two tries at once. Further threads get the error.
const MAX_THREADS: NonZeroUsize = NonZeroUsize::new(64).unwrap();

/// The second try follows within milliseconds. A file whose second try never comes is closed after this time, at
/// the next lookup.
const EXPIRY: Duration = Duration::from_millis(500);

/// The threads that are between two tries, by number.
pub struct Retries {
    opened: Arc<OpenedFiles>,
    waiting: Mutex<LruCache<u32, Retry>>,
}

struct Retry {
    path: PathBuf,
    started: Instant,
    found: Option<Found>,
}

/// A file that was found and opened for the second try.
pub struct Found {
    pub node: Node,
    pub attr: FileAttr,
    pub ready: Ready,
}

impl Retries {
    pub fn new(opened: Arc<OpenedFiles>) -> Retries {
        Retries { opened, waiting: Mutex::new(LruCache::new(MAX_THREADS)) }
    }

    /// Records that the first try of a thread has failed. Threads of other containers have the number 0 here.
    pub fn expect(&self, thread: u32, path: PathBuf) {
        if thread != 0 {
            self.put(thread, Retry { path, started: Instant::now(), found: None });
        }
    }

    /// Whether a thread is about to try to open this name again.
    pub fn expects(&self, thread: u32, directory: &Path, name: &OsStr) -> bool {
        let mut waiting = lock(&self.waiting);
        if waiting.is_empty() {
            return false;
        }
        let gone = |retry: &Retry| retry.started.elapsed() > EXPIRY;
        let expired: Vec<u32> =
            waiting.iter().filter(|(_, retry)| gone(retry)).map(|(thread, _)| *thread).collect();
        let expired: Vec<Retry> = expired.iter().filter_map(|thread| waiting.pop(thread)).collect();
        let expects = waiting.peek(&thread).is_some_and(|retry| {
            retry.path.parent() == Some(directory) && retry.path.file_name() == Some(name)
        });
        drop(waiting);
        expired.into_iter().for_each(|retry| self.discard(retry));
        expects
    }

    /// The file that was found for a thread before. The kernel looks a name up twice if it stands for another file.
    pub fn found(&self, thread: u32) -> Option<(Node, FileAttr)> {
        let waiting = lock(&self.waiting);
        waiting.peek(&thread)?.found.as_ref().map(|found| (found.node.clone(), found.attr))
    }

    /// Keeps an open file for the second try of a thread.
    pub fn provide(&self, thread: u32, path: PathBuf, found: Found) {
        self.put(thread, Retry { path, started: Instant::now(), found: Some(found) });
    }

    /// Ends the retry of a thread that opens a number. Returns whether there was one, and its file if it has that
    /// number.
    pub fn take(&self, thread: u32, number: u64) -> (bool, Option<Ready>) {
        let Some(mut retry) = lock(&self.waiting).pop(&thread) else { return (false, None) };
        let is_over = retry.started.elapsed() > EXPIRY;
        let found = retry.found.take_if(|found| !is_over && found.attr.ino.0 == number);
        self.discard(retry);
        (true, found.map(|found| found.ready))
    }

    /// Ends the retry of a thread that has nothing to open.
    pub fn end(&self, thread: u32) {
        let retry = lock(&self.waiting).pop(&thread);
        if let Some(retry) = retry {
            self.discard(retry);
        }
    }

    fn put(&self, thread: u32, retry: Retry) {
        let old = lock(&self.waiting).push(thread, retry);
        if let Some((_, old)) = old {
            self.discard(old);
        }
    }

    fn discard(&self, retry: Retry) {
        if let Some(Found { attr, ready, .. }) = retry.found {
            self.opened.give_up(attr.ino.0, ready);
        }
    }
}
