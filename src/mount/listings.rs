//! Directories that are being listed: a listing is made when it is read from its start, and holds for
//! the rest of that reading.

use std::collections::HashMap;
use std::ffi::OsString;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use fuser::{FileType, INodeNo, ReplyDirectory, ReplyDirectoryPlus};

use crate::threads::lock;

use super::attr::kind;
use super::filesystem::{GENERATION, Inner, TTL};
use super::nodes::Node;

/// A name, and what it stands for.
#[derive(Debug)]
pub struct Listed {
    pub name: OsString,
    pub node: Node,
    /// How long the kernel may believe what is said of it.
    pub ttl: Duration,
}

/// The listings of open directories.
#[derive(Debug, Default)]
pub struct Listings {
    next: AtomicU64,
    open: Mutex<HashMap<u64, Arc<Vec<Listed>>>>,
}

impl Listings {
    pub fn open(&self) -> u64 {
        self.next.fetch_add(1, Ordering::Relaxed)
    }

    /// The listing of a directory that is read on; nothing if it is read from its start.
    pub fn get(&self, handle: u64) -> Option<Arc<Vec<Listed>>> {
        lock(&self.open).get(&handle).cloned()
    }

    pub fn set(&self, handle: u64, listed: Vec<Listed>) -> Arc<Vec<Listed>> {
        let listed = Arc::new(listed);
        lock(&self.open).insert(handle, Arc::clone(&listed));
        listed
    }

    pub fn close(&self, handle: u64) {
        let gone = lock(&self.open).remove(&handle);
        drop(gone);
    }
}

/// A reply that takes one name after another.
pub trait Takes {
    /// Adds a name; whether there was no room for it.
    fn add(&mut self, inner: &Inner, next: u64, listed: &Listed) -> bool;
    /// Adds `.` or `..`; the kernel knows both, and asks for neither.
    fn add_dots(&mut self, inner: &Inner, next: u64, number: u64, own: &Node, name: &str) -> bool;
}

/// `.` and `..`.
const DOTS: usize = 2;

/// Gives names from an offset on, as many as there is room for.
pub fn give(
    inner: &Inner,
    (number, own): (u64, &Node),
    listed: &[Listed],
    offset: u64,
    reply: &mut impl Takes,
) {
    let from = usize::try_from(offset).unwrap_or(usize::MAX);
    for (n, name) in [".", ".."].into_iter().enumerate().skip(from) {
        if reply.add_dots(inner, n as u64 + 1, number, own, name) {
            return;
        }
    }
    for (n, listed) in listed.iter().enumerate().skip(from.saturating_sub(DOTS)) {
        if reply.add(inner, (n + DOTS) as u64 + 1, listed) {
            return;
        }
    }
}

impl Takes for ReplyDirectory {
    fn add(&mut self, inner: &Inner, next: u64, listed: &Listed) -> bool {
        let number = INodeNo(inner.nodes.number(&listed.node));
        ReplyDirectory::add(self, number, next, kind(listed.node.attributes.kind), &listed.name)
    }

    fn add_dots(&mut self, _: &Inner, next: u64, number: u64, _: &Node, name: &str) -> bool {
        ReplyDirectory::add(self, INodeNo(number), next, FileType::Directory, name)
    }
}

impl Takes for ReplyDirectoryPlus {
    fn add(&mut self, inner: &Inner, next: u64, listed: &Listed) -> bool {
        let number = inner.nodes.learn(listed.node.clone());
        let attr = inner.attr(number, &listed.node);
        let ino = INodeNo(number);
        let is_full =
            ReplyDirectoryPlus::add(self, ino, next, &listed.name, &listed.ttl, &attr, GENERATION);
        if is_full {
            // The kernel does not learn what did not fit.
            inner.nodes.forget(number, 1);
        }
        is_full
    }

    fn add_dots(&mut self, inner: &Inner, next: u64, number: u64, own: &Node, name: &str) -> bool {
        let attr = inner.attr(number, own);
        ReplyDirectoryPlus::add(self, INodeNo(number), next, name, &TTL, &attr, GENERATION)
    }
}
