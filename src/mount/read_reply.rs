//! The answer to a read: from what reads an image, or from a file as it is now.

use std::sync::Arc;

use fuser::{Errno, ReplyData};

use crate::cache::{Error, Served};
use crate::source::OpenFile;

use super::attr::of_source;
use super::blocking_pool::Asker;
use super::counters::Counters;

/// What is to be read.
#[derive(Clone, Copy, Debug)]
pub struct Range {
    pub offset: u64,
    pub size: u32,
}

/// One answer that is owed to the kernel.
#[derive(Debug)]
pub struct Answer {
    pub reply: ReplyData,
    pub counters: Arc<Counters>,
    pub asker: Asker,
}

impl Answer {
    pub fn refuse(self, errno: Errno) {
        self.counters.count_error();
        self.reply.error(errno);
    }

    fn give(self, bytes: &[u8]) {
        self.counters.count_read(bytes.len());
        self.reply.data(bytes);
    }

    /// From an image. What is wrong with it is told by the cache, which knows whether it was before.
    pub fn with(self, served: &Arc<Served>, range: Range) {
        let done = move |read: Result<&[u8], &Error>| match read {
            Ok(bytes) => self.give(bytes),
            Err(_) => self.refuse(Errno::EIO),
        };
        served.read(range.offset, range.size, Box::new(done));
    }

    /// From what reads a file ahead, as long as the file is what it was when it was opened; then from
    /// the file as it is now.
    pub fn with_or(self, served: &Arc<Served>, range: Range, file: Arc<OpenFile>) {
        let done = move |read: Result<&[u8], &Error>| match read {
            Ok(bytes) => self.give(bytes),
            Err(_) => self.plainly(file, range),
        };
        served.read(range.offset, range.size, Box::new(done));
    }

    /// From a file as it is now, as far as it goes.
    pub fn plainly(self, file: Arc<OpenFile>, range: Range) {
        let asker = self.asker.clone();
        asker.ask(file.file().identity().dev, move || {
            let mut bytes = vec![0; range.size as usize];
            match file.read_some_at(&mut bytes, range.offset) {
                Ok(read) => self.give(&bytes[..read]),
                Err(error) => self.refuse(of_source(&error)),
            }
        });
    }
}
