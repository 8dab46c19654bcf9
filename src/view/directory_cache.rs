//! A cache of directories, by least recent use and within a budget of bytes.

use std::path::{Path, PathBuf};
use std::sync::Arc;

use lru::LruCache;

use super::directory::Directory;

/// Directories that are kept whatever their weight. A directory of 100,000 names takes a second to read, and
/// without the cache each lookup in it would read it again.
const MIN_DIRECTORIES: usize = 8;

/// Bytes of a directory beside its names, about: its plans, and its entry in the cache.
const BYTES_PER_DIRECTORY: usize = 4 << 10;

/// Directories by their path from the root.
#[derive(Debug)]
pub struct DirectoryCache {
    directories: LruCache<PathBuf, Arc<Directory>>,
    weight: usize,
    limit: usize,
}

impl DirectoryCache {
    /// An empty cache of at most `limit` bytes.
    pub fn new(limit: usize) -> DirectoryCache {
        DirectoryCache { directories: LruCache::unbounded(), weight: 0, limit }
    }

    pub fn get(&mut self, way: &Path) -> Option<Arc<Directory>> {
        self.directories.get(way).cloned()
    }

    /// Gets a directory without counting as a use of it.
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
        while self.weight > self.limit && self.directories.len() > MIN_DIRECTORIES {
            let Some((_, oldest)) = self.directories.pop_lru() else { return };
            self.weight -= weight(&oldest);
        }
    }
}

fn weight(directory: &Directory) -> usize {
    BYTES_PER_DIRECTORY + directory.weight()
}
