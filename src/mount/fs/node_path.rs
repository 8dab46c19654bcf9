//! Paths of nodes in the view, in little memory: the kernel may know millions of nodes.

use std::ffi::OsStr;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use crate::view::SortedNames;

/// Names of one directory, shared by its listings.
#[derive(Debug, PartialEq, Eq)]
pub struct DirNames {
    /// The directory's place in the view.
    pub dir: Arc<Path>,
    pub names: SortedNames,
}

/// A path in the view: a name in a directory. It has its own copy of the name: a name that vanished must not keep all
/// names of its listing in memory.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct InodePath {
    /// `None` for the root.
    dir: Option<Arc<Path>>,
    name: Box<OsStr>,
}

impl InodePath {
    /// The path of the root.
    pub fn root() -> InodePath {
        InodePath { dir: None, name: Box::default() }
    }

    pub fn new(dir: &Arc<Path>, name: &OsStr) -> InodePath {
        InodePath { dir: Some(Arc::clone(dir)), name: name.into() }
    }

    /// The directory and the name; `None` for the root.
    pub fn parts(&self) -> Option<(&Path, &OsStr)> {
        Some((self.dir.as_deref()?, &self.name))
    }

    /// The whole path.
    pub fn to_path(&self) -> PathBuf {
        self.parts().map_or_else(PathBuf::new, |(dir, name)| dir.join(name))
    }
}
