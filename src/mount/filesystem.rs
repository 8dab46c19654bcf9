//! The answers to the kernel.
//!
//! In: requests, on the few threads of the session. Out: exactly one reply to each. What may wait for
//! the source's filesystem is asked on other threads ([`Askers`]), and images are read by the cache on
//! its own, so that the session's threads never wait: a source that hangs holds up only those who ask
//! for it. No decision about what is shown is taken here.

use std::ffi::OsStr;
use std::io;
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use fuser::{
    Errno, FileHandle, FopenFlags, Generation, INodeNo, InitFlags, KernelConfig, LockOwner,
    OpenAccMode, OpenFlags, ReplyAttr, ReplyData, ReplyDirectory, ReplyDirectoryPlus, ReplyEmpty,
    ReplyEntry, ReplyOpen, ReplyStatfs, ReplyXattr, Request,
};

use crate::source::{Attributes, Kind};
use crate::view::{Entry, Names, View};

use super::Error;
use super::attr::{Owner, attr, errno, is_stale, last_attr, on_opening};
use super::blocking_pool::{Askers, guarded};
use super::handles::{Opened, OpenedFiles};
use super::inodes::{LastSeen, Node, Nodes, ROOT, What};
use super::read_reply::{Answer, Range};
use super::readdir::{self, DirSink, Listings};
use super::retries::{Found, Retries};
use super::xattrs;
use super::{Context, denied_ops};

/// How long the kernel may believe what it was told: a change must show within a second.
pub const TTL: Duration = Duration::from_millis(500);

/// Requests that the kernel may have under way at once for reading ahead and direct reads: as many as
/// the protocol can say. The kernel counts those of all files together and asks nothing more at that
/// number, so that a source that hangs would hold up everybody else with so many readers of its own.
const MAX_BACKGROUND: u16 = u16::MAX;

/// Filesystems that may lie on one another, the source's among them: as many as the kernel allows, so
/// that a source on an overlay, as in containers, can be passed through.
const STACK: u32 = 2;

/// Lookups of a name that is renamed over meanwhile, until one can be opened.
const TRIES: usize = 8;

/// Numbers are not used again for another thing while the kernel knows them.
pub const GENERATION: Generation = Generation(0);

/// The filesystem of one mount.
pub struct Filesystem {
    inner: Arc<Inner>,
    askers: Askers,
}

/// What every answer is made from.
pub struct Inner {
    pub view: Arc<View>,
    pub nodes: Nodes,
    pub opened: Arc<OpenedFiles>,
    retries: Retries,
    pub listings: Listings,
    pub context: Arc<Context>,
    owner: Owner,
}

impl Filesystem {
    pub fn new(
        context: Arc<Context>,
        opened: Arc<OpenedFiles>,
        owner: Owner,
        listings: Listings,
    ) -> Result<Self, Error> {
        let view = Arc::clone(&context.view);
        let root = view.attributes("".as_ref())?;
        let askers =
            Askers::new().map_err(|e| Error::io(&context.source, "start a thread for it", e))?;
        let retries = Retries::new(Arc::clone(&opened));
        let nodes = Nodes::new(&root);
        let inner = Inner { view, nodes, opened, retries, listings, context, owner };
        Ok(Filesystem { inner: Arc::new(inner), askers })
    }

    /// Answers on another thread what is asked of a file or directory.
    fn ask(&self, number: INodeNo, answer: impl FnOnce(&Inner) + Send + 'static) {
        let inner = Arc::clone(&self.inner);
        let device = inner.nodes.get(number.0).map_or(0, |node| node.last.dev);
        self.askers.ask(device, move || answer(&inner));
    }
}

impl Inner {
    fn node(&self, number: INodeNo) -> Result<Arc<Node>, Errno> {
        // A number that the kernel was never told, or forgot.
        self.nodes.get(number.0).ok_or(Errno::ESTALE)
    }

    pub fn attr(&self, number: u64, attributes: &Attributes) -> fuser::FileAttr {
        attr(number, attributes, self.owner)
    }

    pub fn last_attr(&self, number: u64, node: &Node) -> fuser::FileAttr {
        last_attr(number, &node.last, self.owner)
    }

    fn look_up(
        &self,
        thread: u32,
        parent: INodeNo,
        name: &OsStr,
    ) -> Result<fuser::FileAttr, Errno> {
        let directory = self.node(parent)?.path.to_path();
        if self.retries.expects(thread, &directory, name)
            && let Some(attr) = self.look_up_and_open(thread, parent, &directory, name)
        {
            return Ok(attr);
        }
        let entry = self.view.entry(&directory, name).map_err(|e| self.refuse(&e))?;
        let entry = entry.ok_or_else(|| self.missing())?;
        let path = self.nodes.path(parent.0, &directory, name);
        let number = self.nodes.learn(Node::new(path, &entry));
        Ok(self.attr(number, entry.attributes()))
    }

    /// Looks a name up and opens it for a thread that is about to do so; `None` if that fails.
    fn look_up_and_open(
        &self,
        thread: u32,
        parent: INodeNo,
        directory: &Path,
        name: &OsStr,
    ) -> Option<fuser::FileAttr> {
        if let Some((node, attr)) = self.retries.found(thread) {
            self.nodes.learn(node);
            return Some(attr);
        }
        let place = directory.join(name);
        for _ in 0..TRIES {
            // During renames, a listing can lack a name that exists.
            let Some(entry) = self.view.entry(directory, name).ok()? else { continue };
            if entry.attributes().kind != Kind::File {
                self.retries.end(thread);
                return None;
            }
            let node = Node::new(self.nodes.path(parent.0, directory, name), &entry);
            match self.opened.ready(self.nodes.number(&node), &node) {
                Ok(ready) => {
                    let attr = self.attr(self.nodes.learn(node.clone()), entry.attributes());
                    self.retries.provide(thread, place, Found { node, attr, ready });
                    return Some(attr);
                }
                Err(error) if is_stale(&error) => self.view.look_again(&place),
                Err(_) => return None,
            }
        }
        None
    }

    fn attributes(&self, number: INodeNo) -> Result<fuser::FileAttr, Errno> {
        let node = self.node(number)?;
        let now = match &node.what {
            // What has another state by now is another file; this one stays what it was.
            What::Image(shown) => match self.entry_at(&node) {
                Some(Entry::Image(now) | Entry::Index(now))
                    if now.identity() == shown.identity() =>
                {
                    Some(*now.attributes())
                }
                _ => None,
            },
            What::Source => match self.view.attributes(&node.path.to_path()) {
                Ok(now) if node.last.is_same(&LastSeen::from(&now)) => Some(now),
                _ => None,
            },
            What::Link(_) => None,
        };
        let Some(now) = now else { return Ok(self.last_attr(number.0, &node)) };
        self.nodes.update(number.0, Node { last: LastSeen::from(&now), ..(*node).clone() });
        Ok(self.attr(number.0, &now))
    }

    fn entry_at(&self, node: &Node) -> Option<Entry> {
        let (directory, name) = node.path.parts()?;
        self.view.entry(directory, name).ok()?
    }

    fn link(&self, number: INodeNo) -> Result<PathBuf, Errno> {
        match &self.node(number)?.what {
            What::Link(Some(target)) => Ok((**target).clone()),
            What::Link(None) => Err(Errno::EACCES),
            _ => Err(Errno::EINVAL),
        }
    }

    /// Replies with the names of a directory from an offset on.
    fn list(
        &self,
        number: INodeNo,
        handle: FileHandle,
        offset: u64,
        reply: &mut impl DirSink,
    ) -> Result<(), Errno> {
        let own = self.node(number)?;
        readdir::reply_names(self, (number.0, handle.0), &own, offset, reply)
    }

    /// The names of a directory as they are now.
    pub fn names(&self, number: u64, directory: &Path) -> Result<Names, Errno> {
        let names = self.view.names(directory).map_err(|e| self.refuse(&e))?;
        if number == ROOT && names.is_empty() {
            self.missing();
        }
        Ok(names)
    }

    pub fn refuse(&self, error: &crate::view::Error) -> Errno {
        let errno = errno(error);
        if i32::from(errno) == i32::from(Errno::ENOENT) {
            return self.missing();
        }
        self.failed(error);
        errno
    }

    /// There is nothing of a name, perhaps because there is nothing of anything any more.
    fn missing(&self) -> Errno {
        // For its word in the log.
        self.context.standing.is_removed();
        Errno::ENOENT
    }

    fn failed(&self, error: &crate::view::Error) {
        self.context.counters.count_error();
        if self.context.said.may_say(error.path()) {
            tracing::warn!("{error}");
        }
    }
}

impl fuser::Filesystem for Filesystem {
    /// The session's end, which waits a moment for what loads leave: files may be open in it to the last.
    fn destroy(&mut self) {
        self.inner.opened.settle();
    }

    fn init(&mut self, _: &Request, config: &mut KernelConfig) -> io::Result<()> {
        // Each is asked for by itself: a kernel that lacks one has the others.
        for wanted in [
            InitFlags::FUSE_PARALLEL_DIROPS,
            InitFlags::FUSE_DO_READDIRPLUS,
            InitFlags::FUSE_READDIRPLUS_AUTO,
            InitFlags::FUSE_AUTO_INVAL_DATA,
            InitFlags::FUSE_ASYNC_DIO,
        ] {
            if config.add_capabilities(wanted).is_err() {
                tracing::debug!(?wanted, "the kernel lacks this");
            }
        }
        let passthrough = self.inner.opened.wants_passthrough()
            && config.add_capabilities(InitFlags::FUSE_PASSTHROUGH).is_ok()
            && config.set_max_stack_depth(STACK).is_ok();
        self.inner.opened.set_passthrough(passthrough);
        if let Err(nearest) = config.set_max_background(MAX_BACKGROUND) {
            tracing::debug!(nearest, "requests under way are limited");
        }
        Ok(())
    }

    fn lookup(&self, request: &Request, parent: INodeNo, name: &OsStr, reply: ReplyEntry) {
        let (thread, name) = (request.pid(), name.to_owned());
        self.ask(parent, move |inner| match guarded(|| inner.look_up(thread, parent, &name)) {
            Ok(attr) => reply.entry(&TTL, &attr, GENERATION),
            Err(errno) => reply.error(errno),
        });
    }

    fn forget(&self, _: &Request, number: INodeNo, times: u64) {
        if self.inner.nodes.forget(number.0, times) {
            self.inner.opened.forget(number.0);
        }
    }

    fn getattr(&self, _: &Request, number: INodeNo, _: Option<FileHandle>, reply: ReplyAttr) {
        self.ask(number, move |inner| match guarded(|| inner.attributes(number)) {
            Ok(attr) => reply.attr(&TTL, &attr),
            Err(errno) => reply.error(errno),
        });
    }

    fn readlink(&self, _: &Request, number: INodeNo, reply: ReplyData) {
        match guarded(|| self.inner.link(number)) {
            Ok(target) => reply.data(target.as_os_str().as_bytes()),
            Err(errno) => reply.error(errno),
        }
    }

    fn open(&self, request: &Request, number: INodeNo, flags: OpenFlags, reply: ReplyOpen) {
        if flags.acc_mode() != OpenAccMode::O_RDONLY {
            return reply.error(Errno::EROFS);
        }
        let thread = request.pid();
        self.ask(number, move |inner| {
            let open = || {
                let node = inner.node(number)?;
                let (is_second, ready) = inner.retries.take(thread, number.0);
                let ready = ready.map_or_else(|| inner.opened.ready(number.0, &node), Ok);
                let opened =
                    ready.and_then(|ready| inner.opened.open(number.0, &node, ready, &reply));
                opened.map_err(|e| {
                    // The kernel looks the name up once more, and must be told what is there now.
                    let path = node.path.to_path();
                    inner.view.look_again(&path);
                    if is_stale(&e) && !is_second {
                        inner.retries.expect(thread, path);
                    }
                    inner.failed(&e);
                    on_opening(&e)
                })
            };
            match guarded(open) {
                Ok(Opened { handle, flags, backing: Some(backing) }) => {
                    reply.opened_passthrough(FileHandle(handle), flags, &backing);
                }
                Ok(Opened { handle, flags, backing: None }) => {
                    reply.opened(FileHandle(handle), flags);
                }
                Err(errno) => reply.error(errno),
            }
        });
    }

    fn read(
        &self,
        _: &Request,
        _: INodeNo,
        handle: FileHandle,
        offset: u64,
        size: u32,
        _: OpenFlags,
        _: Option<LockOwner>,
        reply: ReplyData,
    ) {
        let counters = Arc::clone(&self.inner.context.counters);
        let answer = Answer { reply, counters, asker: self.askers.asker() };
        let range = Range { offset, size };
        // An answer that is dropped by a panic tells the kernel EIO.
        let _ = guarded(|| {
            self.inner.opened.read(handle.0, range, answer);
            Ok(())
        });
    }

    fn release(
        &self,
        _: &Request,
        number: INodeNo,
        handle: FileHandle,
        _: OpenFlags,
        _: Option<LockOwner>,
        _: bool,
        reply: ReplyEmpty,
    ) {
        // Who closes a file waits for no answer, and closing its sources may take time.
        reply.ok();
        self.ask(number, move |inner| inner.opened.close(handle.0));
    }

    fn opendir(&self, _: &Request, _: INodeNo, _: OpenFlags, reply: ReplyOpen) {
        reply.opened(FileHandle(self.inner.listings.open()), FopenFlags::empty());
    }

    fn readdir(
        &self,
        _: &Request,
        number: INodeNo,
        handle: FileHandle,
        offset: u64,
        mut reply: ReplyDirectory,
    ) {
        self.ask(number, move |inner| {
            match guarded(|| inner.list(number, handle, offset, &mut reply)) {
                Ok(()) => reply.ok(),
                Err(errno) => reply.error(errno),
            }
        });
    }

    fn readdirplus(
        &self,
        _: &Request,
        number: INodeNo,
        handle: FileHandle,
        offset: u64,
        mut reply: ReplyDirectoryPlus,
    ) {
        self.ask(number, move |inner| {
            match guarded(|| inner.list(number, handle, offset, &mut reply)) {
                Ok(()) => reply.ok(),
                Err(errno) => reply.error(errno),
            }
        });
    }

    fn releasedir(
        &self,
        _: &Request,
        _: INodeNo,
        handle: FileHandle,
        _: OpenFlags,
        reply: ReplyEmpty,
    ) {
        self.inner.listings.close(handle.0);
        reply.ok();
    }

    fn statfs(&self, _: &Request, _: INodeNo, reply: ReplyStatfs) {
        self.ask(INodeNo(ROOT), move |inner| {
            match guarded(|| inner.view.root().space().map_err(|_| Errno::EIO)) {
                Ok(s) => reply.statfs(
                    s.f_blocks,
                    s.f_bfree,
                    s.f_bavail,
                    s.f_files,
                    s.f_ffree,
                    u32::try_from(s.f_bsize).unwrap_or(4096),
                    u32::try_from(s.f_namemax).unwrap_or(255),
                    u32::try_from(s.f_frsize).unwrap_or(4096),
                ),
                Err(errno) => reply.error(errno),
            }
        });
    }

    fn getxattr(&self, _: &Request, ino: INodeNo, name: &OsStr, size: u32, reply: ReplyXattr) {
        let inner = &self.inner;
        let value = guarded(|| {
            let node = inner.node(ino)?;
            xattrs::value(&inner.context, ino.0, &node, name).ok_or(Errno::NO_XATTR)
        });
        match value {
            Err(errno) => reply.error(errno),
            Ok(value) if size == 0 => reply.size(value.len() as u32),
            Ok(value) if value.len() > size as usize => reply.error(Errno::ERANGE),
            Ok(value) => reply.data(&value),
        }
    }

    fn listxattr(&self, _: &Request, _: INodeNo, size: u32, reply: ReplyXattr) {
        // Ours are not listed, so that copies do not carry them.
        if size == 0 { reply.size(0) } else { reply.data(&[]) }
    }

    denied_ops::refuses_writes!();
    denied_ops::leaves_to_the_kernel!();
}
