//! Where nodes lie in the view, in little memory: the kernel may know millions of them.

use std::ffi::OsStr;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use crate::view::Names;

/// Names of one directory, shared by its listings and by all nodes that have them.
#[derive(Debug, PartialEq, Eq)]
pub struct DirNames {
    /// The directory's place in the view.
    pub dir: Arc<Path>,
    pub names: Names,
}

/// A place in the view: a name in a directory.
#[derive(Clone, Debug)]
pub struct NodePath {
    /// Nothing for the root.
    of: Option<Arc<DirNames>>,
    index: u32,
}

impl NodePath {
    /// The root's.
    pub const ROOT: NodePath = NodePath { of: None, index: 0 };

    /// One of these names.
    pub fn of(names: &Arc<DirNames>, index: usize) -> NodePath {
        // A directory has fewer names: each takes a byte, and all of them fit in memory.
        let index = u32::try_from(index).unwrap_or(u32::MAX);
        NodePath { of: Some(Arc::clone(names)), index }
    }

    /// A name that was looked up by itself.
    pub fn single(dir: Arc<Path>, name: &OsStr) -> NodePath {
        let names = Names::of([name]);
        NodePath { of: Some(Arc::new(DirNames { dir, names })), index: 0 }
    }

    /// The directory and the name; nothing for the root.
    pub fn parts(&self) -> Option<(&Path, &OsStr)> {
        let of = self.of.as_ref()?;
        Some((&of.dir, of.names.get(self.index as usize)?))
    }

    /// The whole place.
    pub fn to_path(&self) -> PathBuf {
        self.parts().map_or_else(PathBuf::new, |(dir, name)| dir.join(name))
    }
}

impl PartialEq for NodePath {
    fn eq(&self, other: &NodePath) -> bool {
        self.parts() == other.parts()
    }
}

impl Eq for NodePath {}

impl std::hash::Hash for NodePath {
    fn hash<H: std::hash::Hasher>(&self, state: &mut H) {
        self.parts().hash(state);
    }
}
