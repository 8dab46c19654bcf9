//! The kernel's page cache of source files: what it has, reading from it alone, and leaving it as it was found.

mod guard;
mod page_lender;
mod pages;

pub use guard::{ActiveRead, PageCacheGuard, WholeFileGuard};
pub use page_lender::{LentPages, PageLender};
pub use pages::Residency;
#[cfg(feature = "remote")]
pub use pages::count_cached_pages;
