//! Mounts a file of the size of another one, whose bytes are constant: what FUSE itself takes, and no daemon can beat.
//!
//!     constant-mount FILE.safetensors MOUNTPOINT
//!
//! Shows `model.safetensors` with the header of the file. Each read is answered from the same few bytes of memory. The
//! kernel is told the same as by ckptfs. Prints `ready` when the mount answers, and ends when it is unmounted. Needs root.

use std::ffi::OsStr;
use std::fs::File;
use std::os::unix::fs::{FileExt, MetadataExt};
use std::time::{Duration, SystemTime};
use std::{env, fs, io};

use fuser::{
    Config, Errno, FileAttr, FileHandle, FileType, Filesystem, FopenFlags, Generation, INodeNo,
    InitFlags, KernelConfig, LockOwner, MountOption, OpenFlags, ReplyAttr, ReplyData, ReplyEntry,
    ReplyOpen, Request, Session,
};

const NAME: &str = "model.safetensors";
const ROOT: u64 = 1;
const CACHE_TIMEOUT: Duration = Duration::from_secs(3600);

/// More than the kernel requests at once.
const MAX_REQUEST_BYTES: usize = 16 << 20;

/// As many threads, and as much readahead of the kernel, as a mount of ckptfs has.
const THREADS: usize = 2;
const READAHEAD_KIB: u64 = 4096;

struct ConstantFile {
    file: File,
    size: u64,
    header_end: u64,
    bytes: Vec<u8>,
}

impl ConstantFile {
    fn attr(&self, number: u64) -> FileAttr {
        let is_root = number == ROOT;
        let time = SystemTime::UNIX_EPOCH;
        FileAttr {
            ino: INodeNo(number),
            size: if is_root { 0 } else { self.size },
            blocks: self.size / 512,
            atime: time,
            mtime: time,
            ctime: time,
            crtime: time,
            kind: if is_root { FileType::Directory } else { FileType::RegularFile },
            perm: if is_root { 0o555 } else { 0o444 },
            nlink: 1,
            uid: 0,
            gid: 0,
            rdev: 0,
            blksize: 4096,
            flags: 0,
        }
    }
}

impl Filesystem for ConstantFile {
    fn init(&mut self, _: &Request, config: &mut KernelConfig) -> io::Result<()> {
        // A kernel that lacks one of these has the others.
        let _ = config.add_capabilities(InitFlags::FUSE_ASYNC_DIO);
        let _ = config.add_capabilities(InitFlags::FUSE_AUTO_INVAL_DATA);
        let _ = config.set_max_background(u16::MAX);
        Ok(())
    }

    fn lookup(&self, _: &Request, _: INodeNo, name: &OsStr, reply: ReplyEntry) {
        match name == NAME {
            true => reply.entry(&CACHE_TIMEOUT, &self.attr(ROOT + 1), Generation(0)),
            false => reply.error(Errno::ENOENT),
        }
    }

    fn getattr(&self, _: &Request, number: INodeNo, _: Option<FileHandle>, reply: ReplyAttr) {
        reply.attr(&CACHE_TIMEOUT, &self.attr(number.0));
    }

    fn open(&self, _: &Request, _: INodeNo, _: OpenFlags, reply: ReplyOpen) {
        reply.opened(FileHandle(0), FopenFlags::FOPEN_KEEP_CACHE | FopenFlags::FOPEN_NOFLUSH);
    }

    fn read(
        &self,
        _: &Request,
        _: INodeNo,
        _: FileHandle,
        offset: u64,
        size: u32,
        _: OpenFlags,
        _: Option<LockOwner>,
        reply: ReplyData,
    ) {
        let end = offset.saturating_add(size.into()).min(self.size);
        let len = end.saturating_sub(offset) as usize;
        if offset >= self.header_end {
            return reply.data(&self.bytes[..len]);
        }
        let mut bytes = vec![0; len];
        let in_header = (self.header_end - offset).min(len as u64) as usize;
        match self.file.read_exact_at(&mut bytes[..in_header], offset) {
            Ok(()) => reply.data(&bytes),
            Err(_) => reply.error(Errno::EIO),
        }
    }
}

fn main() -> io::Result<()> {
    let arguments: Vec<_> = env::args_os().skip(1).collect();
    let [file, mountpoint] = arguments.as_slice() else {
        return Err(io::Error::other("usage: constant-mount FILE.safetensors MOUNTPOINT"));
    };
    let file = File::open(file)?;
    let mut header_len = [0; 8];
    file.read_exact_at(&mut header_len, 0)?;
    let size = file.metadata()?.size();
    let header_end = u64::from_le_bytes(header_len).saturating_add(8);
    let filesystem = ConstantFile { file, size, header_end, bytes: vec![7; MAX_REQUEST_BYTES] };
    let mut config = Config::default();
    config.mount_options = vec![MountOption::RO, MountOption::FSName("constant-mount".into())];
    config.n_threads = Some(THREADS);
    let session = Session::new(filesystem, mountpoint, &config)?.spawn()?;
    let device = fs::metadata(mountpoint)?.dev();
    let (major, minor) = (device >> 8 & 0xfff, device & 0xff | device >> 12 & 0xfff00);
    fs::write(format!("/sys/class/bdi/{major}:{minor}/read_ahead_kb"), READAHEAD_KIB.to_string())?;
    println!("ready");
    session.join()
}
