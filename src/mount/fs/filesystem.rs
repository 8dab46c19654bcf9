//! The answers to the kernel.
//!
//! In: requests, on the few threads of the session. Out: exactly one reply to each. What may wait for
//! the source's filesystem is asked on other threads ([`Askers`]), and virtual files are read by the cache on
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

use crate::mount::MountContext;
use crate::mount::error::MountError;
use crate::source::{FileKind, FileMetadata};
use crate::view::{SortedNames, View, ViewEntry};

use super::attr::{OwnerOverride, file_attr, is_stale, last_file_attr, open_errno, view_errno};
use super::blocking_pool::{BlockingPool, catch_panic};
use super::handles::{HandleTable, OpenedHandle};
use super::inodes::{Inode, InodeKind, InodeTable, LastAttributes, ROOT};
use super::readdir::{self, DirSink, Listings};
use super::reply::{ReadRange, ReadReply};
use super::retries::{Retries, RetryFile};
use super::{denied_ops, xattrs};

/// How long the kernel may believe what it was told: a change must show within a second.
pub const KERNEL_CACHE_TIMEOUT: Duration = Duration::from_millis(500);

/// Requests that the kernel may have under way at once for reading ahead and direct reads: as many as
/// the protocol can say. The kernel counts those of all files together and asks nothing more at that
/// number, so that a source that hangs would hold up everybody else with so many readers of its own.
const MAX_BACKGROUND_REQUESTS: u16 = u16::MAX;

/// Filesystems that may lie on one another, the source's among them: as many as the kernel allows, so
/// that a source on an overlay, as in containers, can be passed through.
const MAX_STACK_DEPTH: u32 = 2;

/// Lookups of a name that is renamed over meanwhile, until one can be opened.
const MAX_LOOKUP_TRIES: usize = 8;

/// Numbers are not used again for another thing while the kernel knows them.
pub const GENERATION: Generation = Generation(0);

/// The filesystem of one mount.
pub struct FuseFilesystem {
    state: Arc<FilesystemState>,
    pool: BlockingPool,
}

/// What every answer is made from.
pub struct FilesystemState {
    pub view: Arc<View>,
    pub inodes: InodeTable,
    pub handles: Arc<HandleTable>,
    retries: Retries,
    pub listings: Listings,
    pub context: Arc<MountContext>,
    owner_override: OwnerOverride,
}

impl FuseFilesystem {
    pub fn new(
        context: Arc<MountContext>,
        opened: Arc<HandleTable>,
        owner: OwnerOverride,
        listings: Listings,
    ) -> Result<Self, MountError> {
        let view = Arc::clone(&context.view);
        let root = view.metadata("".as_ref())?;
        let askers = BlockingPool::new()
            .map_err(|e| MountError::io(&context.source, "start a thread for it", e))?;
        let retries = Retries::new(Arc::clone(&opened));
        let nodes = InodeTable::new(&root);
        let inner = FilesystemState {
            view,
            inodes: nodes,
            handles: opened,
            retries,
            listings,
            context,
            owner_override: owner,
        };
        Ok(FuseFilesystem { state: Arc::new(inner), pool: askers })
    }

    /// Answers on another thread what is asked of a file or directory.
    fn run_blocking(
        &self,
        number: INodeNo,
        answer: impl FnOnce(&FilesystemState) + Send + 'static,
    ) {
        let inner = Arc::clone(&self.state);
        let device = inner.inodes.get(number.0).map_or(0, |node| node.attributes.dev);
        self.pool.run(device, move || answer(&inner));
    }
}

impl FilesystemState {
    fn inode(&self, number: INodeNo) -> Result<Arc<Inode>, Errno> {
        // A number that the kernel was never told, or forgot.
        self.inodes.get(number.0).ok_or(Errno::ESTALE)
    }

    pub fn attr(&self, number: u64, attributes: &FileMetadata) -> fuser::FileAttr {
        file_attr(number, attributes, self.owner_override)
    }

    pub fn last_attr(&self, number: u64, node: &Inode) -> fuser::FileAttr {
        last_file_attr(number, &node.attributes, self.owner_override)
    }

    fn look_up(
        &self,
        thread: u32,
        parent: INodeNo,
        name: &OsStr,
    ) -> Result<fuser::FileAttr, Errno> {
        let directory = self.inode(parent)?.path.to_path();
        if self.retries.is_expected(thread, &directory, name)
            && let Some(attr) = self.look_up_and_open(thread, parent, &directory, name)
        {
            return Ok(attr);
        }
        let entry = self.view.lookup(&directory, name).map_err(|e| self.record_error(&e))?;
        let entry = entry.ok_or_else(|| self.not_found())?;
        let path = self.inodes.child_path(parent.0, &directory, name);
        let number = self.inodes.add_lookup(Inode::new(path, &entry));
        Ok(self.attr(number, entry.metadata()))
    }

    /// Looks a name up and opens it for a thread that is about to do so; `None` if that fails.
    fn look_up_and_open(
        &self,
        thread: u32,
        parent: INodeNo,
        directory: &Path,
        name: &OsStr,
    ) -> Option<fuser::FileAttr> {
        if let Some((node, attr)) = self.retries.provided_file(thread) {
            self.inodes.add_lookup(node);
            return Some(attr);
        }
        let place = directory.join(name);
        for _ in 0..MAX_LOOKUP_TRIES {
            // During renames, a listing can lack a name that exists.
            let Some(entry) = self.view.lookup(directory, name).ok()? else { continue };
            if entry.metadata().kind != FileKind::File {
                self.retries.end(thread);
                return None;
            }
            let node = Inode::new(self.inodes.child_path(parent.0, directory, name), &entry);
            match self.handles.prepare_open(self.inodes.number_for(&node), &node) {
                Ok(ready) => {
                    let attr = self.attr(self.inodes.add_lookup(node.clone()), entry.metadata());
                    self.retries.provide(thread, place, RetryFile { node, attr, prepared: ready });
                    return Some(attr);
                }
                Err(error) if is_stale(&error) => self.view.invalidate(&place),
                Err(_) => return None,
            }
        }
        None
    }

    fn current_attr(&self, number: INodeNo) -> Result<fuser::FileAttr, Errno> {
        let node = self.inode(number)?;
        let now = match &node.kind {
            // What has another state by now is another file; this one stays what it was.
            InodeKind::VirtualFile(shown) => match self.entry_at(&node) {
                Some(ViewEntry::VirtualFile(now) | ViewEntry::Index(now))
                    if now.identity() == shown.identity() =>
                {
                    Some(*now.metadata())
                }
                _ => None,
            },
            InodeKind::Source => match self.view.metadata(&node.path.to_path()) {
                Ok(now) if node.attributes.is_same_file(&LastAttributes::from(&now)) => Some(now),
                _ => None,
            },
            InodeKind::Link(_) => None,
        };
        let Some(now) = now else { return Ok(self.last_attr(number.0, &node)) };
        self.inodes
            .update(number.0, Inode { attributes: LastAttributes::from(&now), ..(*node).clone() });
        Ok(self.attr(number.0, &now))
    }

    fn entry_at(&self, node: &Inode) -> Option<ViewEntry> {
        let (directory, name) = node.path.parts()?;
        self.view.lookup(directory, name).ok()?
    }

    fn link_target(&self, number: INodeNo) -> Result<PathBuf, Errno> {
        match &self.inode(number)?.kind {
            InodeKind::Link(Some(target)) => Ok((**target).clone()),
            InodeKind::Link(None) => Err(Errno::EACCES),
            _ => Err(Errno::EINVAL),
        }
    }

    /// Replies with the names of a directory from an offset on.
    fn reply_listing(
        &self,
        number: INodeNo,
        handle: FileHandle,
        offset: u64,
        reply: &mut impl DirSink,
    ) -> Result<(), Errno> {
        let own = self.inode(number)?;
        readdir::reply_names(self, (number.0, handle.0), &own, offset, reply)
    }

    /// The names of a directory as they are now.
    pub fn names(&self, number: u64, directory: &Path) -> Result<SortedNames, Errno> {
        let names = self.view.names(directory).map_err(|e| self.record_error(&e))?;
        if number == ROOT && names.is_empty() {
            self.not_found();
        }
        Ok(names)
    }

    pub fn record_error(&self, error: &crate::view::ViewError) -> Errno {
        let errno = view_errno(error);
        if i32::from(errno) == i32::from(Errno::ENOENT) {
            return self.not_found();
        }
        self.log_failure(error);
        errno
    }

    /// There is nothing of a name, perhaps because there is nothing of anything any more.
    fn not_found(&self) -> Errno {
        // For its word in the log.
        self.context.source_watch.is_removed();
        Errno::ENOENT
    }

    fn log_failure(&self, error: &crate::view::ViewError) {
        self.context.counters.count_error();
        if self.context.log_throttle.should_log(error.path()) {
            tracing::warn!("{error}");
        }
    }
}

impl fuser::Filesystem for FuseFilesystem {
    /// The session's end, which waits a moment for what loads leave: files may be open in it to the last.
    fn destroy(&mut self) {
        self.state.handles.finish();
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
        let passthrough = self.state.handles.is_passthrough_enabled()
            && config.add_capabilities(InitFlags::FUSE_PASSTHROUGH).is_ok()
            && config.set_max_stack_depth(MAX_STACK_DEPTH).is_ok();
        self.state.handles.set_passthrough(passthrough);
        if let Err(nearest) = config.set_max_background(MAX_BACKGROUND_REQUESTS) {
            tracing::debug!(nearest, "requests under way are limited");
        }
        Ok(())
    }

    fn lookup(&self, request: &Request, parent: INodeNo, name: &OsStr, reply: ReplyEntry) {
        let (thread, name) = (request.pid(), name.to_owned());
        self.run_blocking(parent, move |inner| {
            match catch_panic(|| inner.look_up(thread, parent, &name)) {
                Ok(attr) => reply.entry(&KERNEL_CACHE_TIMEOUT, &attr, GENERATION),
                Err(errno) => reply.error(errno),
            }
        });
    }

    fn forget(&self, _: &Request, number: INodeNo, times: u64) {
        if self.state.inodes.forget(number.0, times) {
            self.state.handles.forget(number.0);
        }
    }

    fn getattr(&self, _: &Request, number: INodeNo, _: Option<FileHandle>, reply: ReplyAttr) {
        self.run_blocking(number, move |inner| match catch_panic(|| inner.current_attr(number)) {
            Ok(attr) => reply.attr(&KERNEL_CACHE_TIMEOUT, &attr),
            Err(errno) => reply.error(errno),
        });
    }

    fn readlink(&self, _: &Request, number: INodeNo, reply: ReplyData) {
        match catch_panic(|| self.state.link_target(number)) {
            Ok(target) => reply.data(target.as_os_str().as_bytes()),
            Err(errno) => reply.error(errno),
        }
    }

    fn open(&self, request: &Request, number: INodeNo, flags: OpenFlags, reply: ReplyOpen) {
        if flags.acc_mode() != OpenAccMode::O_RDONLY {
            return reply.error(Errno::EROFS);
        }
        let thread = request.pid();
        self.run_blocking(number, move |inner| {
            let open = || {
                let node = inner.inode(number)?;
                let (is_second, ready) = inner.retries.take(thread, number.0);
                let ready = ready.map_or_else(|| inner.handles.prepare_open(number.0, &node), Ok);
                let opened =
                    ready.and_then(|ready| inner.handles.open(number.0, &node, ready, &reply));
                opened.map_err(|e| {
                    // The kernel looks the name up once more, and must be told what is there now.
                    let path = node.path.to_path();
                    inner.view.invalidate(&path);
                    if is_stale(&e) && !is_second {
                        inner.retries.record_first_try(thread, path);
                    }
                    inner.log_failure(&e);
                    open_errno(&e)
                })
            };
            match catch_panic(open) {
                Ok(OpenedHandle { handle, flags, backing: Some(backing) }) => {
                    reply.opened_passthrough(FileHandle(handle), flags, &backing);
                }
                Ok(OpenedHandle { handle, flags, backing: None }) => {
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
        let counters = Arc::clone(&self.state.context.counters);
        let answer = ReadReply { reply, counters, pool: self.pool.handle() };
        let range = ReadRange { offset, size };
        // An answer that is dropped by a panic tells the kernel EIO.
        let _ = catch_panic(|| {
            self.state.handles.read(handle.0, range, answer);
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
        self.run_blocking(number, move |inner| inner.handles.close(handle.0));
    }

    fn opendir(&self, _: &Request, _: INodeNo, _: OpenFlags, reply: ReplyOpen) {
        reply.opened(FileHandle(self.state.listings.open()), FopenFlags::empty());
    }

    fn readdir(
        &self,
        _: &Request,
        number: INodeNo,
        handle: FileHandle,
        offset: u64,
        mut reply: ReplyDirectory,
    ) {
        self.run_blocking(number, move |inner| {
            match catch_panic(|| inner.reply_listing(number, handle, offset, &mut reply)) {
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
        self.run_blocking(number, move |inner| {
            match catch_panic(|| inner.reply_listing(number, handle, offset, &mut reply)) {
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
        self.state.listings.close(handle.0);
        reply.ok();
    }

    fn statfs(&self, _: &Request, _: INodeNo, reply: ReplyStatfs) {
        self.run_blocking(INodeNo(ROOT), move |inner| {
            match catch_panic(|| inner.view.root().filesystem_stats().map_err(|_| Errno::EIO)) {
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
        let inner = &self.state;
        let value = catch_panic(|| {
            let node = inner.inode(ino)?;
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
