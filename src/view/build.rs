//! What became of a checkpoint that was to be an image: an image, or a refusal and why.
//!
//! Either holds as long as the files that it was made of are what they were.

use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, OnceLock, Weak};
use std::time::{Duration, Instant, SystemTime};

use crate::checkpoint::{self, Checkpoint, Format, ParseOptions};
use crate::source::{FileKind, FileMetadata, FileState, OpenFile, Root};
use crate::threads::lock;
use crate::virtual_file::{Digest, VirtualFile};

use super::rules::VirtualFilePlan;
use super::{View, ViewError, virtual_index};

/// How long a look at the files of a checkpoint is good for: within a second a change must show, and
/// the kernel asks twice a second for each name in use.
const MAX_STAT_AGE: Duration = Duration::from_millis(100);

/// What was read from unsettled files is read again after this many times the duration of that read.
const REREAD_FACTOR: u32 = 10;

/// The least time until unsettled files are read again.
const MIN_REREAD_DELAY: Duration = Duration::from_millis(250);

/// A plan, and what became of it.
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
    /// When it was; nothing if it is not good any more.
    taken_at: Option<Instant>,
    metadata: Arc<FileMetadata>,
}

/// What was shown by the name before the files changed.
#[derive(Clone, Debug)]
struct Superseded {
    changed_at: ChangeTime,
    previous: BuildOutcome,
}

/// When files changed; nothing if they were only touched: moved, linked, given other permissions.
type ChangeTime = Option<SystemTime>;

#[derive(Debug)]
struct BuildResult {
    /// The state of each of the files, as it was before they were read.
    states: Vec<Option<FileState>>,
    outcome: BuildOutcome,
    /// When unsettled files are read again although their states are equal; `None` if the files were settled.
    expires: Option<Instant>,
}

#[derive(Clone, Debug)]
pub enum BuildOutcome {
    VirtualFile(Arc<VirtualFileSummary>),
    Refused(Arc<Refusal>),
}

impl BuildOutcome {
    /// The identity of the virtual file, if it is one.
    fn identity(&self) -> Option<Digest> {
        match self {
            BuildOutcome::VirtualFile(facts) => Some(facts.identity),
            BuildOutcome::Refused(_) => None,
        }
    }

    /// Whether it was refused for this reason.
    fn is_refused_for(&self, reason: &str) -> bool {
        matches!(self, BuildOutcome::Refused(refusal) if refusal.reason == reason)
    }
}

/// What is known of an image without holding it.
#[derive(Debug)]
pub struct VirtualFileSummary {
    /// The directory's way from the root, and the candidate: to read it again.
    directory: PathBuf,
    plan: VirtualFilePlan,
    options: ParseOptions,
    size: u64,
    /// Bytes of the index that names the image, where there is one.
    index_size: u64,
    identity: Digest,
    layout: Digest,
    tensors: usize,
    format: Format,
    notes: Vec<String>,
    /// Whether every change to its files since they were read shows in their states.
    is_settled: bool,
    virtual_file: Mutex<Weak<VirtualFile>>,
}

/// A checkpoint that stays as it is.
#[derive(Debug)]
pub struct Refusal {
    /// The path to show to people.
    pub path: PathBuf,
    /// The names of its files.
    pub originals: Vec<String>,
    /// Why it cannot be shown.
    pub reason: String,
    /// What can be done.
    pub remedy: String,
    /// Whether it is something else altogether, so that there was nothing to refuse.
    pub is_not_checkpoint: bool,
}

/// An image as it is shown now.
#[derive(Clone, Debug)]
pub struct ShownFile {
    summary: Arc<VirtualFileSummary>,
    metadata: Arc<FileMetadata>,
    is_index: bool,
}

impl PlannedFile {
    pub fn new(way: &Path, plan: VirtualFilePlan) -> PlannedFile {
        let files = plan.candidate.original_names();
        let files = files.into_iter().map(|name| way.join(name)).collect();
        let (made, looked) = (OnceLock::new(), Mutex::new(None));
        PlannedFile {
            plan,
            files,
            result: made,
            snapshot: looked,
            is_outdated: AtomicBool::new(false),
            superseded: None,
        }
    }

    /// A plan for a name that there was one for before, which goes on if it still holds.
    pub fn replan(
        before: &Arc<PlannedFile>,
        root: &Root,
        way: &Path,
        plan: VirtualFilePlan,
    ) -> Arc<PlannedFile> {
        let is_same = before.plan == plan;
        let after = match before.result.get() {
            None if is_same => return Arc::clone(before),
            None => before.superseded.clone(),
            Some(made) => {
                // Another plan comes of other names, or of an index that was written since the last look.
                let changed = match is_same {
                    true if before.is_expired() => Some(Some(SystemTime::now())),
                    true => before.check_unchanged(root, made).err(),
                    false => before.compare_states(root, made).err(),
                };
                if is_same && changed.is_none() {
                    return Arc::clone(before);
                }
                changed.map(|changed| Superseded {
                    changed_at: changed,
                    previous: made.outcome.clone(),
                })
            }
        };
        Arc::new(PlannedFile { superseded: after, ..PlannedFile::new(way, plan) })
    }

    /// What became of it: read now if it was not. Others who ask meanwhile wait for the answer.
    /// Nothing if its files have changed since: then it is a plan for what is gone.
    pub fn outcome(&self, view: &View, way: &Path) -> Option<BuildOutcome> {
        let made = self.result.get_or_init(|| {
            let settled = self.settled_states(&view.root);
            let states: Vec<Option<FileState>> =
                self.stat_files(&view.root).into_iter().map(|a| a.map(|a| a.state())).collect();
            let is_settled = settled == states;
            let started = Instant::now();
            let previous = self.superseded.as_ref().map(|after| &after.previous);
            let outcome = build(view, way, &self.plan, is_settled, previous);
            let delay = || MIN_REREAD_DELAY.max(started.elapsed() * REREAD_FACTOR);
            let expires = (!is_settled).then(|| Instant::now() + delay());
            if let Some(Superseded { changed_at: Some(when), previous }) = &self.superseded
                && previous.identity() != outcome.identity()
            {
                view.record_change(way, *when);
            }
            BuildResult { states, outcome, expires }
        });
        self.check_unchanged(&view.root, made).ok()?;
        Some(made.outcome.clone())
    }

    /// Whether it is to be read again although its files look the same. Asked for one name at a time: a listing of
    /// many would never end.
    pub fn is_expired(&self) -> bool {
        let expires = self.result.get().and_then(|made| made.expires);
        expires.is_some_and(|at| self.is_outdated.load(Ordering::Relaxed) || Instant::now() >= at)
    }

    /// Whether what became of it still holds, if that was asked before.
    pub fn is_fresh(&self, root: &Root) -> bool {
        match self.result.get() {
            Some(made) => self.check_unchanged(root, made).is_ok(),
            // Until it is read, what the name showed before is not known to have changed.
            None => self.superseded.is_none(),
        }
    }

    /// Whether it was read, or took the place of what was.
    pub fn was_requested(&self) -> bool {
        self.result.get().is_some() || self.superseded.is_some()
    }

    /// The refusal of what never stays the same long enough to be read.
    pub fn unstable_refusal(&self, view: &View, way: &Path) -> BuildOutcome {
        let path = view.root.path().join(way).join(&self.plan.candidate.name);
        BuildOutcome::Refused(Arc::new(refusal_for(&self.plan, &ViewError::KeepsChanging { path })))
    }

    /// What became of it, if that was asked before.
    pub fn known_outcome(&self) -> Option<&BuildOutcome> {
        self.result.get().map(|made| &made.outcome)
    }

    /// An image with what it says of itself at this moment.
    pub fn shown_file(&self, facts: &Arc<VirtualFileSummary>) -> Option<ShownFile> {
        let attributes = Arc::clone(&lock(&self.snapshot).as_ref()?.metadata);
        Some(ShownFile { summary: Arc::clone(facts), metadata: attributes, is_index: false })
    }

    /// The index that names the image, likewise.
    pub fn shown_index(&self, facts: &Arc<VirtualFileSummary>) -> Option<ShownFile> {
        let image = self.shown_file(facts)?;
        let attributes = Arc::new(with_size(*image.metadata, facts.index_size));
        Some(ShownFile { metadata: attributes, is_index: true, ..image })
    }

    /// Invalidates the last look at the files, and the outcome if the files were not settled.
    pub fn invalidate(&self) {
        self.is_outdated.store(true, Ordering::Relaxed);
        if let Some(looked) = lock(&self.snapshot).as_mut() {
            looked.taken_at = None;
        }
    }

    /// The state of each settled file; `None` for the others.
    fn settled_states(&self, root: &Arc<Root>) -> Vec<Option<FileState>> {
        let settled = |file: &PathBuf| {
            let open = root.open(file).ok().filter(OpenFile::is_settled)?;
            Some(open.file().state())
        };
        self.files.iter().map(settled).collect()
    }

    fn stat_files(&self, root: &Root) -> Vec<Option<FileMetadata>> {
        self.files.iter().map(|file| root.metadata(file).ok()).collect()
    }

    /// Compares the files with what they were, if the last look is not good any more. An error is a
    /// change.
    fn check_unchanged(&self, root: &Root, made: &BuildResult) -> Result<(), ChangeTime> {
        let at = lock(&self.snapshot).as_ref().and_then(|looked| looked.taken_at);
        if at.is_some_and(|at| at.elapsed() < MAX_STAT_AGE) {
            return Ok(());
        }
        let states = self.compare_states(root, made)?;
        let size = match &made.outcome {
            BuildOutcome::VirtualFile(facts) => facts.size,
            BuildOutcome::Refused(_) => 0,
        };
        if let Some(together) = merged_metadata(&states, size) {
            let attributes = Arc::new(together);
            *lock(&self.snapshot) =
                Some(StatSnapshot { taken_at: Some(Instant::now()), metadata: attributes });
        }
        Ok(())
    }

    /// The files as they are, or how they changed.
    fn compare_states(
        &self,
        root: &Root,
        made: &BuildResult,
    ) -> Result<Vec<FileMetadata>, ChangeTime> {
        let states = self.stat_files(root);
        let mut change: Option<ChangeTime> = None;
        for (now, then) in states.iter().zip(&made.states) {
            let state = now.as_ref().map(FileMetadata::state);
            if state == *then {
                continue;
            }
            let identity = |state: Option<FileState>| state.map(|state| state.identity);
            let is_touched = identity(state) == identity(*then);
            // The time of a write can be set back, as programs that fetch files do; that of the setting
            // cannot.
            let when = now.map_or_else(SystemTime::now, |now| now.mtime.max(now.ctime));
            change = change.max(Some((!is_touched).then_some(when)));
        }
        match change {
            Some(change) => Err(change),
            None => Ok(states.into_iter().flatten().collect()),
        }
    }
}

/// What a file made of others says of itself: the owner of the first, what all of them permit, and
/// the times of the newest.
fn merged_metadata(sources: &[FileMetadata], size: u64) -> Option<FileMetadata> {
    let mut whole = *sources.first()?;
    for source in sources {
        whole.mode &= source.mode;
        whole.mtime = whole.mtime.max(source.mtime);
        whole.ctime = whole.ctime.max(source.ctime);
        whole.atime = whole.atime.max(source.atime);
    }
    whole.kind = FileKind::File;
    whole.mode &= 0o777;
    whole.links = 1;
    Some(with_size(whole, size))
}

fn with_size(mut attributes: FileMetadata, size: u64) -> FileMetadata {
    attributes.size = size;
    attributes.blocks = size.div_ceil(512);
    attributes
}

fn refusal_for(plan: &VirtualFilePlan, error: &ViewError) -> Refusal {
    Refusal {
        path: error.path().to_path_buf(),
        originals: plan.candidate.original_names(),
        reason: error.to_string(),
        remedy: error.remedy().to_owned(),
        is_not_checkpoint: matches!(
            error,
            ViewError::Checkpoint(checkpoint::CheckpointError::NotACheckpoint { .. })
        ),
    }
}

fn build(
    view: &View,
    way: &Path,
    plan: &VirtualFilePlan,
    is_settled: bool,
    previous: Option<&BuildOutcome>,
) -> BuildOutcome {
    let read = read_checkpoint(view, way, plan, &view.options.parse);
    let (image, facts) = match read {
        Ok((image, facts)) => (image, VirtualFileSummary { is_settled, ..facts }),
        Err(error) => {
            let refusal = refusal_for(plan, &error);
            let name = plan.candidate.name.as_str();
            let is_known =
                previous.is_some_and(|previous| previous.is_refused_for(&refusal.reason));
            if refusal.is_not_checkpoint || is_known {
                tracing::debug!(name, reason = refusal.reason, "stays as it is");
            } else {
                tracing::warn!(
                    name,
                    reason = refusal.reason,
                    remedy = refusal.remedy,
                    "refused, stays as it is"
                );
            }
            return BuildOutcome::Refused(Arc::new(refusal));
        }
    };
    if is_settled {
        view.virtual_files.insert(&image);
    }
    for note in &facts.notes {
        tracing::info!(name = plan.name, note, "shown");
    }
    BuildOutcome::VirtualFile(Arc::new(facts))
}

fn read_checkpoint(
    view: &View,
    way: &Path,
    plan: &VirtualFilePlan,
    options: &ParseOptions,
) -> Result<(Arc<VirtualFile>, VirtualFileSummary), ViewError> {
    let read = |options: &ParseOptions| {
        checkpoint::open_candidate(&view.root, way, &plan.candidate, options)
    };
    let mut checkpoint = match read(options) {
        // The key is for those that have it.
        Err(checkpoint::CheckpointError::Selection {
            fault: checkpoint::SelectError::NoSuchKey { key, .. },
            ..
        }) => {
            let mut whole = read(&options.without_root_key())?;
            whole.notes.push(format!("has no `{key}`: shown by the rule instead"));
            whole
        }
        read => read?,
    };
    let notes = std::mem::take(&mut checkpoint.notes);
    let left_out = checkpoint.refused.iter().map(|entry| format!("left out: {entry}"));
    let notes = notes.into_iter().chain(left_out).collect();
    let Checkpoint { format, options, .. } = &checkpoint;
    let (format, options) = (*format, options.clone());
    let image = Arc::new(VirtualFile::new(checkpoint)?);
    let index_size = match plan.candidate.index_name() {
        Some(_) => virtual_index::index_json(&image, &plan.name).len() as u64,
        None => 0,
    };
    let facts = VirtualFileSummary {
        directory: way.to_path_buf(),
        plan: plan.clone(),
        options,
        size: image.size(),
        index_size,
        identity: image.identity(),
        layout: image.layout_hash(),
        tensors: image.tensors().len(),
        format,
        notes,
        is_settled: false,
        virtual_file: Mutex::new(Arc::downgrade(&image)),
    };
    Ok((image, facts))
}

impl ShownFile {
    /// Mode, owner, size and times.
    pub fn metadata(&self) -> &FileMetadata {
        &self.metadata
    }

    /// A hash of the sources' states and the options: another is another file.
    pub fn identity(&self) -> Digest {
        self.summary.identity
    }

    /// A hash of the header.
    pub fn layout(&self) -> Digest {
        self.summary.layout
    }

    /// How many tensors it has.
    pub fn tensors(&self) -> usize {
        self.summary.tensors
    }

    /// The format of its sources.
    pub fn format(&self) -> Format {
        self.summary.format
    }

    /// The options that it was read with.
    pub fn options(&self) -> &ParseOptions {
        &self.summary.options
    }

    /// Whether every change to its files since they were read shows in their states. If not, bytes read before an
    /// open may be older than what the open must show.
    pub fn is_settled(&self) -> bool {
        self.summary.is_settled
    }

    /// What was chosen and left out.
    pub fn notes(&self) -> &[String] {
        &self.summary.notes
    }

    /// The names of the files that it takes the place of.
    pub fn originals(&self) -> Vec<String> {
        self.summary.plan.candidate.original_names()
    }

    /// The way from the root to what it is made of: its file, its index, or a numbered set's name.
    pub fn source(&self) -> PathBuf {
        self.summary.directory.join(&self.summary.plan.candidate.name)
    }

    /// Whether it is the index that names the image, and not the image.
    pub fn is_index(&self) -> bool {
        self.is_index
    }

    pub(super) fn virtual_file(&self, view: &View) -> Result<Arc<VirtualFile>, ViewError> {
        let image = self.whole_virtual_file(view)?;
        if self.is_index {
            let text = virtual_index::index_json(&image, &self.summary.plan.name);
            return Ok(Arc::new(VirtualFile::from_bytes(text)));
        }
        Ok(image)
    }

    /// The image, also of its index.
    fn whole_virtual_file(&self, view: &View) -> Result<Arc<VirtualFile>, ViewError> {
        let facts = &self.summary;
        let known = || {
            lock(&facts.virtual_file).upgrade().or_else(|| view.virtual_files.get(facts.identity))
        };
        if let Some(image) = facts.is_settled.then(known).flatten() {
            return Ok(image);
        }
        let (image, _) = read_checkpoint(view, &facts.directory, &facts.plan, &facts.options)?;
        if image.identity() != facts.identity {
            let path = view.root.path().join(self.source());
            return Err(crate::source::SourceError::Changed { path }.into());
        }
        if !facts.is_settled {
            return Ok(image);
        }
        let mut open = lock(&facts.virtual_file);
        // Another may have read it meanwhile; one is enough.
        let image = open.upgrade().unwrap_or(image);
        *open = Arc::downgrade(&image);
        drop(open);
        view.virtual_files.insert(&image);
        Ok(image)
    }
}
