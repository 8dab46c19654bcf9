//! A cache of directories, by least recent use and within a budget of bytes.

use std::path::{Path, PathBuf};
use std::sync::Arc;

use lru::LruCache;

use super::directory::DirectoryView;

/// Directories that are kept whatever their weight. A directory of 100,000 names takes a second to read, and
/// without the cache each lookup in it would read it again.
const MIN_DIRECTORIES: usize = 8;

/// Bytes of a directory beside its names, about: its plans, and its entry in the cache.
const BYTES_PER_DIRECTORY: usize = 4 << 10;

/// Directories by their path from the root.
#[derive(Debug)]
pub struct DirectoryCache {
    directories: LruCache<PathBuf, Arc<DirectoryView>>,
    used_bytes: usize,
    limit_bytes: usize,
}

impl DirectoryCache {
    /// An empty cache of at most `limit` bytes.
    pub fn new(limit: usize) -> DirectoryCache {
        DirectoryCache { directories: LruCache::unbounded(), used_bytes: 0, limit_bytes: limit }
    }

    pub fn get(&mut self, way: &Path) -> Option<Arc<DirectoryView>> {
        self.directories.get(way).cloned()
    }

    /// Gets a directory without counting as a use of it.
    pub fn peek(&self, way: &Path) -> Option<Arc<DirectoryView>> {
        self.directories.peek(way).cloned()
    }

    pub fn iter(&self) -> impl Iterator<Item = &Arc<DirectoryView>> {
        self.directories.iter().map(|(_, directory)| directory)
    }

    pub fn put(&mut self, way: &Path, directory: Arc<DirectoryView>) {
        self.used_bytes += weight(&directory);
        if let Some(old) = self.directories.put(way.to_path_buf(), directory) {
            self.used_bytes -= weight(&old);
        }
        while self.used_bytes > self.limit_bytes && self.directories.len() > MIN_DIRECTORIES {
            let Some((_, oldest)) = self.directories.pop_lru() else { return };
            self.used_bytes -= weight(&oldest);
        }
    }
}

fn weight(directory: &DirectoryView) -> usize {
    BYTES_PER_DIRECTORY + directory.weight()
}
