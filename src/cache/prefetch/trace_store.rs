//! Access traces in a folder of the user's, one file for each layout of a virtual file.
//!
//! In: the traces of open files. Each follows what is stored for its layout, and is stored when the file is closed. No
//! caller waits, and there is no error: whatever fails, loads are as without a trace. Threads of its own do the work.
//!
//! Two models of one architecture have the same layout, and are loaded in the same order. What is in the folder is
//! believed only if no other user can have written it. The user may remove it at any time.

use std::fs::File;
use std::io::{self, Read, Write};
use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::path::{Path, PathBuf};
use std::sync::{Arc, Condvar, Mutex, PoisonError, Weak};
use std::time::Duration;

use rustix::fs::{
    AtFlags, Dir, FileType, Mode, OFlags, Timespec, Timestamps, UTIME_NOW, fstat, openat, statat,
    unlinkat, utimensat,
};

use crate::cache::io::executor::{DeviceKind, IoExecutor};
use crate::private_folder::{check_private, create_private, open_private};
use crate::temp_file::TempFile;
use crate::threads::lock;
use crate::virtual_file::Digest;

use super::trace::AccessTrace;
use super::trace_format::{MAX_TRACE_BYTES, decode_trace, encode_trace};

/// The most files, and their most bytes; the oldest are removed first. A user loads from a few dozen models, and the
/// trace of one of 10 GB takes a few kB.
const MAX_FILES: usize = 256;
const MAX_TOTAL_BYTES: u64 = 4 << 20;

/// How long the end of a mount waits for traces that are being written.
const FLUSH_TIMEOUT: Duration = Duration::from_millis(500);

/// The folder of traces, and the traces of the files that are open.
pub struct TraceStore {
    folder: PathBuf,
    executor: Arc<IoExecutor>,
    open: Mutex<Vec<Weak<TraceHandle>>>,
    pending_writes: Mutex<usize>,
    write_done: Condvar,
}

/// The trace of one open file. It is stored when this is dropped.
pub struct TraceHandle {
    pub trace: Arc<Mutex<AccessTrace>>,
    layout: Digest,
    store: Arc<TraceStore>,
}

impl TraceStore {
    pub fn new(folder: PathBuf) -> Arc<TraceStore> {
        let executor = IoExecutor::new(DeviceKind::Disk);
        let (open, pending_writes, write_done) = Default::default();
        Arc::new(TraceStore { folder, executor, open, pending_writes, write_done })
    }

    /// Adds the trace of a file that is opened. It follows the stored one as soon as that is read.
    pub fn open(self: &Arc<Self>, layout: Digest, trace: AccessTrace) -> Arc<TraceHandle> {
        let trace = Arc::new(Mutex::new(trace));
        let (store, weak) = (Arc::clone(self), Arc::downgrade(&trace));
        self.executor.submit_prefetch(Box::new(move || {
            let Some(trace) = weak.upgrade() else { return };
            let chunks = lock(&trace).chunks();
            let stored = open_private(&store.folder)
                .and_then(|folder| read_trace(&folder, &layout.to_string()));
            match stored.map(|bytes| decode_trace(&bytes, chunks)) {
                Ok(Some(stored)) => lock(&trace).follow(stored),
                Ok(None) => tracing::debug!(%layout, "the trace of an earlier load is damaged"),
                Err(error) => tracing::debug!(%layout, %error, "no trace of an earlier load"),
            }
        }));
        let handle = Arc::new(TraceHandle { trace, layout, store: Arc::clone(self) });
        let mut open = lock(&self.open);
        open.retain(|handle| handle.strong_count() > 0);
        open.push(Arc::downgrade(&handle));
        handle
    }

    /// Stores the traces of all files that are still open, and waits up to half a second for all writes.
    pub fn flush(self: &Arc<Self>) {
        let open = std::mem::take(&mut *lock(&self.open));
        let handles = open.iter().filter_map(Weak::upgrade);
        handles.for_each(|handle| self.save(handle.layout, &handle.trace));
        let pending = lock(&self.pending_writes);
        let waited = self.write_done.wait_timeout_while(pending, FLUSH_TIMEOUT, |n| *n > 0);
        drop(waited.unwrap_or_else(PoisonError::into_inner));
    }

    fn save(self: &Arc<Self>, layout: Digest, trace: &Mutex<AccessTrace>) {
        let bytes = {
            let trace = lock(trace);
            trace.completed_load().map(|load| encode_trace(trace.chunks(), load))
        };
        let Some(bytes) = bytes else { return };
        let pending = PendingWrite::begin(self);
        // If the folder hangs, the oldest of the waiting writes are dropped.
        self.executor.submit_prefetch(Box::new(move || {
            if let Err(error) = write_trace(&pending.0.folder, &layout.to_string(), &bytes) {
                tracing::debug!(%layout, %error, "the trace of a load was not stored");
            }
        }));
    }
}

impl Drop for TraceStore {
    fn drop(&mut self) {
        // No job waits: it would hold this.
        self.executor.stop();
    }
}

impl Drop for TraceHandle {
    fn drop(&mut self) {
        self.store.save(self.layout, &self.trace);
    }
}

/// A write that `flush` waits for, until this is dropped.
struct PendingWrite(Arc<TraceStore>);

impl PendingWrite {
    fn begin(store: &Arc<TraceStore>) -> PendingWrite {
        *lock(&store.pending_writes) += 1;
        PendingWrite(Arc::clone(store))
    }
}

impl Drop for PendingWrite {
    fn drop(&mut self) {
        *lock(&self.0.pending_writes) -= 1;
        self.0.write_done.notify_all();
    }
}

fn read_trace(folder: impl AsFd, name: &str) -> io::Result<Vec<u8>> {
    let flags = OFlags::RDONLY | OFlags::NOFOLLOW | OFlags::NONBLOCK | OFlags::CLOEXEC;
    let file = openat(folder, name, flags, Mode::empty())?;
    let stat = fstat(&file)?;
    check_private(&stat)?;
    if FileType::from_raw_mode(stat.st_mode) != FileType::RegularFile {
        return Err(io::Error::other("it is not a regular file"));
    }
    let mut bytes = Vec::new();
    File::from(file).take(MAX_TRACE_BYTES as u64).read_to_end(&mut bytes)?;
    Ok(bytes)
}

/// Writes a file that is whole or not there. One that has these bytes already is only marked as new.
fn write_trace(folder: &Path, name: &str, bytes: &[u8]) -> io::Result<()> {
    let folder = create_private(folder)?;
    if read_trace(&folder, name).is_ok_and(|known| known == bytes) {
        let now = Timespec { tv_sec: 0, tv_nsec: UTIME_NOW };
        let times = Timestamps { last_access: now, last_modification: now };
        return Ok(utimensat(&folder, name, &times, AtFlags::SYMLINK_NOFOLLOW)?);
    }
    // By its descriptor: the folder of that path may be another one by then.
    let directory = PathBuf::from(format!("/proc/self/fd/{}", folder.as_raw_fd()));
    let file = TempFile::create(&directory, Some(name.as_ref()), Mode::RUSR | Mode::WUSR)?;
    file.file().write_all(bytes)?;
    file.take(&directory.join(name), true)?;
    evict_oldest(&folder)
}

/// Removes the oldest traces above the limits, and what killed writers left.
fn evict_oldest(folder: &OwnedFd) -> io::Result<()> {
    let mut files = Vec::new();
    for entry in Dir::read_from(folder)? {
        let name = entry?.file_name().to_owned();
        // Other files stay.
        let is_trace = name.to_bytes().starts_with(b".ckptfs-")
            || name.to_bytes().iter().take(32).filter(|b| b.is_ascii_hexdigit()).count() == 32;
        if let Ok(stat) = statat(folder, &name, AtFlags::SYMLINK_NOFOLLOW)
            && is_trace
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
        // Another daemon may have removed it, and what cannot be removed must not keep the others.
        let _ = unlinkat(folder, &name, AtFlags::empty());
        (count, bytes) = (count - 1, bytes - size);
    }
    Ok(())
}

#[cfg(test)]
#[path = "trace_store_tests.rs"]
mod tests;
