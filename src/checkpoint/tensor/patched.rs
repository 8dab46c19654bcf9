//! A tensor that deltas change: where its bytes in the base lie, and where the changes.

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, OnceLock};

use super::bytes::{ByteRun, OriginId, TensorBytes};
use super::name::TensorName;

/// The bytes of a tensor that the deltas of a chain change. It is an origin of its own: slices and casts of the tensor
/// read its bytes after the changes.
#[derive(Debug)]
pub struct PatchedBytes {
    /// Unique in this process, and never used again.
    pub id: PatchId,
    /// The name of the tensor, for messages.
    pub tensor: TensorName,
    /// The bytes in the base. Never of a patched origin.
    pub base: TensorBytes,
    /// The changes by each delta, the earliest first. Never empty.
    pub layers: Box<[PatchLayer]>,
    /// The outcome of comparing the checksum of the last layer. Set once.
    pub verification: OnceLock<Result<(), Arc<PatchDamage>>>,
}

/// The changes of a tensor by one delta.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PatchLayer {
    /// The compressed changes.
    pub blob: ByteRun,
    /// How they are encoded.
    pub encoding: DeltaEncoding,
    /// The checksum of all bytes of the tensor after these changes.
    pub checksum: TensorChecksum,
}

/// How a delta encodes the changes of a tensor.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum DeltaEncoding {
    /// All bytes of the tensor, before XOR after.
    Xor,
    /// The positions of changed bytes, and their values.
    Overwrite,
}

/// A checksum over all bytes of a tensor.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TensorChecksum {
    /// How it is computed.
    pub format: ChecksumFormat,
    /// The digits that the delta states.
    pub digits: Box<str>,
}

/// How a checksum is computed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ChecksumFormat {
    /// XXH3 of 128 bits.
    Xxh3,
    /// BLAKE3 of 256 bits.
    Blake3,
    /// Adler-32, as in zlib.
    Adler32,
}

/// What is wrong with the changes of a tensor, or with its bytes after them.
#[derive(Debug)]
pub struct PatchDamage {
    /// The delta's origin.
    pub origin: OriginId,
    /// What is wrong, in words.
    pub reason: String,
}

/// The number of a [`PatchedBytes`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct PatchId(u64);

impl PatchId {
    fn next() -> PatchId {
        static LAST_ID: AtomicU64 = AtomicU64::new(0);
        PatchId(LAST_ID.fetch_add(1, Ordering::Relaxed))
    }
}

impl PatchedBytes {
    /// The bytes of a tensor after some layers, at least one.
    pub fn new(tensor: TensorName, base: TensorBytes, layers: Box<[PatchLayer]>) -> PatchedBytes {
        let (id, verification) = (PatchId::next(), OnceLock::new());
        PatchedBytes { id, tensor, base, layers, verification }
    }

    /// The number of bytes.
    pub fn len(&self) -> u64 {
        self.base.len()
    }

    /// Whether it has no bytes.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// The origins that it is made of. One may be named more than once.
    pub fn origins(&self) -> impl Iterator<Item = OriginId> {
        self.runs().map(|run| run.origin)
    }

    /// The runs of its origins that it is made of. Of bytes that are not contiguous, from the first to the last.
    pub fn runs(&self) -> impl Iterator<Item = ByteRun> {
        self.base.extents().chain(self.layers.iter().map(|layer| layer.blob))
    }

    /// The same bytes, with the numbers that their origins get in a set.
    pub(super) fn with_shifted_origins(&self, by: u32) -> PatchedBytes {
        let mut base = self.base.clone();
        base.shift_origin(by);
        let mut layers = self.layers.clone();
        layers.iter_mut().for_each(|layer| layer.blob.origin.0 += by);
        PatchedBytes::new(self.tensor.clone(), base, layers)
    }

    /// The approximate bytes of memory that it takes.
    pub fn memory_bytes(&self) -> usize {
        let digits: usize = self.layers.iter().map(|layer| layer.checksum.digits.len()).sum();
        size_of::<PatchedBytes>() + size_of_val(&*self.layers) + digits
    }
}

impl ChecksumFormat {
    /// The format of a name in a delta's index.
    pub fn parse(name: &str) -> Option<ChecksumFormat> {
        match name {
            "xxh3-128" => Some(ChecksumFormat::Xxh3),
            "blake3" => Some(ChecksumFormat::Blake3),
            "adler32" => Some(ChecksumFormat::Adler32),
            _ => None,
        }
    }

    /// The number of hexadecimal digits that a checksum has.
    pub fn digit_count(self) -> usize {
        match self {
            ChecksumFormat::Xxh3 => 32,
            ChecksumFormat::Blake3 => 64,
            ChecksumFormat::Adler32 => 8,
        }
    }
}

impl DeltaEncoding {
    /// The encoding of a name in a delta's index.
    pub fn parse(name: &str) -> Option<DeltaEncoding> {
        match name {
            "xor" => Some(DeltaEncoding::Xor),
            "overwrite" => Some(DeltaEncoding::Overwrite),
            _ => None,
        }
    }
}
