//! The directories of a view: each as it is now, read again when it has changed.
//!
//! Directories are cached by least recent use, within a budget of bytes.

use std::ffi::{OsStr, OsString};
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex};

use lru::LruCache;

use crate::recipe::RecipeFile;
use crate::source::{FileKind, FileMetadata};
use crate::threads::lock;

use super::context::ViewContext;
use super::directory::DirectoryView;
use super::directory_query::{DirectoryQuery, QueryError};
use super::entry::CheckpointCounts;
use super::error::{Refusal, ViewError};
use super::hf_cache::HubNotes;
use super::planned_file::{BuildOutcome, PlannedFile};

/// Bytes for the plans of directories, whatever the budget: at least the first, at most the second.
const DIRECTORY_CACHE_BYTES: [u64; 2] = [1 << 20, 64 << 20];

/// Directories that are kept whatever their weight. A directory of 100,000 names takes a second to read, and
/// without the cache each lookup in it would read it again.
const MIN_DIRECTORIES: usize = 8;

/// Bytes of a directory beside its names, about: its plans, and its entry in the cache.
const BYTES_PER_DIRECTORY: usize = 4 << 10;

/// Tries to read a directory that changes meanwhile.
pub const MAX_READ_TRIES: usize = 5;

/// Directories that are searched for hidden originals beneath a revision.
const MAX_SEARCHED_DIRECTORIES: usize = 1_000;

/// The directories of a view.
#[derive(Debug)]
pub struct DirectoryStore {
    pub context: ViewContext,
    cache: Mutex<DirectoryCache>,
}

/// Directories by their path from the root.
#[derive(Debug)]
struct DirectoryCache {
    directories: LruCache<PathBuf, Arc<DirectoryView>>,
    used_bytes: usize,
    limit_bytes: usize,
}

impl DirectoryCache {
    fn get(&mut self, path: &Path) -> Option<Arc<DirectoryView>> {
        self.directories.get(path).cloned()
    }

    /// Gets a directory without counting as a use of it.
    fn peek(&self, path: &Path) -> Option<Arc<DirectoryView>> {
        self.directories.peek(path).cloned()
    }

    fn put(&mut self, path: &Path, directory: Arc<DirectoryView>) {
        let weight = |directory: &DirectoryView| BYTES_PER_DIRECTORY + directory.memory_bytes();
        self.used_bytes += weight(&directory);
        if let Some(old) = self.directories.put(path.to_path_buf(), directory) {
            self.used_bytes -= weight(&old);
        }
        while self.used_bytes > self.limit_bytes && self.directories.len() > MIN_DIRECTORIES {
            let Some((_, oldest)) = self.directories.pop_lru() else { return };
            self.used_bytes -= weight(&oldest);
        }
    }
}

impl DirectoryStore {
    pub fn new(context: ViewContext, cache_bytes: u64) -> DirectoryStore {
        let [min, max] = DIRECTORY_CACHE_BYTES;
        let limit_bytes = cache_bytes.clamp(min, max) as usize;
        let directories = LruCache::unbounded();
        let cache = Mutex::new(DirectoryCache { directories, used_bytes: 0, limit_bytes });
        DirectoryStore { context, cache }
    }

    /// Asks a directory, and again if it is no longer what was read.
    pub fn query<T>(
        &self,
        path: &Path,
        ask: impl Fn(DirectoryQuery<'_>) -> Result<T, QueryError>,
    ) -> Result<T, ViewError> {
        let context = &self.context;
        let mut directory = self.current(path, None)?;
        for tries_left in (0..MAX_READ_TRIES).rev() {
            let is_last = tries_left == 0;
            match ask(DirectoryQuery { context, directory: &directory, is_last }) {
                Ok(answer) => return Ok(answer),
                Err(QueryError::Failed(error)) => return Err(error),
                Err(QueryError::Stale) => directory = self.current(path, Some(&directory))?,
            }
        }
        Err(ViewError::KeepsChanging { path: context.root.shown_path(path) })
    }

    /// The directory as it is now, but not `stale`.
    fn current(
        &self,
        path: &Path,
        stale: Option<&Arc<DirectoryView>>,
    ) -> Result<Arc<DirectoryView>, ViewError> {
        let known = lock(&self.cache).get(path);
        let metadata = self.context.metadata(path)?;
        let recipe = self.context.known_recipe();
        if let Some(known) = &known
            && !stale.is_some_and(|stale| Arc::ptr_eq(stale, known))
            && known.matches(&metadata, &recipe)
        {
            return Ok(Arc::clone(known));
        }
        let mut new =
            DirectoryView::read(&self.context, path, &metadata, &recipe, known.as_deref())?;
        let mut cache = lock(&self.cache);
        // Another thread may have read it meanwhile; what that began to parse is not parsed again.
        if let Some(other) = cache.get(path)
            && !known.is_some_and(|known| Arc::ptr_eq(&other, &known))
        {
            if other.matches(&metadata, &recipe) {
                return Ok(other);
            }
            new.adopt_outcomes(&other);
        }
        let new = Arc::new(new);
        cache.put(path, Arc::clone(&new));
        Ok(new)
    }

    /// The metadata with the time of the last change, if it is that of a directory whose own timestamp does not
    /// show the change. Programs that compare a directory's time do not look at its names, so checkpoints that
    /// were read and have changed are read again first.
    pub fn with_change_time(&self, path: &Path, metadata: FileMetadata) -> FileMetadata {
        if metadata.kind != FileKind::Directory {
            return metadata;
        }
        let known = lock(&self.cache).peek(path);
        if known.is_some_and(|known| !known.is_fresh(&self.context.root)) {
            // An error is for those that ask for the names.
            let _ = self.query(path, |query| query.refresh());
        }
        self.with_known_change_time(path, metadata)
    }

    /// The metadata of a directory with the time of its last known change. Reads nothing.
    pub fn with_known_change_time(&self, path: &Path, mut metadata: FileMetadata) -> FileMetadata {
        if let Some(changed) = self.context.last_change(path)
            && changed > metadata.mtime
        {
            metadata.mtime = changed;
            metadata.ctime = metadata.ctime.max(changed);
        }
        metadata
    }

    /// Invalidates what is known of the files of a virtual file.
    pub fn invalidate(&self, directory: &Path, name: &OsStr) {
        let known = lock(&self.cache).peek(directory);
        if let Some(known) = known {
            known.invalidate(name);
        }
    }

    /// Adds up the outcomes that are known.
    pub fn counts(&self) -> CheckpointCounts {
        let mut counts = CheckpointCounts::default();
        for (_, directory) in &lock(&self.cache).directories {
            directory.count(&mut counts);
        }
        counts
    }

    /// Why files of a recipe are not shown, or not in their newest version, as far as it is known.
    pub fn recipe_refusals(&self) -> Vec<Arc<Refusal>> {
        let cache = lock(&self.cache);
        let directories = || cache.directories.iter().map(|(_, directory)| directory);
        let files = directories().flat_map(|directory| &directory.files);
        let files = files.filter(|file| file.plan.recipe().is_some());
        let refusals = files.filter_map(|file| match file.known_outcome()? {
            BuildOutcome::Refused(refusal) => Some(refusal),
            BuildOutcome::VirtualFile(summary) => summary.withheld(),
        });
        let misplaced = directories().flat_map(|directory| &directory.misplaced_recipes);
        refusals.chain(misplaced).map(Arc::clone).collect()
    }

    /// Why a file of a recipe is not shown, as far as it is known.
    pub fn recipe_refusal_of(&self, file: &RecipeFile) -> Option<Arc<Refusal>> {
        let cache = lock(&self.cache);
        let files = cache.directories.iter().flat_map(|(_, directory)| &directory.files);
        let is_its = |planned: &&Arc<PlannedFile>| {
            planned.plan.recipe().is_some_and(|plan| plan.file.path == file.path)
        };
        let mut outcomes = files.filter(is_its).filter_map(|planned| planned.known_outcome());
        outcomes.find_map(|outcome| match outcome {
            BuildOutcome::Refused(refusal) => Some(Arc::clone(refusal)),
            BuildOutcome::VirtualFile(_) => None,
        })
    }

    /// Whether a name stands for a virtual file. Not where the directory cannot be read.
    pub fn has_virtual_file(&self, directory: &Path, name: &OsStr) -> bool {
        self.query(directory, |query| query.has_virtual_file(name)).unwrap_or(false)
    }

    /// Whether a name of the source is shown as it is. Not where the directory cannot be read.
    pub fn shows_as_is(&self, directory: &Path, name: &OsStr) -> bool {
        self.query(directory, |query| self.query_shows_as_is(&query, name)).unwrap_or(false)
    }

    /// Whether a name of the source is shown as it is.
    pub fn query_shows_as_is(
        &self,
        query: &DirectoryQuery<'_>,
        name: &OsStr,
    ) -> Result<bool, QueryError> {
        let directory = query.directory;
        Ok(directory.names.find(name).is_ok()
            && !query.is_hidden_original(name)?
            && self.hidden_note_reason(directory, name).is_none())
    }

    /// Why a hub's note is hidden: it contradicts what the view shows. Only the outcomes of checkpoints are
    /// asked for, so that links and notes cannot lead round in circles.
    pub fn hidden_note_reason(
        &self,
        directory: &DirectoryView,
        name: &OsStr,
    ) -> Option<&'static str> {
        match directory.hub_notes.as_ref()? {
            HubNotes::Absent { revision } => self
                .has_virtual_file(revision, name)
                .then_some("marks a name as absent that the view shows"),
            HubNotes::Trees { revisions } => {
                let revision = name.to_str()?.strip_suffix(".json")?;
                self.hides_originals_beneath(&revisions.join(revision))
                    .then_some("lists originals that the view hides")
            }
        }
    }

    /// Whether a directory hides originals, or one beneath it. Directories that cannot be read hide nothing.
    fn hides_originals_beneath(&self, directory: &Path) -> bool {
        let mut pending = vec![directory.to_path_buf()];
        let mut searched = 0;
        while let Some(path) = pending.pop() {
            searched += 1;
            let hides = self.query(&path, |query| {
                let folders: Vec<OsString> =
                    query.directory.directories().map(OsStr::to_owned).collect();
                Ok((query.hides_originals()?, folders))
            });
            let Ok((hides, folders)) = hides else { continue };
            if hides || searched > MAX_SEARCHED_DIRECTORIES {
                return true;
            }
            pending.extend(folders.into_iter().map(|folder| path.join(folder)));
        }
        false
    }
}
