//! A filesystem of files in memory that hangs or fails on demand, as a remote server does.

use std::collections::VecDeque;
use std::ffi::OsStr;
use std::ops::Range;
use std::path::PathBuf;
use std::process::Command;
use std::sync::{Arc, Mutex};
use std::time::{Duration, SystemTime};

use fuser::{
    BackgroundSession, Errno, FileAttr, FileHandle, FileType, Generation, INodeNo, LockOwner,
    OpenFlags, ReplyAttr, ReplyData, ReplyDirectory, ReplyEntry, Request,
};

/// How the filesystem answers requests.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub enum Behavior {
    #[default]
    Works,
    /// Reads wait until it works again.
    HangsOnReads,
    /// Every request waits until it works again.
    Hangs,
    /// Reads of these bytes of any file fail with EIO.
    Fails(Range<u64>),
}

type PendingReply = Box<dyn FnOnce() + Send>;

struct State {
    files: Vec<(String, Vec<u8>)>,
    written: SystemTime,
    behavior: Mutex<(Behavior, VecDeque<PendingReply>)>,
}

/// The mounted filesystem. Dropping it answers every pending request and unmounts it.
pub struct FailingSource {
    state: Arc<State>,
    at: PathBuf,
    session: Option<BackgroundSession>,
}

impl FailingSource {
    /// Creates a directory and mounts the filesystem there.
    pub fn new(at: &str, files: Vec<(String, Vec<u8>)>) -> FailingSource {
        std::fs::create_dir(at).unwrap();
        let written = SystemTime::now() - FILE_AGE;
        let state = State { files, written, behavior: Mutex::default() };
        let state = Arc::new(state);
        let filesystem = Filesystem(Arc::clone(&state));
        let mut config = fuser::Config::default();
        config.acl = fuser::SessionACL::All;
        let session = fuser::spawn_mount(filesystem, at, &config).unwrap();
        FailingSource { state, at: at.into(), session: Some(session) }
    }

    pub fn set(&self, behavior: Behavior) {
        let mut state = self.state.behavior.lock().unwrap();
        let pending = if behavior == Behavior::Works {
            std::mem::take(&mut state.1)
        } else {
            VecDeque::new()
        };
        state.0 = behavior;
        drop(state);
        pending.into_iter().for_each(|answer| answer());
    }

    /// Requests that wait for an answer.
    pub fn pending(&self) -> usize {
        self.state.behavior.lock().unwrap().1.len()
    }
}

impl Drop for FailingSource {
    fn drop(&mut self) {
        self.set(Behavior::Works);
        let _ = Command::new("umount").arg("-l").arg(&self.at).status();
        drop(self.session.take());
    }
}

struct Filesystem(Arc<State>);

/// Age of its files: on such a filesystem, younger ones are not cached.
const FILE_AGE: Duration = Duration::from_secs(3600);

/// The kernel asks for everything again each time.
const ATTRIBUTE_TIMEOUT: Duration = Duration::ZERO;

impl Filesystem {
    fn answer(&self, is_read: bool, answer: impl FnOnce() + Send + 'static) {
        let mut state = self.0.behavior.lock().unwrap();
        let hangs = state.0 == Behavior::Hangs || is_read && state.0 == Behavior::HangsOnReads;
        if hangs {
            return state.1.push_back(Box::new(answer));
        }
        drop(state);
        answer();
    }

    fn attr(&self, number: INodeNo) -> Option<FileAttr> {
        let file = match number.0 {
            1 => None,
            n => Some(self.0.files.get(usize::try_from(n).ok()? - 2)?),
        };
        let size = file.map_or(0, |(_, bytes)| bytes.len() as u64);
        let kind = if file.is_some() { FileType::RegularFile } else { FileType::Directory };
        let perm = if file.is_some() { 0o644 } else { 0o755 };
        let time = self.0.written;
        Some(FileAttr {
            ino: number,
            size,
            blocks: size.div_ceil(512),
            atime: time,
            mtime: time,
            ctime: time,
            crtime: time,
            kind,
            perm,
            nlink: 1,
            uid: 0,
            gid: 0,
            rdev: 0,
            blksize: 4096,
            flags: 0,
        })
    }
}

impl fuser::Filesystem for Filesystem {
    fn lookup(&self, _: &Request, _: INodeNo, name: &OsStr, reply: ReplyEntry) {
        let place = self.0.files.iter().position(|(file, _)| **file == *name);
        let attr = place.and_then(|place| self.attr(INodeNo(place as u64 + 2)));
        self.answer(false, move || match attr {
            Some(attr) => reply.entry(&ATTRIBUTE_TIMEOUT, &attr, Generation(0)),
            None => reply.error(Errno::ENOENT),
        });
    }

    fn getattr(&self, _: &Request, number: INodeNo, _: Option<FileHandle>, reply: ReplyAttr) {
        let attr = self.attr(number);
        self.answer(false, move || match attr {
            Some(attr) => reply.attr(&ATTRIBUTE_TIMEOUT, &attr),
            None => reply.error(Errno::ENOENT),
        });
    }

    fn readdir(
        &self,
        _: &Request,
        _: INodeNo,
        _: FileHandle,
        offset: u64,
        mut reply: ReplyDirectory,
    ) {
        let state = Arc::clone(&self.0);
        self.answer(false, move || {
            for (n, (name, _)) in (0_u64..).zip(&state.files).skip(offset as usize) {
                if reply.add(INodeNo(n + 2), n + 1, FileType::RegularFile, name) {
                    break;
                }
            }
            reply.ok();
        });
    }

    fn read(
        &self,
        _: &Request,
        number: INodeNo,
        _: FileHandle,
        offset: u64,
        size: u32,
        _: OpenFlags,
        _: Option<LockOwner>,
        reply: ReplyData,
    ) {
        let wanted = offset..offset + u64::from(size);
        if let Behavior::Fails(bad) = &self.0.behavior.lock().unwrap().0
            && bad.start < wanted.end
            && wanted.start < bad.end
        {
            return reply.error(Errno::EIO);
        }
        let state = Arc::clone(&self.0);
        self.answer(true, move || {
            let bytes = &state.files[number.0 as usize - 2].1;
            let end = bytes.len().min(wanted.end as usize);
            reply.data(&bytes[end.min(wanted.start as usize)..end]);
        });
    }
}
