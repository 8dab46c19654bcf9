//! Whether what is shown is still there.
//!
//! A source directory that is removed stays open here, empty for ever, also where another is made under
//! its name: programs see an empty mount. Whoever notices says so in the log, once, and the numbers of
//! the mount say it from then on.

use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use crate::view::View;

/// The source of a mount.
#[derive(Debug)]
pub struct SourceWatch {
    view: Arc<View>,
    source: PathBuf,
    is_logged: AtomicBool,
}

impl SourceWatch {
    pub fn new(view: Arc<View>, source: PathBuf) -> SourceWatch {
        SourceWatch { view, source, is_logged: AtomicBool::new(false) }
    }

    /// Whether the source's directory was removed. Waits for nobody.
    pub fn is_removed(&self) -> bool {
        let is_removed = self.view.root().is_removed();
        if is_removed && !self.is_logged.swap(true, Ordering::Relaxed) {
            tracing::warn!(
                "{}: the directory was removed, and the mount stays empty whatever is made there \
                 now; what to do: unmount it, and mount again",
                self.source.display()
            );
        }
        is_removed
    }
}
