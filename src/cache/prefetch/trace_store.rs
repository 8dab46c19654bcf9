//! The orders of loads in a folder of the user's, one file for each layout of a virtual file.
//!
//! In: the orders of open virtual files, to be followed as the file of their layout says, and to be written to it
//! when the virtual file is closed. Out: nothing that anybody waits for, and no error: whatever fails, loads are as
//! they were without. It all happens on threads of its own, which may wait.
//!
//! Two models of one architecture have the same layout, and are loaded in the same order. What is found in
//! the folder is believed only if nobody else can have written it; whoever wants may remove it at any time.

use std::fs::File;
use std::io::{self, Read, Write};
use std::os::fd::{AsFd, OwnedFd};
use std::path::{Path, PathBuf};
use std::sync::{Arc, Condvar, Mutex, PoisonError, Weak};
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use rustix::fs::{
    AtFlags, Dir, FileType, Mode, OFlags, Stat, Timespec, Timestamps, UTIME_NOW, fstat, mkdirat,
    openat, renameat, statat, unlinkat, utimensat,
};

use rustix::io::Errno;

use crate::threads::lock;
use crate::virtual_file::Digest;

use crate::cache::io::executor::IoExecutor;
use crate::cache::prefetch::trace::AccessTrace;
use crate::cache::prefetch::trace_format::{MAX_TRACE_BYTES, decode_trace, encode_trace};

/// Files that are kept, and bytes in all; the oldest goes first. A user loads from a few dozen models, and
/// the order of one of 10 GB takes a few kB.
const MAX_FILES: usize = 256;
const MAX_TOTAL_BYTES: u64 = 4 << 20;

/// How long the end of a mount waits for what is being written.
const FLUSH_TIMEOUT: Duration = Duration::from_millis(500);

/// Where orders are kept, and those of the virtual files that are open.
pub struct TraceStore {
    folder: PathBuf,
    executor: Arc<IoExecutor>,
    open: Mutex<Vec<Weak<TraceHandle>>>,
    pending_writes: Mutex<usize>,
    write_done: Condvar,
}

/// The order of one open virtual file. It is written when this is dropped.
pub struct TraceHandle {
    pub trace: Arc<Mutex<AccessTrace>>,
    layout: Digest,
    store: Arc<TraceStore>,
}

impl TraceStore {
    pub fn new(folder: PathBuf) -> Arc<TraceStore> {
        let (open, writing, written) = Default::default();
        Arc::new(TraceStore {
            folder,
            executor: IoExecutor::new(true),
            open,
            pending_writes: writing,
            write_done: written,
        })
    }

    /// Takes note of an order, and has it follow what is remembered of its layout as soon as that is read.
    pub fn open(self: &Arc<Self>, layout: Digest, order: AccessTrace) -> Arc<TraceHandle> {
        let order = Arc::new(Mutex::new(order));
        let (orders, weak) = (Arc::clone(self), Arc::downgrade(&order));
        self.executor.submit_prefetch(Box::new(move || {
            let Some(order) = weak.upgrade() else { return };
            let stretches = lock(&order).chunks();
            let read = open_folder(&orders.folder)
                .and_then(|folder| read_trace(&folder, &layout.to_string()));
            match read.map(|bytes| decode_trace(&bytes, stretches)) {
                Ok(Some(remembered)) => lock(&order).follow(remembered),
                Ok(None) => tracing::debug!(%layout, "what is remembered of a load is damaged"),
                Err(error) => tracing::debug!(%layout, %error, "no load is remembered"),
            }
        }));
        let kept = Arc::new(TraceHandle { trace: order, layout, store: Arc::clone(self) });
        let mut open = lock(&self.open);
        open.retain(|kept| kept.strong_count() > 0);
        open.push(Arc::downgrade(&kept));
        kept
    }

    /// Writes the orders of all virtual files that are still open, and waits a moment for all that is being written.
    pub fn flush(self: &Arc<Self>) {
        let open = std::mem::take(&mut *lock(&self.open));
        open.iter().filter_map(Weak::upgrade).for_each(|kept| self.write(kept.layout, &kept.trace));
        let writing = lock(&self.pending_writes);
        let waited =
            self.write_done.wait_timeout_while(writing, FLUSH_TIMEOUT, |writing| *writing > 0);
        drop(waited.unwrap_or_else(PoisonError::into_inner));
    }

    fn write(self: &Arc<Self>, layout: Digest, order: &Arc<Mutex<AccessTrace>>) {
        let bytes = {
            let order = lock(order);
            order.completed_load().map(|load| encode_trace(order.chunks(), load))
        };
        let Some(bytes) = bytes else { return };
        let writing = PendingWrite::begin(self);
        // Of those that wait for a folder that hangs the oldest are dropped.
        self.executor.submit_prefetch(Box::new(move || {
            if let Err(error) = write_trace(&writing.0.folder, &layout.to_string(), &bytes) {
                tracing::debug!(%layout, %error, "a load is not remembered");
            }
        }));
    }
}

impl Drop for TraceStore {
    fn drop(&mut self) {
        // Nothing waits in it: that would hold this.
        self.executor.stop();
    }
}

impl Drop for TraceHandle {
    fn drop(&mut self) {
        self.store.write(self.layout, &self.trace);
    }
}

/// One that is being written, until it is dropped.
struct PendingWrite(Arc<TraceStore>);

impl PendingWrite {
    fn begin(orders: &Arc<TraceStore>) -> PendingWrite {
        *lock(&orders.pending_writes) += 1;
        PendingWrite(Arc::clone(orders))
    }
}

impl Drop for PendingWrite {
    fn drop(&mut self) {
        *lock(&self.0.pending_writes) -= 1;
        self.0.write_done.notify_all();
    }
}

/// The folder, if it is there and nobody else writes to it.
fn open_folder(folder: &Path) -> io::Result<OwnedFd> {
    let how = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::NOFOLLOW | OFlags::CLOEXEC;
    let folder = rustix::fs::open(folder, how, Mode::empty())?;
    check_private(&fstat(&folder)?)?;
    Ok(folder)
}

/// The folder, made if it is not there. Nothing is made in directories of others: who runs a daemon with
/// another user's home is not to leave there what that user cannot remove.
fn create_folder(folder: &Path) -> io::Result<OwnedFd> {
    let Some(there) = folder.ancestors().find(|path| path.exists()) else {
        return open_folder(folder);
    };
    let Ok(missing) = folder.strip_prefix(there) else { return open_folder(folder) };
    if missing.as_os_str().is_empty() {
        return open_folder(folder);
    }
    // A link too has to be one's own: where it leads is for its owner to say.
    check_owner(&rustix::fs::lstat(there)?)?;
    let how = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC;
    let mut made = rustix::fs::open(there, how, Mode::empty())?;
    for name in missing {
        check_owner(&fstat(&made)?)?;
        match mkdirat(&made, name, Mode::RWXU) {
            Ok(()) | Err(Errno::EXIST) => {}
            Err(error) => return Err(error.into()),
        }
        made = openat(&made, name, how | OFlags::NOFOLLOW, Mode::empty())?;
    }
    check_private(&fstat(&made)?)?;
    Ok(made)
}

fn check_private(stat: &Stat) -> io::Result<()> {
    check_owner(stat)?;
    if stat.st_mode & 0o022 != 0 {
        return Err(io::Error::other("others may write to it"));
    }
    Ok(())
}

fn check_owner(stat: &Stat) -> io::Result<()> {
    if stat.st_uid != rustix::process::geteuid().as_raw() {
        return Err(io::Error::other("it is another user's"));
    }
    Ok(())
}

fn read_trace(folder: impl AsFd, name: &str) -> io::Result<Vec<u8>> {
    let how = OFlags::RDONLY | OFlags::NOFOLLOW | OFlags::NONBLOCK | OFlags::CLOEXEC;
    let file = openat(folder, name, how, Mode::empty())?;
    let stat = fstat(&file)?;
    check_private(&stat)?;
    if FileType::from_raw_mode(stat.st_mode) != FileType::RegularFile {
        return Err(io::Error::other("it is no file"));
    }
    let mut bytes = Vec::new();
    File::from(file).take(MAX_TRACE_BYTES as u64).read_to_end(&mut bytes)?;
    Ok(bytes)
}

/// Writes a file that is whole or not there, unless it is what it would be.
fn write_trace(folder: &Path, name: &str, bytes: &[u8]) -> io::Result<()> {
    let folder = create_folder(folder)?;
    if read_trace(&folder, name).is_ok_and(|known| known == bytes) {
        // It is as good as new: the oldest are removed first.
        let now = Timespec { tv_sec: 0, tv_nsec: UTIME_NOW };
        let times = Timestamps { last_access: now, last_modification: now };
        return Ok(utimensat(&folder, name, &times, AtFlags::SYMLINK_NOFOLLOW)?);
    }
    let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default().as_nanos();
    let unfinished = format!("{name}-{}-{now}", std::process::id());
    let how = OFlags::WRONLY | OFlags::CREATE | OFlags::EXCL | OFlags::CLOEXEC;
    let file = openat(&folder, &unfinished, how, Mode::RUSR | Mode::WUSR)?;
    let written = File::from(file).write_all(bytes);
    let named = written.and_then(|()| Ok(renameat(&folder, &unfinished, &folder, name)?));
    if named.is_err() {
        let _ = unlinkat(&folder, &unfinished, AtFlags::empty());
    }
    named?;
    evict_oldest(&folder)
}

/// Removes the oldest where there are too many or too much, and what writers left that were killed.
fn evict_oldest(folder: &OwnedFd) -> io::Result<()> {
    let mut files = Vec::new();
    for entry in Dir::read_from(folder)? {
        let name = entry?.file_name().to_owned();
        // Only what has a name that we give.
        let is_named_so =
            name.to_bytes().iter().take(32).filter(|b| b.is_ascii_hexdigit()).count() == 32;
        if let Ok(stat) = statat(folder, &name, AtFlags::SYMLINK_NOFOLLOW)
            && is_named_so
        {
            files.push((stat.st_mtime, stat.st_mtime_nsec, stat.st_size as u64, name));
        }
    }
    files.sort();
    let (mut count, mut bytes) = (files.len(), files.iter().map(|file| file.2).sum::<u64>());
    for (.., size, name) in files {
        if count <= MAX_FILES && bytes <= MAX_TOTAL_BYTES {
            break;
        }
        // Another daemon may have been first, and what cannot be removed must not keep the others.
        let _ = unlinkat(folder, &name, AtFlags::empty());
        (count, bytes) = (count - 1, bytes - size);
    }
    Ok(())
}

#[cfg(test)]
#[path = "trace_store_tests.rs"]
mod tests;
