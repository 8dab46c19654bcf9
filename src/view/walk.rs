//! A walk through the directories of a view.

use std::path::{Path, PathBuf};

/// Visits the directories of a view from the top, depth first. `visit` lists one, and returns the subdirectories to enter,
/// in their order. Ends at the first error.
pub fn walk<E>(mut visit: impl FnMut(&Path) -> Result<Vec<PathBuf>, E>) -> Result<(), E> {
    let mut pending = vec![PathBuf::new()];
    while let Some(directory) = pending.pop() {
        pending.extend(visit(&directory)?.into_iter().rev());
    }
    Ok(())
}
