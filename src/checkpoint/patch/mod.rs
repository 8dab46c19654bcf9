//! Patches: the decoded changes of one tensor by the deltas of a chain, kept sparse.
//!
//! In: compressed changes. Out: a [`Patch`] for a range of the tensor, which is applied to bytes in memory, and [`Hasher`],
//! which computes the checksum of the result.
//!
//! `pages` holds changes, `decode` reads them, and `cache` keeps them within a memory limit.

mod cache;
mod checksum;
mod decode;
mod error;
mod pages;

pub use cache::{PatchAllowance, lower_patch_limit, patch_cache, set_patch_limit};
pub use checksum::Hasher;
pub use decode::{LayerSource, decode};
pub use error::{LayerError, PatchError};
pub use pages::Patch;
