//! What holds the bytes of tensors.

use std::sync::Arc;

use crate::source::SourceFile;

use super::patched::PatchedBytes;

/// Something that holds tensor bytes.
#[derive(Clone, Debug)]
pub enum Origin {
    /// A file, whose bytes stay where they are.
    File(Arc<SourceFile>),
    /// A storage that was unpacked into memory.
    Memory(Arc<[u8]>),
    /// A tensor that deltas change, patched when it is read.
    Patched(Arc<PatchedBytes>),
}

impl Origin {
    /// The number of bytes that it holds.
    pub fn size(&self) -> u64 {
        match self {
            Origin::File(file) => file.identity().size,
            Origin::Memory(bytes) => bytes.len() as u64,
            Origin::Patched(patched) => patched.len(),
        }
    }

    /// The file, if it is one.
    pub fn file(&self) -> Option<&Arc<SourceFile>> {
        match self {
            Origin::File(file) => Some(file),
            Origin::Memory(_) | Origin::Patched(_) => None,
        }
    }

    /// The patched tensor, if it is one.
    pub fn patched(&self) -> Option<&Arc<PatchedBytes>> {
        match self {
            Origin::Patched(patched) => Some(patched),
            Origin::File(_) | Origin::Memory(_) => None,
        }
    }

    /// Adds to the numbers of the origins that it is made of, when they become origins of a set.
    pub fn shift_origins(&mut self, by: u32) {
        if let Origin::Patched(patched) = self {
            *patched = Arc::new(patched.with_shifted_origins(by));
        }
    }
}
