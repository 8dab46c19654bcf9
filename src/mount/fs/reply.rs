//! Replies to read requests, counted, and replies of requests that panic.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use fuser::{Errno, ReplyData};

/// Counters of a mount. Each is exact by itself; together they are no snapshot.
#[derive(Debug, Default)]
pub struct MountCounters {
    bytes: AtomicU64,
    reads: AtomicU64,
    errors: AtomicU64,
}

impl MountCounters {
    pub fn count_read(&self, bytes: usize) {
        self.reads.fetch_add(1, Ordering::Relaxed);
        self.bytes.fetch_add(bytes as u64, Ordering::Relaxed);
    }

    pub fn count_error(&self) {
        self.errors.fetch_add(1, Ordering::Relaxed);
    }

    pub fn bytes(&self) -> u64 {
        self.bytes.load(Ordering::Relaxed)
    }

    pub fn reads(&self) -> u64 {
        self.reads.load(Ordering::Relaxed)
    }

    pub fn errors(&self) -> u64 {
        self.errors.load(Ordering::Relaxed)
    }
}

/// The bytes that a read asks for.
#[derive(Clone, Copy, Debug)]
pub struct ReadRange {
    pub offset: u64,
    pub size: u32,
}

/// The reply that one read is owed. If it is dropped instead, the kernel gets EIO.
#[derive(Debug)]
pub struct ReadReply {
    pub reply: ReplyData,
    pub counters: Arc<MountCounters>,
}

impl ReadReply {
    pub fn send(self, bytes: &[u8]) {
        self.counters.count_read(bytes.len());
        self.reply.data(bytes);
    }

    pub fn fail(self, errno: Errno) {
        self.counters.count_error();
        self.reply.error(errno);
    }
}

/// Runs the work of a request. A panic becomes EIO: one request is lost, and the mount lives.
pub fn catch_panic<T>(request: impl FnOnce() -> Result<T, Errno>) -> Result<T, Errno> {
    // State that a panic leaves half changed is behind a lock, or belongs to this request alone.
    catch_unwind(AssertUnwindSafe(request)).unwrap_or_else(|_| {
        tracing::error!("a request could not be answered: a fault in ckptfs, please report it");
        Err(Errno::EIO)
    })
}
