//! Operations that are not offered: writes are refused, and others are left to the kernel.
//!
//! The mount is read-only anyway. Writes still arrive if root remounts it writable.

/// Methods of `fuser::Filesystem` that all reply with the same error.
macro_rules! reply_error {
    ($errno:ident: $($name:ident($($argument:ty),*) -> $reply:ty;)*) => {
        $(
            #[allow(clippy::too_many_arguments)] // The protocol's.
            fn $name(&self, $(_: $argument,)* reply: $reply) {
                reply.error(fuser::Errno::$errno);
            }
        )*
    };
}

/// The operations that write.
macro_rules! deny_writes {
    () => {
        $crate::mount::fs::denied_ops::reply_error! { EROFS:
            mknod(&Request, INodeNo, &OsStr, u32, u32, u32) -> ReplyEntry;
            mkdir(&Request, INodeNo, &OsStr, u32, u32) -> ReplyEntry;
            symlink(&Request, INodeNo, &OsStr, &std::path::Path) -> ReplyEntry;
            link(&Request, INodeNo, INodeNo, &OsStr) -> ReplyEntry;
            unlink(&Request, INodeNo, &OsStr) -> ReplyEmpty;
            rmdir(&Request, INodeNo, &OsStr) -> ReplyEmpty;
            rename(&Request, INodeNo, &OsStr, INodeNo, &OsStr, fuser::RenameFlags) -> ReplyEmpty;
            create(&Request, INodeNo, &OsStr, u32, u32, i32) -> fuser::ReplyCreate;
            setxattr(&Request, INodeNo, &OsStr, &[u8], i32, u32) -> ReplyEmpty;
            removexattr(&Request, INodeNo, &OsStr) -> ReplyEmpty;
            fallocate(&Request, INodeNo, FileHandle, u64, u64, i32) -> ReplyEmpty;
            write(
                &Request, INodeNo, FileHandle, u64, &[u8], fuser::WriteFlags, OpenFlags,
                Option<LockOwner>
            ) -> fuser::ReplyWrite;
            copy_file_range(
                &Request, INodeNo, FileHandle, u64, INodeNo, FileHandle, u64, u64,
                fuser::CopyFileRangeFlags
            ) -> fuser::ReplyWrite;
            setattr(
                &Request, INodeNo, Option<u32>, Option<u32>, Option<u32>, Option<u64>,
                Option<fuser::TimeOrNow>, Option<fuser::TimeOrNow>, Option<std::time::SystemTime>,
                Option<FileHandle>, Option<std::time::SystemTime>, Option<std::time::SystemTime>,
                Option<std::time::SystemTime>, Option<fuser::BsdFileFlags>
            ) -> ReplyAttr;
        }
    };
}

/// The operations that the kernel then does as for any filesystem without them. Seeking finds data up to the end,
/// nothing has to be synced, and the rest is refused.
///
/// fuser's own defaults do the same, but log a warning each time.
macro_rules! leave_to_kernel {
    () => {
        $crate::mount::fs::denied_ops::reply_error! { ENOSYS:
            lseek(&Request, INodeNo, FileHandle, i64, i32) -> fuser::ReplyLseek;
            flush(&Request, INodeNo, FileHandle, LockOwner) -> ReplyEmpty;
            fsync(&Request, INodeNo, FileHandle, bool) -> ReplyEmpty;
            fsyncdir(&Request, INodeNo, FileHandle, bool) -> ReplyEmpty;
            bmap(&Request, INodeNo, u32, u64) -> fuser::ReplyBmap;
            ioctl(&Request, INodeNo, FileHandle, fuser::IoctlFlags, u32, &[u8], u32)
                -> fuser::ReplyIoctl;
            poll(
                &Request, INodeNo, FileHandle, fuser::PollNotifier, fuser::PollEvents,
                fuser::PollFlags
            ) -> fuser::ReplyPoll;
        }
    };
}

pub(super) use {deny_writes, leave_to_kernel, reply_error};
