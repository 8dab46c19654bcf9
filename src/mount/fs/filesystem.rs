//! The requests of the kernel, each with exactly one reply.

use std::ffi::OsStr;
use std::io;
use std::os::unix::ffi::OsStrExt;
use std::sync::Arc;

use fuser::{
    Errno, FileHandle, FopenFlags, INodeNo, InitFlags, KernelConfig, LockOwner, OpenAccMode,
    OpenFlags, ReplyAttr, ReplyData, ReplyDirectory, ReplyDirectoryPlus, ReplyEmpty, ReplyEntry,
    ReplyOpen, ReplyStatfs, ReplyXattr, Request,
};

use super::attr::GENERATION;
use super::blocking_pool::BlockingPool;
use super::handles::{OpenReply, ReadRange};
use super::inodes::ROOT;
use super::outcomes::{ReadReply, RequestFailure, log_panic, panic_if_asked};
use super::readdir;
use super::state::FilesystemState;
use super::{denied_ops, xattrs};

/// Requests for readahead and direct reads that the kernel may have in flight: as many as the protocol can say.
///
/// The kernel counts the requests of all files together and sends no more at the limit. With a small one, a source
/// that hangs would block every reader.
const MAX_BACKGROUND_REQUESTS: u16 = u16::MAX;

/// Stacked filesystems, the source's among them: as many as the kernel allows. A source on an overlay, as in
/// containers, can then be passed through.
const MAX_STACK_DEPTH: u32 = 2;

/// Why a file cannot be opened for writing. The kernel itself refuses that, unless root remounts the mount writable.
const READ_ONLY: &str = "it was opened for writing, and a mount is read-only";
const READ_ONLY_REMEDY: &str = "write to the file in the mounted directory itself";

/// The filesystem of one mount, as fuser calls it.
pub struct FuseFilesystem {
    state: Arc<FilesystemState>,
    pool: BlockingPool,
}

impl FuseFilesystem {
    pub fn new(state: Arc<FilesystemState>, pool: BlockingPool) -> FuseFilesystem {
        FuseFilesystem { state, pool }
    }

    /// Replies to a request about an inode on a thread that may wait for its source.
    fn run_blocking(
        &self,
        number: INodeNo,
        request: impl FnOnce(&FilesystemState) + Send + 'static,
    ) {
        let state = Arc::clone(&self.state);
        let device = state.inodes.get(number.0).map_or(0, |inode| inode.attributes.dev);
        self.pool.run(device, move || request(&state));
    }
}

impl fuser::Filesystem for FuseFilesystem {
    /// Ends the session. This waits a moment for access traces to be written: files may be open to the last.
    fn destroy(&mut self) {
        self.state.handles.finish();
    }

    fn init(&mut self, _: &Request, config: &mut KernelConfig) -> io::Result<()> {
        // Each by itself: a kernel that lacks one may have the others.
        for capability in [
            InitFlags::FUSE_PARALLEL_DIROPS,
            InitFlags::FUSE_DO_READDIRPLUS,
            InitFlags::FUSE_READDIRPLUS_AUTO,
            InitFlags::FUSE_AUTO_INVAL_DATA,
            InitFlags::FUSE_ASYNC_DIO,
        ] {
            if config.add_capabilities(capability).is_err() {
                tracing::debug!(?capability, "the kernel lacks this");
            }
        }
        let passthrough = self.state.handles.is_passthrough_enabled()
            && config.add_capabilities(InitFlags::FUSE_PASSTHROUGH).is_ok()
            && config.set_max_stack_depth(MAX_STACK_DEPTH).is_ok();
        self.state.handles.set_passthrough(passthrough);
        if let Err(nearest) = config.set_max_background(MAX_BACKGROUND_REQUESTS) {
            tracing::debug!(nearest, "the kernel limits requests in flight");
        }
        Ok(())
    }

    fn lookup(&self, request: &Request, parent: INodeNo, name: &OsStr, reply: ReplyEntry) {
        let (thread, name) = (request.pid(), name.to_owned());
        self.run_blocking(parent, move |state| {
            let found =
                state.outcomes.catch_panic(parent.0, || state.look_up(thread, parent, &name));
            match found {
                Ok(attr) => reply.entry(&state.kernel_cache_timeout(attr.ino), &attr, GENERATION),
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
        self.run_blocking(number, move |state| {
            match state.outcomes.catch_panic(number.0, || state.current_attr(number)) {
                Ok(attr) => reply.attr(&state.kernel_cache_timeout(number), &attr),
                Err(errno) => reply.error(errno),
            }
        });
    }

    fn readlink(&self, _: &Request, number: INodeNo, reply: ReplyData) {
        match self.state.outcomes.catch_panic(number.0, || self.state.link_target(number)) {
            Ok(target) => reply.data(target.as_os_str().as_bytes()),
            Err(errno) => reply.error(errno),
        }
    }

    fn open(&self, request: &Request, number: INodeNo, flags: OpenFlags, reply: ReplyOpen) {
        if flags.acc_mode() != OpenAccMode::O_RDONLY {
            let failure = RequestFailure::new(Errno::EROFS, READ_ONLY, READ_ONLY_REMEDY);
            return reply.error(self.state.outcomes.record(number.0, &failure));
        }
        let thread = request.pid();
        self.run_blocking(number, move |state| {
            let opened =
                state.outcomes.catch_panic(number.0, || state.open(thread, number, &reply));
            match opened {
                Ok(OpenReply { handle, flags, backing: Some(backing) }) => {
                    reply.opened_passthrough(FileHandle(handle), flags, &backing);
                }
                Ok(OpenReply { handle, flags, backing: None }) => {
                    reply.opened(FileHandle(handle), flags);
                }
                Err(errno) => reply.error(errno),
            }
        });
    }

    fn read(
        &self,
        _: &Request,
        number: INodeNo,
        handle: FileHandle,
        offset: u64,
        size: u32,
        _: OpenFlags,
        _: Option<LockOwner>,
        reply: ReplyData,
    ) {
        let outcomes = &self.state.outcomes;
        let reply = ReadReply::new(reply, number.0, Arc::clone(outcomes));
        let range = ReadRange { offset, size };
        // A panic drops the reply, which answers EIO and records that.
        let _ = log_panic(|| {
            panic_if_asked();
            self.state.handles.read(handle.0, range, reply);
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
        // The kernel does not wait for this reply, and closing the sources may take time.
        reply.ok();
        self.run_blocking(number, move |state| state.handles.close(handle.0));
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
        self.run_blocking(number, move |state| {
            let list = || readdir::reply_names(state, number, handle, offset, &mut reply);
            match state.outcomes.catch_panic(number.0, list) {
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
        self.run_blocking(number, move |state| {
            let list = || readdir::reply_names(state, number, handle, offset, &mut reply);
            match state.outcomes.catch_panic(number.0, list) {
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
        self.run_blocking(INodeNo(ROOT), move |state| {
            match state.outcomes.catch_panic(ROOT, || state.filesystem_stats()) {
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

    fn getxattr(&self, _: &Request, number: INodeNo, name: &OsStr, size: u32, reply: ReplyXattr) {
        let state = &self.state;
        let value = state.outcomes.catch_panic(number.0, || {
            let inode = state.inode(number)?;
            xattrs::value(state, number.0, &inode, name).ok_or(Errno::NO_XATTR)
        });
        match value {
            Err(errno) => reply.error(errno),
            Ok(value) if size == 0 => reply.size(value.len() as u32),
            Ok(value) if value.len() > size as usize => reply.error(Errno::ERANGE),
            Ok(value) => reply.data(&value),
        }
    }

    fn listxattr(&self, _: &Request, _: INodeNo, size: u32, reply: ReplyXattr) {
        // Unlisted, the attributes are not copied with the file.
        if size == 0 { reply.size(0) } else { reply.data(&[]) }
    }

    denied_ops::deny_writes!();
    denied_ops::leave_to_kernel!();
}
