//! Mounts a file like another one, with bytes that lie in memory: what FUSE itself takes, and no daemon can beat.
//!
//!     constant-mount FILE.safetensors MOUNTPOINT [SHARD.safetensors...]
//!
//! Shows `model.safetensors` with the header of the file. Each read is answered from the same few bytes of memory, or with
//! what the shards hold there, from a mapping of them. The kernel is told the same as by ckptfs.
//!
//! Prints `ready` when the mount answers, and `begun` when a part of the file was read. Ends when it is unmounted. Needs root.

use std::ffi::OsStr;
use std::fs::File;
use std::ops::Range;
use std::os::unix::fs::{FileExt, MetadataExt};
use std::path::Path;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, SystemTime};
use std::{env, fs, io};

use fuser::{
    Config, Errno, FileAttr, FileHandle, FileType, Filesystem, FopenFlags, Generation, INodeNo,
    InitFlags, KernelConfig, LockOwner, MountOption, OpenFlags, ReplyAttr, ReplyData, ReplyEntry,
    ReplyOpen, Request, Session,
};
use memmap2::{Mmap, MmapOptions};

const NAME: &str = "model.safetensors";
const ROOT: u64 = 1;
const CACHE_TIMEOUT: Duration = Duration::from_secs(3600);

/// More than the kernel requests at once.
const MAX_REQUEST_BYTES: usize = 16 << 20;

/// As many threads, and as much readahead of the kernel, as a mount of ckptfs has.
const THREADS: usize = 2;
const READAHEAD_KIB: u64 = 4096;

/// A load has begun once this part of the file, as its divisor, was read. A daemon that does not guess has fetched no more
/// until then.
const BEGUN_DIVISOR: u64 = 20;

struct ConstantFile {
    file: File,
    size: u64,
    header_end: u64,
    bytes: Bytes,
    read_bytes: AtomicU64,
}

enum Bytes {
    Constant(Vec<u8>),
    Shards(Vec<Shard>),
}

/// A range of the file, and the shard that holds it.
struct Shard {
    range: Range<u64>,
    map: Mmap,
    data_start: usize,
}

impl Bytes {
    /// The data of these shards, one after the other from here on.
    fn of_shards(paths: &[impl AsRef<Path>], mut start: u64) -> io::Result<Bytes> {
        let mut shards = Vec::new();
        for path in paths {
            let file = File::open(path)?;
            let data_start = header_end(&file)?;
            // SAFETY: nothing writes to the models of a benchmark.
            let map = unsafe { MmapOptions::new().populate().map(&file)? };
            let range = start..start + (map.len() as u64).saturating_sub(data_start);
            start = range.end;
            shards.push(Shard { range, map, data_start: data_start as usize });
        }
        Ok(Bytes::Shards(shards))
    }

    fn reply(&self, range: Range<u64>, reply: ReplyData) {
        let parts = self.parts(&range);
        match &parts[..] {
            [part] => reply.data(part),
            parts => reply.data(&parts.concat()),
        }
    }

    /// The bytes of a range, as they lie in memory.
    fn parts(&self, range: &Range<u64>) -> Vec<&[u8]> {
        match self {
            Bytes::Constant(bytes) => vec![&bytes[..(range.end - range.start) as usize]],
            Bytes::Shards(shards) => shards.iter().filter_map(|shard| shard.bytes(range)).collect(),
        }
    }
}

impl Shard {
    /// What it holds of a range of the file.
    fn bytes(&self, range: &Range<u64>) -> Option<&[u8]> {
        let (start, end) = (range.start.max(self.range.start), range.end.min(self.range.end));
        let at = |offset: u64| (offset - self.range.start) as usize + self.data_start;
        (start < end).then(|| &self.map[at(start)..at(end)])
    }
}

fn header_end(file: &File) -> io::Result<u64> {
    let mut header_len = [0; 8];
    file.read_exact_at(&mut header_len, 0)?;
    Ok(u64::from_le_bytes(header_len).saturating_add(8))
}

impl ConstantFile {
    /// Counts what is read, and tells once that the file is being loaded.
    fn count(&self, bytes: u64) {
        let before = self.read_bytes.fetch_add(bytes, Ordering::Relaxed);
        let begun = self.size / BEGUN_DIVISOR;
        if before < begun && before + bytes >= begun {
            println!("begun");
        }
    }

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
        let end = offset.saturating_add(size.into()).min(self.size).max(offset);
        self.count(end - offset);
        if offset >= self.header_end {
            return self.bytes.reply(offset..end, reply);
        }
        let mut bytes = vec![0; (end.min(self.header_end) - offset) as usize];
        match self.file.read_exact_at(&mut bytes, offset) {
            Ok(()) => {
                let data = self.bytes.parts(&(self.header_end..end.max(self.header_end)));
                reply.data(&[&bytes[..], &data.concat()].concat());
            }
            Err(_) => reply.error(Errno::EIO),
        }
    }
}

fn main() -> io::Result<()> {
    let arguments: Vec<_> = env::args_os().skip(1).collect();
    let [file, mountpoint, shards @ ..] = arguments.as_slice() else {
        return Err(io::Error::other(
            "usage: constant-mount FILE.safetensors MOUNTPOINT [SHARD...]",
        ));
    };
    let file = File::open(file)?;
    let size = file.metadata()?.size();
    let header_end = header_end(&file)?;
    let bytes = match shards {
        [] => Bytes::Constant(vec![7; MAX_REQUEST_BYTES]),
        shards => Bytes::of_shards(shards, header_end)?,
    };
    let filesystem =
        ConstantFile { file, size, header_end, bytes, read_bytes: AtomicU64::default() };
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
