//! Paths of nodes in the view, in little memory: the kernel may know millions of nodes.

use std::ffi::OsStr;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use crate::view::Names;

/// Names of one directory, shared by its listings and by the nodes of these names.
#[derive(Debug, PartialEq, Eq)]
pub struct DirNames {
    /// The directory's place in the view.
    pub dir: Arc<Path>,
    pub names: Names,
}

/// A path in the view: a name in a directory.
#[derive(Clone, Debug)]
pub struct NodePath {
    /// `None` for the root.
    names: Option<Arc<DirNames>>,
    index: u32,
}

impl NodePath {
    /// The path of the root.
    pub const ROOT: NodePath = NodePath { names: None, index: 0 };

    /// The path of one of these names.
    pub fn of(names: &Arc<DirNames>, index: usize) -> NodePath {
        // A directory in memory has fewer names.
        let index = u32::try_from(index).unwrap_or(u32::MAX);
        NodePath { names: Some(Arc::clone(names)), index }
    }

    /// The path of a name that was looked up by itself.
    pub fn single(dir: Arc<Path>, name: &OsStr) -> NodePath {
        let names = Names::of([name]);
        NodePath { names: Some(Arc::new(DirNames { dir, names })), index: 0 }
    }

    /// The directory and the name; `None` for the root.
    pub fn parts(&self) -> Option<(&Path, &OsStr)> {
        let DirNames { dir, names } = &**self.names.as_ref()?;
        Some((dir, names.get(self.index as usize)?))
    }

    /// The whole path.
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
