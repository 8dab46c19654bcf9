//! Has the disk take blocks early, and the page cache drop them once it has.
//!
//! Readers of a mount have copies in its own pages. Where the page cache keeps the blocks as well, it takes as much memory again,
//! most of it fresh. The kernel took up to 4.6 s of processor time to write 2.2 GB of blocks, and 0.6 to 0.7 s if it dropped them.

use std::collections::VecDeque;
use std::path::{Path, PathBuf};
use std::sync::OnceLock;
use std::sync::mpsc::{Receiver, RecvTimeoutError, SyncSender, sync_channel};
use std::time::Duration;

use rustix::fs::{Advice, CWD, Mode, OFlags, fadvise, openat};

use crate::threads::spawn;

/// Blocks that the disk takes before the page cache drops the first of them: 256 MiB at most.
const MAX_WRITTEN_BLOCKS: usize = 32;

/// The time without new blocks after which the page cache drops all.
const IDLE_TIMEOUT: Duration = Duration::from_secs(1);

/// A thread that waits for the disk, so that no read does. If the disk is too slow, the page cache keeps the next blocks.
#[derive(Debug, Default)]
pub struct PageDropper {
    sender: OnceLock<Option<SyncSender<PathBuf>>>,
}

impl PageDropper {
    /// Has the page cache drop a whole block, unless too many blocks wait already.
    pub fn drop_pages(&self, block: PathBuf) {
        let sender = self.sender.get_or_init(|| {
            let (sender, blocks) = sync_channel(MAX_WRITTEN_BLOCKS);
            spawn("ckptfs pages", move || drop_written(&blocks)).ok().map(|_| sender)
        });
        if let Some(sender) = sender {
            let _ = sender.try_send(block);
        }
    }
}

fn drop_written(blocks: &Receiver<PathBuf>) {
    let mut written = VecDeque::new();
    loop {
        let next = match written.is_empty() {
            true => blocks.recv().map_err(RecvTimeoutError::from),
            false => blocks.recv_timeout(IDLE_TIMEOUT),
        };
        let kept = match next {
            Ok(block) => {
                evict_written(&block);
                written.push_back(block);
                MAX_WRITTEN_BLOCKS
            }
            Err(RecvTimeoutError::Timeout) => 0,
            Err(RecvTimeoutError::Disconnected) => return,
        };
        let excess = written.len().saturating_sub(kept);
        written.drain(..excess).for_each(|block| evict_written(&block));
    }
}

/// Evicts the pages that the disk has. The kernel begins to write the others. The file is not kept open: an evicted block
/// would take space.
fn evict_written(block: &Path) {
    let flags = OFlags::RDONLY | OFlags::NOFOLLOW | OFlags::NONBLOCK | OFlags::CLOEXEC;
    if let Ok(file) = openat(CWD, block, flags, Mode::empty()) {
        let _ = fadvise(&file, 0, None, Advice::DontNeed);
    }
}
