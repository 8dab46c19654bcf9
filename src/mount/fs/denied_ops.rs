//! Whatever would write is refused, also where somebody made the mount writable behind our back; and
//! what the kernel does well by itself is left to it.

/// Operations of `fuser::Filesystem`, each answered with the same error.
macro_rules! answers_with {
    ($errno:ident: $($name:ident($($argument:ty),*) -> $reply:ty;)*) => {
        $(
            #[allow(clippy::too_many_arguments)] // The protocol's.
            fn $name(&self, $(_: $argument,)* reply: $reply) {
                reply.error(fuser::Errno::$errno);
            }
        )*
    };
}

/// Those that write.
macro_rules! refuses_writes {
    () => {
        $crate::mount::fs::denied_ops::answers_with! { EROFS:
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

/// Those that the kernel then does as for any filesystem without them: seeking finds data up to the
/// end, there is nothing to bring to a disk, and the rest is refused. Said here because what fuser
/// says in our place stands in the log as a warning, as often as any reader likes.
macro_rules! leaves_to_the_kernel {
    () => {
        $crate::mount::fs::denied_ops::answers_with! { ENOSYS:
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

pub(super) use {answers_with, leaves_to_the_kernel, refuses_writes};
