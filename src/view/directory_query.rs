//! One question to a directory about what came of its checkpoints, which parses them if nothing has yet.

use std::ffi::OsStr;
use std::num::NonZeroUsize;
use std::path::Path;
use std::sync::Arc;

use crate::threads::parallel_map;

use super::context::ViewContext;
use super::directory::DirectoryView;
use super::error::ViewError;
use super::planned_file::{BuildOutcome, PlannedFile};
use super::recipe_plan::CONFIG_NAME;
use super::shown_file::VirtualFileSummary;

/// Threads that parse the checkpoints of a directory: most of the work is waiting for the disk.
pub const MAX_PARSER_THREADS: usize = 8;

/// A directory that is asked.
#[derive(Clone, Copy, Debug)]
pub struct DirectoryQuery<'a> {
    pub context: &'a ViewContext,
    pub directory: &'a DirectoryView,
    /// Whether this is the last try. Then files that never stay the same are refused and not stale, so that they do not
    /// keep the rest from being shown.
    pub is_last: bool,
}

/// Why a directory gives no answer.
#[derive(Debug)]
pub enum QueryError {
    /// Files have changed, and the directory must be read again.
    Stale,
    Failed(ViewError),
}

impl From<ViewError> for QueryError {
    fn from(error: ViewError) -> QueryError {
        QueryError::Failed(error)
    }
}

/// A planned file that became a virtual file.
pub struct BuiltFile<'a> {
    pub file: &'a PlannedFile,
    pub summary: Arc<VirtualFileSummary>,
}

impl<'a> DirectoryQuery<'a> {
    /// Reads again what was read and has changed.
    pub fn refresh(&self) -> Result<(), QueryError> {
        let mut requested = self.directory.files.iter().filter(|file| file.was_requested());
        requested.try_for_each(|file| self.outcome(file).map(drop))
    }

    /// The outcome of each planned file, in their order. Several threads parse those that are not known.
    pub fn outcomes(&self) -> Result<Vec<BuildOutcome>, QueryError> {
        let files = &self.directory.files;
        let unknown = files.iter().filter(|file| file.known_outcome().is_none()).count();
        if unknown > 1 {
            let cores = std::thread::available_parallelism().map_or(1, NonZeroUsize::get);
            let threads = unknown.min(MAX_PARSER_THREADS).min(2 * cores);
            let build = |file: &Arc<PlannedFile>| {
                // For its effect; the outcome is asked for below.
                drop(file.outcome(self.context, &self.directory.path));
            };
            parallel_map(files, threads, build);
        }
        files.iter().map(|file| self.outcome(file)).collect()
    }

    /// The virtual file of a name, if the name stands for one.
    pub fn virtual_file(&self, name: &OsStr) -> Result<Option<BuiltFile<'a>>, QueryError> {
        let Some(&n) = self.directory.virtual_files.get(name) else { return Ok(None) };
        if self.directory.files[n].is_expired() && !self.is_last {
            return Err(QueryError::Stale);
        }
        self.build_file(n)
    }

    /// The virtual file whose index stays by this name, if any.
    pub fn indexed_file(&self, name: &OsStr) -> Result<Option<BuiltFile<'a>>, QueryError> {
        let Some(&n) = self.directory.indexes.get(name) else { return Ok(None) };
        self.build_file(n)
    }

    /// The file whose recipe shows a configuration by this name, if any.
    pub fn config_file(&self, name: &OsStr) -> Result<Option<BuiltFile<'a>>, QueryError> {
        match self.directory.config.filter(|_| name == CONFIG_NAME) {
            Some(n) => self.build_file(n),
            None => Ok(None),
        }
    }

    /// The directory from the root that has a name which a recipe shows beside its file, if any.
    pub fn beside_directory(&self, name: &OsStr) -> Result<Option<&'a Path>, QueryError> {
        let Some(&n) = self.directory.beside.get(name) else { return Ok(None) };
        let built = self.build_file(n)?;
        Ok(built.and_then(|built| Some(&*built.file.plan.recipe()?.beside_directory)))
    }

    /// Whether a name stands for a virtual file.
    pub fn has_virtual_file(&self, name: &OsStr) -> Result<bool, QueryError> {
        let Some(&n) = self.directory.virtual_files.get(name) else { return Ok(false) };
        Ok(self.outcome(&self.directory.files[n])?.is_virtual_file())
    }

    /// Whether a name is that of an original whose virtual file hides it.
    pub fn is_hidden_original(&self, name: &OsStr) -> Result<bool, QueryError> {
        let Some(&n) = self.directory.originals.get(name) else { return Ok(false) };
        let outcome = self.outcome(&self.directory.files[n])?;
        Ok(outcome.is_virtual_file() && !self.context.options.show_originals)
    }

    /// Whether the directory hides any original.
    pub fn hides_originals(&self) -> Result<bool, QueryError> {
        let is_virtual = self.outcomes()?.iter().any(BuildOutcome::is_virtual_file);
        Ok(is_virtual && !self.context.options.show_originals)
    }

    /// Builds a planned file, unless that was done; `None` if it is refused.
    fn build_file(&self, n: usize) -> Result<Option<BuiltFile<'a>>, QueryError> {
        let file = &*self.directory.files[n];
        Ok(match self.outcome(file)? {
            BuildOutcome::VirtualFile(summary) => Some(BuiltFile { file, summary }),
            BuildOutcome::Refused(_) => None,
        })
    }

    fn outcome(&self, file: &PlannedFile) -> Result<BuildOutcome, QueryError> {
        if file.is_retry_due() && !self.is_last {
            return Err(QueryError::Stale);
        }
        let path = &self.directory.path;
        match file.outcome(self.context, path) {
            Some(outcome) => Ok(outcome),
            None if self.is_last => Ok(file.unstable_refusal(self.context, path)),
            None => Err(QueryError::Stale),
        }
    }
}
