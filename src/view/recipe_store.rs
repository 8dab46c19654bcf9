//! The recipe of a view, read from its file, and read again when the file changes.

use std::collections::{BTreeMap, BTreeSet};
use std::ffi::OsString;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant, SystemTime};

use crate::recipe::{MAX_RECIPE_BYTES, Recipe, RecipeError, RecipeFile, RecipeLocation};
use crate::source::{OpenFile, ReadAt, Root, SourceError};
use crate::threads::lock;

use super::error::Refusal;
use super::options::RecipeSource;

/// The name of the recipe in a source. It is used only if the user asks for it.
const AUTO_RECIPE_NAME: &str = ".ckptfs.toml";

/// The time after which the file is read again. A change must show within a second.
const MAX_RECIPE_AGE: Duration = Duration::from_millis(100);

/// The same in a store, where each look is a request.
const MAX_REMOTE_RECIPE_AGE: Duration = Duration::from_secs(1);

/// Reads the recipe of a view.
#[derive(Debug)]
pub struct RecipeStore {
    source: Option<RecipeSource>,
    /// Where the recipe lies, if it is a file that was named.
    location: Option<RecipeLocation>,
    state: Mutex<RecipeState>,
    /// Whether a thread reads the recipe again. A filesystem that hangs keeps only that one waiting.
    is_refreshing: AtomicBool,
}

#[derive(Debug)]
struct RecipeState {
    checked_at: Option<Instant>,
    /// The text that was parsed last, or why it could not be read.
    text: Option<Result<Vec<u8>, String>>,
    snapshot: Arc<RecipeSnapshot>,
}

/// A recipe as it was at one time.
#[derive(Debug)]
pub struct RecipeSnapshot {
    /// Differs between two recipes.
    pub generation: u64,
    /// When it was first seen.
    pub seen_at: SystemTime,
    pub files: Vec<Arc<RecipeFile>>,
    /// Why nothing of it is shown.
    pub refusal: Option<Arc<Refusal>>,
}

/// What a recipe shows in one directory.
#[derive(Debug, Default)]
pub struct DirectoryRecipes {
    pub files: Vec<Arc<RecipeFile>>,
    /// Names of directories that files lie beneath, and these files.
    pub directories: BTreeMap<OsString, Vec<Arc<RecipeFile>>>,
}

impl RecipeSnapshot {
    fn new(generation: u64, files: Vec<RecipeFile>) -> RecipeSnapshot {
        let files = files.into_iter().map(Arc::new).collect();
        RecipeSnapshot { generation, seen_at: SystemTime::now(), files, refusal: None }
    }

    /// What it shows in a directory, by its path in the view.
    pub fn in_directory(&self, directory: &Path) -> DirectoryRecipes {
        let mut found = DirectoryRecipes::default();
        for file in &self.files {
            let Ok(rest) = file.path.as_path().strip_prefix(directory) else { continue };
            let mut names = rest.components().map(|part| part.as_os_str().to_owned());
            match (names.next(), names.next()) {
                (Some(_), None) => found.files.push(Arc::clone(file)),
                (Some(name), Some(_)) => {
                    found.directories.entry(name).or_default().push(Arc::clone(file));
                }
                _ => {}
            }
        }
        found
    }

    /// Whether a file lies beneath a path in the view.
    pub fn has_directory(&self, path: &Path) -> bool {
        self.directories().any(|directory| directory == path)
    }

    /// The directories in the view that it shows something in. Some come more than once.
    fn directories(&self) -> impl Iterator<Item = &Path> {
        self.files.iter().flat_map(|file| file.path.as_path().ancestors().skip(1))
    }
}

impl RecipeStore {
    pub fn new(source: Option<RecipeSource>) -> RecipeStore {
        let snapshot = Arc::new(RecipeSnapshot::new(0, Vec::new()));
        let state = Mutex::new(RecipeState { checked_at: None, text: None, snapshot });
        let location = match &source {
            Some(RecipeSource::File(path)) => Some(RecipeLocation::new(path)),
            _ => None,
        };
        RecipeStore { source, location, state, is_refreshing: AtomicBool::new(false) }
    }

    /// The recipe as it is now, and the directories in the view that changed with it.
    pub fn refresh(
        &self,
        root: &Arc<Root>,
        base: &Path,
    ) -> (Arc<RecipeSnapshot>, BTreeSet<PathBuf>) {
        let is_remote = root.descriptor().is_none();
        let max_age = if is_remote { MAX_REMOTE_RECIPE_AGE } else { MAX_RECIPE_AGE };
        let (known, number) = {
            let mut state = lock(&self.state);
            let known = Arc::clone(&state.snapshot);
            let is_recent = state.checked_at.is_some_and(|at| at.elapsed() < max_age);
            if self.source.is_none() || is_recent {
                return (known, BTreeSet::new());
            }
            // Meanwhile other threads use the known recipe, except for the first time.
            if state.text.is_some() {
                if self.is_refreshing.swap(true, Ordering::AcqRel) {
                    return (known, BTreeSet::new());
                }
                state.checked_at = Some(Instant::now());
            }
            (known, state.snapshot.generation + 1)
        };
        let refreshed = self.read_again(root, base, known, number);
        self.is_refreshing.store(false, Ordering::Release);
        refreshed
    }

    /// Reads the recipe, and parses it if it differs from the known one. `number` is that of a new snapshot.
    fn read_again(
        &self,
        root: &Arc<Root>,
        base: &Path,
        known: Arc<RecipeSnapshot>,
        number: u64,
    ) -> (Arc<RecipeSnapshot>, BTreeSet<PathBuf>) {
        let text = self.read(root, base).map_err(|error| error.to_string());
        if lock(&self.state).text.as_ref() == Some(&text) {
            return (known, BTreeSet::new());
        }
        let new = Arc::new(self.parse(number, &text));
        let directories = known.directories().chain(new.directories());
        let mut changed: BTreeSet<_> = directories.map(Path::to_path_buf).collect();
        changed.insert(PathBuf::new());
        let mut state = lock(&self.state);
        let is_first = state.text.is_none();
        if state.snapshot.generation >= number {
            return (Arc::clone(&state.snapshot), BTreeSet::new());
        }
        state.text = Some(text);
        state.checked_at = Some(Instant::now());
        state.snapshot = Arc::clone(&new);
        drop(state);
        if let Some(refusal) = &new.refusal {
            tracing::warn!(reason = refusal.reason, remedy = refusal.remedy, "a recipe is refused");
        }
        (new, if is_first { BTreeSet::new() } else { changed })
    }

    /// The recipe as it was last seen.
    pub fn known(&self) -> Arc<RecipeSnapshot> {
        Arc::clone(&lock(&self.state).snapshot)
    }

    /// The text of the recipe. Empty for `auto` without a recipe in the source.
    fn read(&self, root: &Arc<Root>, base: &Path) -> Result<Vec<u8>, RecipeError> {
        if let Some(location) = &self.location {
            return location.read_text();
        }
        match &self.source {
            Some(RecipeSource::Auto) => {
                match OpenFile::open_in_root(root, &base.join(AUTO_RECIPE_NAME)) {
                    Ok(file) if file.size() > MAX_RECIPE_BYTES => {
                        let path = file.file().path();
                        Err(RecipeError::TooLong { path, limit: MAX_RECIPE_BYTES })
                    }
                    Ok(file) => Ok(file.read_whole()?.to_vec()),
                    Err(SourceError::Missing { .. }) => Ok(Vec::new()),
                    Err(error) => Err(error.into()),
                }
            }
            _ => Ok(Vec::new()),
        }
    }

    fn parse(&self, generation: u64, text: &Result<Vec<u8>, String>) -> RecipeSnapshot {
        let refused = |path: &Path, reason: String, remedy: String| {
            let refusal = Refusal {
                path: path.to_path_buf(),
                originals: Vec::new(),
                reason,
                remedy,
                is_not_checkpoint: false,
            };
            let refusal = Some(Arc::new(refusal));
            RecipeSnapshot { refusal, ..RecipeSnapshot::new(generation, Vec::new()) }
        };
        let path = match &self.source {
            Some(RecipeSource::Fixed(recipe)) => {
                return RecipeSnapshot::new(generation, recipe.files.clone());
            }
            Some(RecipeSource::File(path)) => path.as_path(),
            Some(RecipeSource::Auto) => Path::new(AUTO_RECIPE_NAME),
            None => return RecipeSnapshot::new(generation, Vec::new()),
        };
        let text = match text {
            Ok(text) if text.is_empty() && matches!(self.source, Some(RecipeSource::Auto)) => {
                return RecipeSnapshot::new(generation, Vec::new());
            }
            Ok(text) => text,
            Err(reason) => {
                let remedy = "make the recipe readable: the view returns within a second";
                return refused(path, reason.clone(), remedy.to_owned());
            }
        };
        match Recipe::parse(text, path) {
            Ok(recipe) => RecipeSnapshot::new(generation, recipe.files),
            Err(error) => refused(path, error.to_string(), error.remedy().into_owned()),
        }
    }
}
