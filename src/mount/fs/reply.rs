//! The answer to a read: from what reads a virtual file, or from a file as it is now.

use std::sync::Arc;

use fuser::{Errno, ReplyData};

use crate::cache::{CacheError, CachedFile};
use crate::source::OpenFile;

use super::attr::source_errno;
use super::blocking_pool::BlockingPoolHandle;
use super::counters::MountCounters;

/// What is to be read.
#[derive(Clone, Copy, Debug)]
pub struct ReadRange {
    pub offset: u64,
    pub size: u32,
}

/// One answer that is owed to the kernel.
#[derive(Debug)]
pub struct ReadReply {
    pub reply: ReplyData,
    pub counters: Arc<MountCounters>,
    pub pool: BlockingPoolHandle,
}

impl ReadReply {
    pub fn fail(self, errno: Errno) {
        self.counters.count_error();
        self.reply.error(errno);
    }

    fn send(self, bytes: &[u8]) {
        self.counters.count_read(bytes.len());
        self.reply.data(bytes);
    }

    /// From a virtual file. What is wrong with it is told by the cache, which knows whether it was before.
    pub fn read_virtual_file(self, served: &Arc<CachedFile>, range: ReadRange) {
        let done = move |read: Result<&[u8], &CacheError>| match read {
            Ok(bytes) => self.send(bytes),
            Err(_) => self.fail(Errno::EIO),
        };
        served.read(range.offset, range.size, Box::new(done));
    }

    /// From what reads a file ahead, as long as the file is what it was when it was opened; then from
    /// the file as it is now.
    pub fn read_cached_source(
        self,
        served: &Arc<CachedFile>,
        range: ReadRange,
        file: Arc<OpenFile>,
    ) {
        let done = move |read: Result<&[u8], &CacheError>| match read {
            Ok(bytes) => self.send(bytes),
            Err(_) => self.read_source(file, range),
        };
        served.read(range.offset, range.size, Box::new(done));
    }

    /// From a file as it is now, as far as it goes.
    pub fn read_source(self, file: Arc<OpenFile>, range: ReadRange) {
        let asker = self.pool.clone();
        asker.run(file.file().identity().dev, move || {
            let mut bytes = vec![0; range.size as usize];
            match file.read_available_at(&mut bytes, range.offset) {
                Ok(read) => self.send(&bytes[..read]),
                Err(error) => self.fail(source_errno(&error)),
            }
        });
    }
}
