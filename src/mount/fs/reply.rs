//! The reply that a read is owed.

use std::sync::Arc;

use fuser::{Errno, ReplyData};

use super::outcomes::{RequestFailure, RequestOutcomes};

/// The bytes that a read asks for.
#[derive(Clone, Copy, Debug)]
pub struct ReadRange {
    pub offset: u64,
    pub size: u32,
}

/// The reply to one read. If it is dropped instead, the kernel gets EIO.
pub struct ReadReply {
    reply: Option<ReplyData>,
    /// The inode number of the file.
    number: u64,
    outcomes: Arc<RequestOutcomes>,
}

impl ReadReply {
    pub fn new(reply: ReplyData, number: u64, outcomes: Arc<RequestOutcomes>) -> ReadReply {
        ReadReply { reply: Some(reply), number, outcomes }
    }

    pub fn send(mut self, bytes: &[u8]) {
        if let Some(reply) = self.reply.take() {
            self.outcomes.count_read(bytes.len());
            reply.data(bytes);
        }
    }

    pub fn fail(mut self, failure: &RequestFailure) {
        self.send_failure(failure);
    }

    /// Declines a read whose bytes no program waits for. It is no error of the mount.
    pub fn decline(mut self) {
        if let Some(reply) = self.reply.take() {
            reply.error(Errno::EBADF);
        }
    }

    fn send_failure(&mut self, failure: &RequestFailure) {
        if let Some(reply) = self.reply.take() {
            reply.error(self.outcomes.record(self.number, failure));
        }
    }
}

impl Drop for ReadReply {
    fn drop(&mut self) {
        if self.reply.is_some() {
            let failure = match std::thread::panicking() {
                true => RequestFailure::internal_fault(),
                false => RequestFailure::abandoned(),
            };
            self.send_failure(&failure);
        }
    }
}
