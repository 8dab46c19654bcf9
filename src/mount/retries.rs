//! Opens that the kernel tries a second time.
//!
//! The kernel opens what a name stood for when it was looked up. Where that is gone by then (ESTALE) it looks
//! the name up again and tries once more, and no more than that: renames in a row can come in between both
//! times. So what the second look finds is opened with it, and handed to the try that follows. It is what the
//! name stood for during the call. It is for the thread that made the call alone: for others the name may
//! stand for something newer by then.

use std::ffi::OsStr;
use std::num::NonZeroUsize;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use fuser::FileAttr;
use lru::LruCache;

use crate::threads::lock;

use super::nodes::Node;
use super::opened::{OpenedFiles, Ready};

/// Threads that may be between two tries at once. Others get the error, as they did.
const MAX_THREADS: NonZeroUsize = NonZeroUsize::new(64).unwrap();

/// The second try follows within milliseconds. What is opened for one that never comes is closed after this,
/// when the next name is looked up.
const EXPIRY: Duration = Duration::from_millis(500);

/// The threads that are between two tries, by number.
pub struct Retries {
    opened: Arc<OpenedFiles>,
    waiting: Mutex<LruCache<u32, Retry>>,
}

struct Retry {
    path: PathBuf,
    begun: Instant,
    found: Option<Found>,
}

/// What a name was found to stand for, and opened.
pub struct Found {
    pub node: Node,
    pub attr: FileAttr,
    pub ready: Ready,
}

impl Retries {
    pub fn new(opened: Arc<OpenedFiles>) -> Retries {
        Retries { opened, waiting: Mutex::new(LruCache::new(MAX_THREADS)) }
    }

    /// A first try of a thread has failed. Those of other containers have no number here, but 0.
    pub fn expect(&self, thread: u32, path: PathBuf) {
        if thread != 0 {
            self.put(thread, Retry { path, begun: Instant::now(), found: None });
        }
    }

    /// Whether a thread is about to try this again.
    pub fn expects(&self, thread: u32, directory: &Path, name: &OsStr) -> bool {
        let mut waiting = lock(&self.waiting);
        if waiting.is_empty() {
            return false;
        }
        let gone = |retry: &Retry| retry.begun.elapsed() > EXPIRY;
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

    /// What was found for a thread before: the kernel looks twice where the name stands for something else.
    pub fn found(&self, thread: u32) -> Option<(Node, FileAttr)> {
        let waiting = lock(&self.waiting);
        waiting.peek(&thread)?.found.as_ref().map(|found| (found.node.clone(), found.attr))
    }

    /// What a thread is to open is ready.
    pub fn provide(&self, thread: u32, path: PathBuf, found: Found) {
        self.put(thread, Retry { path, begun: Instant::now(), found: Some(found) });
    }

    /// Ends what is between the tries of a thread that opens a number: whether there was anything, and what
    /// is ready for it.
    pub fn take(&self, thread: u32, number: u64) -> (bool, Option<Ready>) {
        let Some(mut retry) = lock(&self.waiting).pop(&thread) else { return (false, None) };
        let is_over = retry.begun.elapsed() > EXPIRY;
        let found = retry.found.take_if(|found| !is_over && found.attr.ino.0 == number);
        self.discard(retry);
        (true, found.map(|found| found.ready))
    }

    /// There is nothing to try again.
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
