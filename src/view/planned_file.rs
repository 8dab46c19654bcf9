//! A planned virtual file, and what came of it: a virtual file, or a refusal and its reason.
//!
//! Either holds as long as the files that it was made of are what they were.

use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, OnceLock};
use std::time::{Duration, Instant, SystemTime};

use crate::checkpoint::damaged_delta_count;
use crate::source::{self, FileKind, FileMetadata, FileState, OpenFile, Root, SourceError};
use crate::threads::lock;
use crate::virtual_file::Digest;

use super::context::ViewContext;
use super::error::{Refusal, ViewError};
use super::recipe_open::watches_all_versions;
use super::rules::VirtualFilePlan;
use super::shown_file::{ShownFile, VirtualFileSummary, with_size};

/// How long the metadata of a checkpoint's files is believed. A change must show within a second, and the
/// kernel asks twice a second for each name in use.
const MAX_STAT_AGE: Duration = Duration::from_millis(100);

/// What was read from unsettled files is read again after this many times the duration of that read.
const REREAD_FACTOR: u32 = 10;

/// The least time until unsettled files are read again.
const MIN_REREAD_DELAY: Duration = Duration::from_millis(250);

/// A plan, and what came of it.
#[derive(Debug)]
pub struct PlannedFile {
    pub plan: VirtualFilePlan,
    /// The files that it is made of, from the root.
    files: Vec<PathBuf>,
    result: OnceLock<BuildResult>,
    snapshot: Mutex<Option<StatSnapshot>>,
    /// A reader found other bytes than those that were parsed, under an unchanged state.
    is_outdated: AtomicBool,
    superseded: Option<Superseded>,
}

/// The last look at the files.
#[derive(Debug)]
struct StatSnapshot {
    /// `None` once the snapshot is invalidated.
    taken_at: Option<Instant>,
    metadata: Arc<FileMetadata>,
}

/// What the name showed before the files changed.
#[derive(Clone, Debug)]
struct Superseded {
    changed_at: ChangeTime,
    previous: BuildOutcome,
}

/// When files changed; `None` if they were only touched: moved, linked, given other permissions.
type ChangeTime = Option<SystemTime>;

#[derive(Debug)]
struct BuildResult {
    /// The state of each of the files, as it was before they were read.
    states: Vec<Option<FileState>>,
    outcome: BuildOutcome,
    /// When unsettled files are read again although their states are equal; `None` if the files were settled.
    expires: Option<Instant>,
    /// The number of damaged deltas known before the build, if it is the newest version of a chain.
    damaged_count: Option<u64>,
    /// Whether their store failed. Then listings read them again, too: they wait for an outage together.
    may_pass: bool,
}

/// What came of a planned file.
#[derive(Clone, Debug)]
pub enum BuildOutcome {
    VirtualFile(Arc<VirtualFileSummary>),
    Refused(Arc<Refusal>),
}

impl BuildOutcome {
    pub fn is_virtual_file(&self) -> bool {
        matches!(self, BuildOutcome::VirtualFile(_))
    }

    fn identity(&self) -> Option<Digest> {
        match self {
            BuildOutcome::VirtualFile(summary) => Some(summary.identity()),
            BuildOutcome::Refused(_) => None,
        }
    }

    fn is_refused_for(&self, reason: &str) -> bool {
        matches!(self, BuildOutcome::Refused(refusal) if refusal.reason == reason)
    }
}

impl PlannedFile {
    /// A plan for files of a directory that nothing is known of yet.
    pub fn new(directory: &Path, plan: VirtualFilePlan) -> PlannedFile {
        PlannedFile {
            files: plan.watched_paths(directory),
            plan,
            result: OnceLock::new(),
            snapshot: Mutex::new(None),
            is_outdated: AtomicBool::new(false),
            superseded: None,
        }
    }

    /// Replaces the former plan for the same name; returns the former one if it still holds.
    pub fn replan(
        former: &Arc<PlannedFile>,
        root: &Root,
        directory: &Path,
        plan: VirtualFilePlan,
    ) -> Arc<PlannedFile> {
        let is_same = former.plan == plan;
        let superseded = match former.result.get() {
            None if is_same => return Arc::clone(former),
            None => former.superseded.clone(),
            Some(result) => {
                // Another plan comes of other names, or of an index that was written since the last look.
                let changed = match is_same {
                    true if former.is_expired() => Some(Some(SystemTime::now())),
                    true => former.check_unchanged(root, result).err(),
                    false => former.compare_states(root, result).err(),
                };
                if is_same && changed.is_none() {
                    return Arc::clone(former);
                }
                let previous = result.outcome.clone();
                changed.map(|changed_at| Superseded { changed_at, previous })
            }
        };
        Arc::new(PlannedFile { superseded, ..PlannedFile::new(directory, plan) })
    }

    /// What came of the plan: built now if it was not. Threads that ask meanwhile wait for that.
    /// `None` if the files have changed since: then the plan is for what is gone.
    pub fn outcome(&self, context: &ViewContext, directory: &Path) -> Option<BuildOutcome> {
        let result = self.result.get_or_init(|| self.build(context, directory));
        self.check_unchanged(&context.root, result).ok()?;
        Some(result.outcome.clone())
    }

    /// Whether unsettled files are to be read again although they look the same. Only looking up one name asks
    /// this: a listing of many would never end.
    pub fn is_expired(&self) -> bool {
        let expires = self.result.get().and_then(|result| result.expires);
        expires.is_some_and(|at| self.is_outdated.load(Ordering::Relaxed) || Instant::now() >= at)
    }

    /// Whether a store failed it, and is to be asked again by now. Listings ask this, too.
    pub fn is_retry_due(&self) -> bool {
        self.result.get().is_some_and(|result| result.may_pass) && self.is_expired()
    }

    /// Whether the outcome still holds, if there is one.
    pub fn is_fresh(&self, root: &Root) -> bool {
        match self.result.get() {
            Some(_) if self.is_retry_due() => false,
            Some(result) => self.check_unchanged(root, result).is_ok(),
            // Until it is built, what the name showed before is not known to have changed.
            None => self.superseded.is_none(),
        }
    }

    /// Whether it was built, or took the place of what was.
    pub fn was_requested(&self) -> bool {
        self.result.get().is_some() || self.superseded.is_some()
    }

    /// The refusal of files that never stay the same long enough to be read.
    pub fn unstable_refusal(&self, context: &ViewContext, directory: &Path) -> BuildOutcome {
        let path = context.root.shown_path(&directory.join(self.plan.source_name()));
        let error = ViewError::KeepsChanging { path };
        BuildOutcome::Refused(Arc::new(Refusal::new(self.plan.original_names(), &error)))
    }

    /// The outcome, if there is one.
    pub fn known_outcome(&self) -> Option<&BuildOutcome> {
        self.result.get().map(|result| &result.outcome)
    }

    /// The virtual file with the present metadata of its sources.
    pub fn shown_file(&self, summary: &Arc<VirtualFileSummary>) -> Option<ShownFile> {
        let metadata = Arc::clone(&lock(&self.snapshot).as_ref()?.metadata);
        Some(ShownFile::new(summary, metadata))
    }

    /// Invalidates the last look at the files, and the outcome if the files were not settled.
    pub fn invalidate(&self) {
        self.is_outdated.store(true, Ordering::Relaxed);
        if let Some(snapshot) = lock(&self.snapshot).as_mut() {
            snapshot.taken_at = None;
        }
    }

    fn build(&self, context: &ViewContext, directory: &Path) -> BuildResult {
        let is_chain = self.plan.recipe().is_some_and(|recipe| recipe.file.versions.is_some());
        let damaged_count = is_chain.then(damaged_delta_count);
        let settled = self.settled_states(&context.root);
        let states: Vec<Option<FileState>> = self
            .stat_files(&context.root)
            .into_iter()
            .map(|metadata| metadata.map(|metadata| metadata.state()))
            .collect();
        // It is unsettled, too, if a folder that the recipe names is missing, or a version came after the plan.
        let recipe = self.plan.recipe();
        let is_current =
            recipe.is_none_or(|plan| watches_all_versions(&context.root, &context.base, plan));
        let is_settled = settled == states && is_current;
        let started = Instant::now();
        let previous = self.superseded.as_ref().map(|superseded| &superseded.previous);
        let mut may_pass = false;
        let outcome = match VirtualFileSummary::read(context, directory, &self.plan, is_settled) {
            Ok(summary) => {
                for note in summary.notes() {
                    tracing::info!(name = self.plan.name, note, "shown");
                }
                BuildOutcome::VirtualFile(Arc::new(summary))
            }
            Err(error) => {
                may_pass = error.may_pass();
                let refusal = Refusal::new(self.plan.original_names(), &error);
                if !error.is_outage() {
                    self.log_refusal(&refusal, previous);
                }
                BuildOutcome::Refused(Arc::new(refusal))
            }
        };
        let delay = || match may_pass {
            true => MIN_REREAD_DELAY,
            false => MIN_REREAD_DELAY.max(started.elapsed() * REREAD_FACTOR),
        };
        let expires = (!is_settled || may_pass).then(|| Instant::now() + delay());
        if let Some(Superseded { changed_at: Some(time), previous }) = &self.superseded
            && previous.identity() != outcome.identity()
        {
            context.record_change(directory, *time);
        }
        BuildResult { states, outcome, expires, damaged_count, may_pass }
    }

    fn log_refusal(&self, refusal: &Refusal, previous: Option<&BuildOutcome>) {
        let Refusal { reason, remedy, is_not_checkpoint, .. } = refusal;
        let name = self.plan.source_name();
        let is_logged = previous.is_some_and(|previous| previous.is_refused_for(reason));
        if *is_not_checkpoint || is_logged {
            tracing::debug!(name, reason, "stays as it is");
        } else {
            tracing::warn!(name, reason, remedy, "refused, stays as it is");
        }
    }

    /// The state of each settled file; `None` for the others.
    fn settled_states(&self, root: &Arc<Root>) -> Vec<Option<FileState>> {
        let settled = |file: &PathBuf| {
            match OpenFile::open_in_root(root, file) {
                Ok(file) => source::is_settled(&file).then(|| file.file().state()),
                // A folder has no bytes that a write could be changing.
                Err(SourceError::NotAFile { .. }) => {
                    let state = root.metadata(file).ok()?.state();
                    source::is_past_clock_step(&state).then_some(state)
                }
                Err(_) => None,
            }
        };
        self.files.iter().map(settled).collect()
    }

    fn stat_files(&self, root: &Root) -> Vec<Option<FileMetadata>> {
        self.files.iter().map(|file| root.metadata(file).ok()).collect()
    }

    /// Compares the files with what they were, if the last look is too old. An error is a change.
    fn check_unchanged(&self, root: &Root, result: &BuildResult) -> Result<(), ChangeTime> {
        if result.damaged_count.is_some_and(|count| count != damaged_delta_count()) {
            return Err(Some(SystemTime::now()));
        }
        let taken_at = lock(&self.snapshot).as_ref().and_then(|snapshot| snapshot.taken_at);
        if taken_at.is_some_and(|at| at.elapsed() < MAX_STAT_AGE) {
            return Ok(());
        }
        let files = self.compare_states(root, result)?;
        let size = match &result.outcome {
            BuildOutcome::VirtualFile(summary) => summary.size(),
            BuildOutcome::Refused(_) => 0,
        };
        if let Some(merged) = merged_metadata(&files, size) {
            let metadata = Arc::new(merged);
            *lock(&self.snapshot) = Some(StatSnapshot { taken_at: Some(Instant::now()), metadata });
        }
        Ok(())
    }

    /// The present metadata of the files, or the time of the latest change.
    fn compare_states(
        &self,
        root: &Root,
        result: &BuildResult,
    ) -> Result<Vec<FileMetadata>, ChangeTime> {
        let mut files = Vec::new();
        let mut change: Option<ChangeTime> = None;
        for (file, then) in self.files.iter().zip(&result.states) {
            let now = root.metadata(file);
            // What cannot be found out is no change.
            if now.as_ref().is_err_and(SourceError::may_pass) {
                continue;
            }
            let now = now.ok();
            files.push(now);
            let state = now.as_ref().map(FileMetadata::state);
            if state == *then {
                continue;
            }
            let identity = |state: Option<FileState>| state.map(|state| state.identity);
            let is_touched = identity(state) == identity(*then);
            // Programs that fetch files set the time of a write back; the time of that setting shows it.
            let time = now.map_or_else(SystemTime::now, |now| now.mtime.max(now.ctime));
            change = change.max(Some((!is_touched).then_some(time)));
        }
        match change {
            Some(change) => Err(change),
            None => Ok(files.into_iter().flatten().collect()),
        }
    }
}

/// The metadata of a file made of others: the owner of the first, what all of them permit, and the times of
/// the newest.
fn merged_metadata(files: &[FileMetadata], size: u64) -> Option<FileMetadata> {
    let mut merged = *files.first()?;
    for file in files {
        merged.mode &= file.mode;
        merged.mtime = merged.mtime.max(file.mtime);
        merged.ctime = merged.ctime.max(file.ctime);
        merged.atime = merged.atime.max(file.atime);
    }
    merged.kind = FileKind::File;
    merged.mode &= 0o777;
    merged.links = 1;
    Some(with_size(merged, size))
}
