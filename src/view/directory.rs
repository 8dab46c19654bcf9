//! One directory: its names as they are, and what is to become of its checkpoints.

use std::collections::{HashMap, HashSet};
use std::ffi::{OsStr, OsString};
use std::num::NonZeroUsize;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex};

use crate::checkpoint::{Candidate, CandidateFiles, candidates_by_name};
use crate::source::{self, FileKind, FileMetadata, Root};
use crate::threads::{lock, parallel_map};

use super::build::{BuildOutcome, PlannedFile, ShownFile};
use super::hf_cache::{self, HubNotes};
use super::rules;
use super::single_target::SingleTarget;
use super::virtual_index;
use super::{
    CheckpointCounts, KeepRules, ListedEntry, Listing, MAX_READ_TRIES, MaybeStale, NamedEntry,
    SortedNames, View, ViewEntry, ViewError, near_misses, symlinks,
};

/// A directory as it was at one time. Its checkpoints are read when they are asked for.
#[derive(Debug)]
pub struct DirectoryView {
    path: PathBuf,
    state: DirectoryState,
    names: SortedNames,
    /// The kind of each name, in the same order.
    kinds: Box<[FileKind]>,
    files: Vec<Arc<PlannedFile>>,
    /// Which of the planned has this name as an image, and which has it as a file of its own.
    virtual_files: HashMap<OsString, usize>,
    originals: HashMap<OsString, usize>,
    /// Which of the planned has an index of this name that stays.
    indexes: HashMap<OsString, usize>,
    skipped: Box<[(OsString, String)]>,
    hub_notes: Option<HubNotes>,
    /// Links that lead out, of which the log was told.
    logged_links: Mutex<HashSet<OsString>>,
}

/// A directory's state, and whether every later change must leave another one.
#[derive(Debug, PartialEq, Eq)]
struct DirectoryState {
    state: source::FileState,
    is_settled: bool,
}

/// Threads that parse the checkpoints of a directory: most of it is waiting for the disk.
pub const MAX_PARSER_THREADS: usize = 8;

/// Directories beneath a revision that are looked through for what is hidden.
const MAX_SEARCHED_DIRECTORIES: usize = 1_000;

impl DirectoryState {
    fn from_attributes(attributes: &FileMetadata) -> DirectoryState {
        let state = attributes.state();
        DirectoryState { state, is_settled: source::is_past_clock_step(&state) }
    }
}

impl DirectoryView {
    /// Reads the names in a directory. What is known of checkpoints that stayed what they were is kept.
    pub fn read(
        view: &View,
        way: &Path,
        attributes: &FileMetadata,
        known: Option<&DirectoryView>,
    ) -> Result<DirectoryView, ViewError> {
        let state = DirectoryState::from_attributes(attributes);
        let mut entries = view.root.entries(way)?;
        if let Some(only) = view.target.as_ref().filter(|_| way == view.base) {
            entries.retain(|entry| only.contains(&entry.name));
        }
        // A directory that changes during the reading may return a name twice.
        entries.dedup_by(|a, b| a.name == b.name);
        let names = SortedNames::from_sorted(entries.iter().map(|entry| &*entry.name));
        let kinds: Box<[FileKind]> = entries.iter().map(|entry| entry.kind).collect();
        drop(entries);
        let files: Vec<&OsStr> = names
            .iter()
            .zip(&kinds)
            .filter(|(name, kind)| match kind {
                FileKind::File => true,
                // A link to nothing is a file that cannot be opened.
                FileKind::Link => match view.root.cached_metadata(&way.join(name)) {
                    Ok(target) => target.kind == FileKind::File,
                    Err(_) => true,
                },
                _ => false,
            })
            .map(|(name, _)| name)
            .collect();
        let texts: Vec<String> =
            files.iter().filter_map(|name| name.to_str().map(str::to_owned)).collect();
        let keep = &view.options.keep;
        let candidates = match &view.target {
            // A file that was named is looked at, whatever it is called.
            Some(SingleTarget::File(_)) if way == view.base => {
                let alone = |name: String| Candidate {
                    unsharded_name: name.clone(),
                    name,
                    files: CandidateFiles::Single,
                };
                texts.into_iter().map(alone).collect()
            }
            _ => candidates_by_name(&view.root, way, &texts, &|name| keep.matches(name)),
        };
        let mut left = near_misses_of(&files, &candidates, keep);
        let taken: Vec<String> =
            names.iter().filter_map(|name| name.to_str().map(str::to_owned)).collect();
        let rules::DirectoryPlan { files: plans, skipped: by_rule } =
            rules::plan_directory(&taken, candidates, keep);
        left.extend(by_rule.into_iter().map(|(name, why)| (name.into(), why)));
        left.sort();
        let before: HashMap<&str, &Arc<PlannedFile>> = known
            .iter()
            .flat_map(|known| &known.files)
            .map(|planned| (planned.plan.name.as_str(), planned))
            .collect();
        let planned: Vec<Arc<PlannedFile>> = plans
            .into_iter()
            .map(|plan| match before.get(plan.name.as_str()) {
                Some(before) => PlannedFile::replan(before, &view.root, way, plan),
                None => Arc::new(PlannedFile::new(way, plan)),
            })
            .collect();
        let mut images = HashMap::new();
        let mut originals = HashMap::new();
        for (n, planned) in planned.iter().enumerate() {
            images.insert(OsString::from(&planned.plan.name), n);
            for original in planned.plan.candidate.original_names() {
                originals.insert(original.into(), n);
            }
        }
        // Originals that are shown have their own.
        let indexes = match view.options.show_originals {
            true => HashMap::new(),
            false => virtual_index::kept_indexes(&planned, names.iter(), &originals),
        };
        let notes = hf_cache::find_hub_notes(view.root.real_path(), way);
        let way = way.to_path_buf();
        // What was told of a link is not told again.
        let told = known.map(|known| lock(&known.logged_links).clone()).unwrap_or_default().into();
        let left = left.into();
        Ok(DirectoryView {
            path: way,
            state,
            names,
            kinds,
            files: planned,
            virtual_files: images,
            originals,
            indexes,
            skipped: left,
            hub_notes: notes,
            logged_links: told,
        })
    }

    /// Whether this is what the directory holds now, given what it says of itself now.
    pub fn matches(&self, attributes: &FileMetadata) -> bool {
        self.state.is_settled
            && DirectoryState { is_settled: true, ..DirectoryState::from_attributes(attributes) }
                == self.state
    }

    /// Makes the checkpoints that another look at the same directory began to read its own.
    pub fn adopt_outcomes(&mut self, other: &DirectoryView) {
        for planned in &mut self.files {
            let name = OsStr::new(&planned.plan.name);
            if let Some(&n) = other.virtual_files.get(name)
                && other.files[n].plan == planned.plan
            {
                *planned = Arc::clone(&other.files[n]);
            }
        }
    }

    /// Whether all that was read of it still holds.
    pub fn is_fresh(&self, root: &Root) -> bool {
        self.files.iter().all(|planned| planned.is_fresh(root))
    }

    /// Reads again what was read and has changed.
    pub fn refresh(&self, view: &View, is_last: bool) -> MaybeStale<()> {
        for planned in self.files.iter().filter(|planned| planned.was_requested()) {
            if self.outcome(view, planned, is_last).is_none() {
                return MaybeStale::Stale;
            }
        }
        MaybeStale::Fresh(())
    }

    /// What became of a planned image; nothing if its files have changed since, unless this is the
    /// last time that the directory is asked.
    fn outcome(&self, view: &View, planned: &PlannedFile, is_last: bool) -> Option<BuildOutcome> {
        let outcome = planned.outcome(view, &self.path);
        if outcome.is_none() && is_last {
            Some(planned.unstable_refusal(view, &self.path))
        } else {
            outcome
        }
    }

    /// What a name stands for.
    pub fn lookup(
        &self,
        view: &View,
        name: &OsStr,
        is_last: bool,
    ) -> Result<MaybeStale<Option<ViewEntry>>, ViewError> {
        if let Some(&n) = self.virtual_files.get(name) {
            let planned = &self.files[n];
            if planned.is_expired() && !is_last {
                return Ok(MaybeStale::Stale);
            }
            match self.outcome(view, planned, is_last) {
                None => return Ok(MaybeStale::Stale),
                Some(BuildOutcome::VirtualFile(facts)) => {
                    return Ok(MaybeStale::Fresh(
                        planned.shown_file(&facts).map(virtual_file_entry),
                    ));
                }
                Some(BuildOutcome::Refused(_)) => {}
            }
        }
        if let Some(&n) = self.indexes.get(name) {
            let planned = &self.files[n];
            match self.outcome(view, planned, is_last) {
                None => return Ok(MaybeStale::Stale),
                Some(BuildOutcome::VirtualFile(facts)) => {
                    return Ok(MaybeStale::Fresh(
                        planned.shown_index(&facts).map(|shown| ViewEntry::Index(Arc::new(shown))),
                    ));
                }
                Some(BuildOutcome::Refused(_)) => {}
            }
        }
        match self.shows_as_is(view, name, is_last) {
            MaybeStale::Stale => Ok(MaybeStale::Stale),
            MaybeStale::Fresh(true) => Ok(MaybeStale::Fresh(self.source_entry(view, name)?)),
            MaybeStale::Fresh(false) => Ok(MaybeStale::Fresh(None)),
        }
    }

    /// Whether a name that is there is shown as what it is.
    pub fn shows_as_is(&self, view: &View, name: &OsStr, is_last: bool) -> MaybeStale<bool> {
        if self.names.find(name).is_err() {
            return MaybeStale::Fresh(false);
        }
        if let Some(&n) = self.originals.get(name) {
            match self.outcome(view, &self.files[n], is_last) {
                None => return MaybeStale::Stale,
                Some(BuildOutcome::VirtualFile(_)) if !view.options.show_originals => {
                    return MaybeStale::Fresh(false);
                }
                Some(_) => {}
            }
        }
        MaybeStale::Fresh(self.hidden_note_reason(view, name).is_none())
    }

    /// The last look at what a name is an image of is not good any more.
    pub fn invalidate(&self, name: &OsStr) {
        if let Some(&n) = self.virtual_files.get(name) {
            self.files[n].invalidate();
        }
    }

    /// Whether a name stands for an image.
    pub fn has_virtual_file(&self, view: &View, name: &OsStr, is_last: bool) -> MaybeStale<bool> {
        let Some(&n) = self.virtual_files.get(name) else { return MaybeStale::Fresh(false) };
        match self.outcome(view, &self.files[n], is_last) {
            None => MaybeStale::Stale,
            Some(outcome) => MaybeStale::Fresh(matches!(outcome, BuildOutcome::VirtualFile(_))),
        }
    }

    /// Whether originals are hidden here, and the directories in it.
    pub fn hides_originals(&self, view: &View, is_last: bool) -> MaybeStale<(bool, Vec<OsString>)> {
        let mut hides = false;
        for outcome in self.outcomes(view, is_last) {
            match outcome {
                None => return MaybeStale::Stale,
                Some(outcome) => hides |= matches!(outcome, BuildOutcome::VirtualFile(_)),
            }
        }
        let folders = self.names.iter().zip(&self.kinds);
        let folders = folders.filter(|(_, kind)| **kind == FileKind::Directory);
        let folders = folders.map(|(name, _)| name.to_owned()).collect();
        MaybeStale::Fresh((hides && !view.options.show_originals, folders))
    }

    fn source_entry(&self, view: &View, name: &OsStr) -> Result<Option<ViewEntry>, ViewError> {
        let way = self.path.join(name);
        for _ in 0..MAX_READ_TRIES {
            let found = match view.root.link_metadata(&way) {
                Err(source::SourceError::Missing { .. }) => return Ok(None),
                found => view.with_change_time(&way, found?),
            };
            if found.kind != FileKind::Link {
                return Ok(Some(ViewEntry::Source(found)));
            }
            // A link that is gone by now is what came in its place.
            if let Some(entry) = symlinks::link_entry(view, &self.path, name, found) {
                if matches!(entry, ViewEntry::Link(_, None))
                    && lock(&self.logged_links).insert(name.to_owned())
                {
                    tracing::warn!(
                        link = %view.root.path().join(&way).display(),
                        "leads out of the directory: not followed without --follow-symlinks"
                    );
                }
                return Ok(Some(entry));
            }
        }
        Ok(None)
    }

    /// The same for a listing, which waits for nobody: a directory that lies on another filesystem is
    /// what the system last knew of it. That filesystem may be a mount whose daemon is stuck.
    fn listed_source_entry(
        &self,
        view: &View,
        name: &OsStr,
        kind: FileKind,
    ) -> Result<Option<ViewEntry>, ViewError> {
        if kind == FileKind::Directory
            && let Ok(found) = view.root.cached_metadata(&self.path.join(name))
            && found.kind == FileKind::Directory
            && found.dev != self.state.state.identity.dev
        {
            return Ok(Some(ViewEntry::Source(found)));
        }
        self.source_entry(view, name)
    }

    /// Why a name is not shown that notes something about what the view shows otherwise. Only what
    /// became of checkpoints is asked for it, so that links and notes cannot lead round in circles.
    fn hidden_note_reason(&self, view: &View, name: &OsStr) -> Option<&'static str> {
        match self.hub_notes.as_ref()? {
            HubNotes::Absent { revision } => {
                let has_image = view.has_virtual_file(revision, name).unwrap_or(false);
                has_image.then_some("notes as absent what the view shows")
            }
            HubNotes::Trees { revisions } => {
                let revision = name.to_str()?.strip_suffix(".json")?;
                let hides = hides_originals_beneath(view, &revisions.join(revision));
                hides.then_some("lists originals that the view hides")
            }
        }
    }

    /// Everything: each checkpoint is read for it.
    pub fn list(&self, view: &View, is_last: bool) -> Result<MaybeStale<Listing>, ViewError> {
        let Some(outcomes) = self.all_outcomes(view, is_last) else { return Ok(MaybeStale::Stale) };
        let mut listing = Listing { skipped: self.skipped.to_vec(), ..Listing::default() };
        for (planned, outcome) in self.files.iter().zip(&outcomes) {
            match outcome {
                BuildOutcome::Refused(refusal) => listing.refused.push(Arc::clone(refusal)),
                BuildOutcome::VirtualFile(facts) => {
                    if let Some(shown) = planned.shown_file(facts) {
                        let name = OsString::from(&planned.plan.name);
                        listing.entries.push(NamedEntry { name, entry: virtual_file_entry(shown) });
                    }
                }
            }
        }
        for name in self.names.iter() {
            if let Some(why) = self.hidden_reason(view, name, &outcomes) {
                listing.hidden.push((name.to_owned(), why));
                continue;
            }
            match self.list_entry(view, name, is_last)? {
                MaybeStale::Stale => return Ok(MaybeStale::Stale),
                MaybeStale::Fresh(Ok(Some(entry))) => {
                    listing.entries.push(NamedEntry { name: name.to_owned(), entry });
                }
                MaybeStale::Fresh(Ok(None)) => {}
                MaybeStale::Fresh(Err((kind, error))) => {
                    listing.unreadable.push((name.to_owned(), kind, error));
                }
            }
        }
        listing.entries.sort_by(|a, b| a.name.cmp(&b.name));
        Ok(MaybeStale::Fresh(listing))
    }

    /// The names that it shows. Parses each checkpoint, and reads nothing of other files.
    pub fn shown_names(&self, view: &View, is_last: bool) -> MaybeStale<SortedNames> {
        let Some(outcomes) = self.all_outcomes(view, is_last) else { return MaybeStale::Stale };
        let images = self.files.iter().zip(&outcomes);
        let images = images.filter(|(_, outcome)| matches!(outcome, BuildOutcome::VirtualFile(_)));
        let images = images.map(|(planned, _)| OsStr::new(&planned.plan.name));
        let others =
            self.names.iter().filter(|name| self.hidden_reason(view, name, &outcomes).is_none());
        let mut names: Vec<&OsStr> = images.chain(others).collect();
        names.sort();
        names.dedup();
        MaybeStale::Fresh(SortedNames::from_sorted(names))
    }

    /// What a shown name stands for; `None` if it is gone. An error where only its kind is known. A listing must
    /// not wait for another filesystem, so a directory there has the attributes that the system last knew.
    pub fn list_entry(
        &self,
        view: &View,
        name: &OsStr,
        is_last: bool,
    ) -> Result<MaybeStale<ListedEntry>, ViewError> {
        let is_own = self.virtual_files.contains_key(name) || self.indexes.contains_key(name);
        match self.names.find(name) {
            Ok(index) if !is_own => {
                let kind = self.kinds[index];
                let entry = self.listed_source_entry(view, name, kind);
                Ok(MaybeStale::Fresh(entry.map_err(|error| (kind, error))))
            }
            _ => Ok(match self.lookup(view, name, is_last)? {
                MaybeStale::Stale => MaybeStale::Stale,
                MaybeStale::Fresh(entry) => MaybeStale::Fresh(Ok(entry)),
            }),
        }
    }

    /// Why the view hides a name, given the outcomes of its plans; `None` if the name is shown.
    fn hidden_reason(
        &self,
        view: &View,
        name: &OsStr,
        outcomes: &[BuildOutcome],
    ) -> Option<String> {
        let is_image = |n: &&usize| matches!(outcomes[**n], BuildOutcome::VirtualFile(_));
        match self.originals.get(name).filter(is_image) {
            Some(_) if self.indexes.contains_key(name) => None,
            Some(&n) if !view.options.show_originals => {
                Some(format!("is in {}", self.files[n].plan.name))
            }
            _ => self.hidden_note_reason(view, name).map(str::to_owned),
        }
    }

    /// Bytes of memory for the names and what belongs to each.
    pub fn weight(&self) -> usize {
        size_of::<DirectoryView>() + self.names.weight() + self.kinds.len()
    }

    /// The outcomes of all plans; `None` if files of one have changed since.
    fn all_outcomes(&self, view: &View, is_last: bool) -> Option<Vec<BuildOutcome>> {
        self.outcomes(view, is_last).into_iter().collect()
    }

    /// What became of each planned image, read by several threads where that is to be found out.
    fn outcomes(&self, view: &View, is_last: bool) -> Vec<Option<BuildOutcome>> {
        let unread = self.files.iter().filter(|planned| planned.known_outcome().is_none()).count();
        if unread > 1 {
            let cores = std::thread::available_parallelism().map_or(1, NonZeroUsize::get);
            let threads = unread.min(MAX_PARSER_THREADS).min(2 * cores);
            // Asked for again below; this is for its effect.
            parallel_map(&self.files, threads, |planned| drop(planned.outcome(view, &self.path)));
        }
        self.files.iter().map(|planned| self.outcome(view, planned, is_last)).collect()
    }

    /// Adds what became of the checkpoints that were read.
    pub fn count(&self, known: &mut CheckpointCounts) {
        for planned in &self.files {
            match planned.known_outcome() {
                Some(BuildOutcome::VirtualFile(_)) => known.virtual_files += 1,
                Some(BuildOutcome::Refused(refusal)) if !refusal.is_not_checkpoint => {
                    known.refused += 1
                }
                _ => {}
            }
        }
    }
}

/// Files that are none of the candidates', and what is to be told of them.
fn near_misses_of(
    files: &[&OsStr],
    candidates: &[Candidate],
    keep: &KeepRules,
) -> Vec<(OsString, String)> {
    let parts: HashSet<OsString> =
        candidates.iter().flat_map(Candidate::original_names).map(OsString::from).collect();
    let others = files.iter().filter(|name| !parts.contains(**name));
    others
        .filter_map(|name| Some(((*name).to_owned(), near_misses::near_miss_reason(name, keep)?)))
        .collect()
}

fn virtual_file_entry(shown: ShownFile) -> ViewEntry {
    ViewEntry::VirtualFile(Arc::new(shown))
}

/// Whether originals are hidden in a directory or beneath it. What cannot be read hides nothing.
fn hides_originals_beneath(view: &View, way: &Path) -> bool {
    let mut todo = vec![way.to_path_buf()];
    let mut seen = 0;
    while let Some(way) = todo.pop() {
        seen += 1;
        let Ok((hides, folders)) = view.hides_originals(&way) else { continue };
        if hides || seen > MAX_SEARCHED_DIRECTORIES {
            return true;
        }
        todo.extend(folders.into_iter().map(|folder| way.join(folder)));
    }
    false
}
