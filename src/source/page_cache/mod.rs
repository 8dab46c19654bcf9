//! The kernel's page cache of source files: what it has, reading from it alone, and leaving it as it was found.

mod guard;
mod lent;
mod pages;

pub use guard::{ActiveRead, PageCacheGuard, WholeFileGuard};
pub use lent::{LentPages, PageLender};
pub use pages::Residency;
#[cfg(feature = "remote")]
pub use pages::count_cached_pages;
