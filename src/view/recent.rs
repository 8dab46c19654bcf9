//! The directories that were asked for last, as many as there is room for.

use std::path::{Path, PathBuf};
use std::sync::Arc;

use lru::LruCache;

use super::directory::Directory;

/// Directories that are kept whatever they weigh: one that is read anew for every name in it would take a second
/// for each of 100,000.
const LEAST: usize = 8;

/// What a directory weighs beside its names, about: its plans, and its place here.
const EACH: usize = 4 << 10;

/// Directories by their way from the root.
#[derive(Debug)]
pub struct Recent {
    directories: LruCache<PathBuf, Arc<Directory>>,
    weight: usize,
    limit: usize,
}

impl Recent {
    /// Of so many bytes.
    pub fn new(limit: usize) -> Recent {
        Recent { directories: LruCache::unbounded(), weight: 0, limit }
    }

    pub fn get(&mut self, way: &Path) -> Option<Arc<Directory>> {
        self.directories.get(way).cloned()
    }

    /// The same, without a say in which of them is the last.
    pub fn peek(&self, way: &Path) -> Option<Arc<Directory>> {
        self.directories.peek(way).cloned()
    }

    pub fn iter(&self) -> impl Iterator<Item = &Arc<Directory>> {
        self.directories.iter().map(|(_, directory)| directory)
    }

    pub fn put(&mut self, way: &Path, directory: Arc<Directory>) {
        self.weight += weight(&directory);
        if let Some(old) = self.directories.put(way.to_path_buf(), directory) {
            self.weight -= weight(&old);
        }
        while self.weight > self.limit && self.directories.len() > LEAST {
            let Some((_, oldest)) = self.directories.pop_lru() else { return };
            self.weight -= weight(&oldest);
        }
    }
}

fn weight(directory: &Directory) -> usize {
    EACH + directory.weight()
}
