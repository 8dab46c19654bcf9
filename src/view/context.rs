//! What all directories of a view share.

use std::num::NonZeroUsize;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex};
use std::time::SystemTime;

use lru::LruCache;

use crate::source::{FileMetadata, Root, SourceError};
use crate::threads::lock;

use super::directory_plan::SingleTarget;
use super::options::ViewOptions;
use super::recipe_store::{RecipeSnapshot, RecipeStore};
use super::virtual_file_cache::VirtualFileCache;

/// Directories of which a change is remembered that their own timestamp does not show.
const MAX_CHANGE_TIMES: NonZeroUsize = NonZeroUsize::new(4_096).unwrap();

/// The source of a view, its options, and what it remembers across directories.
#[derive(Debug)]
pub struct ViewContext {
    pub root: Arc<Root>,
    /// The path from the root to the directory that is shown.
    pub base: PathBuf,
    /// The one checkpoint that is shown, if the view is of one.
    pub target: Option<SingleTarget>,
    pub options: ViewOptions,
    pub virtual_files: VirtualFileCache,
    recipes: RecipeStore,
    /// When the content of a directory changed, where its own timestamp does not show that.
    change_times: Mutex<LruCache<PathBuf, SystemTime>>,
}

impl ViewContext {
    pub fn new(
        root: Arc<Root>,
        base: PathBuf,
        target: Option<SingleTarget>,
        options: ViewOptions,
        cache_bytes: u64,
    ) -> ViewContext {
        let virtual_files = VirtualFileCache::new(cache_bytes);
        let change_times = Mutex::new(LruCache::new(MAX_CHANGE_TIMES));
        let recipes = RecipeStore::new(options.recipe.clone());
        ViewContext { root, base, target, options, virtual_files, recipes, change_times }
    }

    /// The path from the root to a path in the view.
    pub fn source_path(&self, path: &Path) -> PathBuf {
        if path.as_os_str().is_empty() { self.base.clone() } else { self.base.join(path) }
    }

    /// The recipe as it is now. Where it has changed, the directories that it shows something in have, too.
    pub fn recipe(&self) -> Arc<RecipeSnapshot> {
        let (snapshot, changed) = self.recipes.refresh(&self.root, &self.base);
        for directory in changed {
            self.record_change(&self.source_path(&directory), snapshot.seen_at);
        }
        snapshot
    }

    /// The recipe as it was last seen. Reads nothing.
    pub fn known_recipe(&self) -> Arc<RecipeSnapshot> {
        self.recipes.known()
    }

    /// The path in the view of a path from the root; `None` if it is not beneath the view.
    pub fn view_path<'p>(&self, path: &'p Path) -> Option<&'p Path> {
        path.strip_prefix(&self.base).ok()
    }

    /// The metadata of a path from the root. A directory that only a recipe has is like the one that the view is of.
    pub fn metadata(&self, path: &Path) -> Result<FileMetadata, SourceError> {
        let recipe = self.recipe();
        match self.root.metadata(path) {
            Err(SourceError::Missing { .. })
                if self.view_path(path).is_some_and(|path| recipe.has_directory(path)) =>
            {
                let mut metadata = self.root.metadata(&self.base)?;
                metadata.mtime = metadata.mtime.max(recipe.seen_at);
                metadata.ctime = metadata.ctime.max(recipe.seen_at);
                Ok(metadata)
            }
            found => found,
        }
    }

    /// Remembers that what a directory shows has changed although its own timestamp has not.
    pub fn record_change(&self, directory: &Path, time: SystemTime) {
        let mut times = lock(&self.change_times);
        let last = times.get(directory).map_or(time, |last| time.max(*last));
        times.put(directory.to_path_buf(), last);
    }

    /// The last recorded change of a directory.
    pub fn last_change(&self, directory: &Path) -> Option<SystemTime> {
        lock(&self.change_times).peek(directory).copied()
    }
}
