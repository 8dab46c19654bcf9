//! The virtual file: a checkpoint laid out as one valid safetensors file.
//!
//! In: a [`Checkpoint`](crate::checkpoint::Checkpoint). Out: a [`VirtualFile`], an immutable value: header, size, the
//! sources of every range ([`VirtualFile::segments`]), and two hashes. A [`VirtualFileReader`] holds the sources open
//! and reads any range from any thread.
//!
//! The same checkpoint always gives the same virtual file, byte for byte.

mod chunks;
mod digest;
mod error;
mod file;
mod layout;
mod parallel_chunks;
mod read_plan;
mod store_reads;

pub(crate) use chunks::ChunkReader;
pub use chunks::Progress;
pub use digest::Digest;
pub use error::VirtualFileError;
pub use file::{VirtualFile, VirtualFileReader};
pub use layout::{DATA_ALIGNMENT_BYTES, Segment, SegmentSource};
#[cfg(feature = "remote")]
pub(crate) use parallel_chunks::for_each_chunk;
pub(crate) use read_plan::{
    MAX_EXTENT_BYTES, PlanItem, ReadExtent, ReadJob, SplitPolicy, Target, plan_jobs,
};
#[cfg(feature = "mount")]
pub(crate) use store_reads::{interleaved_tensors, window_bytes};
