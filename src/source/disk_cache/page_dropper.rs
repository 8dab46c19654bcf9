//! Drops finished blocks from the page cache after their writeback.
//!
//! The files of a mount have pages of their own. With the pages of the blocks, the page cache would take twice the memory,
//! most of it fresh.

use std::os::fd::AsRawFd;
use std::path::{Path, PathBuf};
use std::sync::OnceLock;
use std::sync::mpsc::{SyncSender, sync_channel};

use rustix::fs::{Advice, CWD, Mode, OFlags, fadvise, openat};

use crate::threads::spawn;

/// Maximum blocks in the queue: 256 MiB at most. A disk that writes as fast as a store sends needs only a few.
const MAX_QUEUED_BLOCKS: usize = 32;

/// The queue of a thread that drops blocks, one after the other. Only mounts use it, whose forked children read nothing.
#[derive(Debug, Default)]
pub struct PageDropper {
    sender: OnceLock<SyncSender<PathBuf>>,
}

impl PageDropper {
    /// Queues a finished block. It stays in the page cache if the queue is full: writers never wait.
    pub fn queue(&self, block: PathBuf) {
        let sender = self.sender.get_or_init(|| {
            let (sender, blocks) = sync_channel(MAX_QUEUED_BLOCKS);
            // Without the thread, nothing can be sent.
            let _ = spawn("ckptfs-drop", move || {
                blocks.iter().for_each(|block: PathBuf| drop_after_writeback(&block));
            });
            sender
        });
        let _ = sender.try_send(block);
    }
}

/// Drops a block from the page cache after its writeback, which takes as long as the disk needs. Not `fdatasync`: that commits
/// the filesystem's journal. The file is not left open: it would take space after its removal.
#[allow(unsafe_code)] // No safe wrapper of `sync_file_range` exists.
fn drop_after_writeback(block: &Path) {
    const WRITE_AND_WAIT: libc::c_uint =
        libc::SYNC_FILE_RANGE_WRITE | libc::SYNC_FILE_RANGE_WAIT_AFTER;
    let flags = OFlags::RDONLY | OFlags::NOFOLLOW | OFlags::NONBLOCK | OFlags::CLOEXEC;
    let Ok(file) = openat(CWD, block, flags, Mode::empty()) else { return };
    // SAFETY: the call has no pointers, and the descriptor is open for as long as `file` lives.
    unsafe { libc::sync_file_range(file.as_raw_fd(), 0, 0, WRITE_AND_WAIT) };
    // A failure of either call leaves only memory that the kernel can reclaim.
    let _ = fadvise(&file, 0, None, Advice::DontNeed);
}
