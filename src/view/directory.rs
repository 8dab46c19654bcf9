//! One directory: its names as they are, and what is to become of its checkpoints.

use std::collections::{HashMap, HashSet};
use std::ffi::{OsStr, OsString};
use std::num::NonZeroUsize;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex};

use crate::checkpoint::{Candidate, Members, by_name};
use crate::source::{self, Attributes, Kind, Root};
use crate::threads::{lock, together};

use super::build::{Outcome, Planned, Shown};
use super::hf_cache::{self, Notes};
use super::rules;
use super::single_target::Only;
use super::virtual_index;
use super::{
    Answer, Entry, Error, Keep, Known, ListedEntry, Listing, Named, Names, TRIES, View,
    near_misses, symlinks,
};

/// A directory as it was at one time. Its checkpoints are read when they are asked for.
#[derive(Debug)]
pub struct Directory {
    way: PathBuf,
    state: State,
    names: Names,
    /// The kind of each name, in the same order.
    kinds: Box<[Kind]>,
    planned: Vec<Arc<Planned>>,
    /// Which of the planned has this name as an image, and which has it as a file of its own.
    images: HashMap<OsString, usize>,
    originals: HashMap<OsString, usize>,
    /// Which of the planned has an index of this name that stays.
    indexes: HashMap<OsString, usize>,
    left: Box<[(OsString, String)]>,
    notes: Option<Notes>,
    /// Links that lead out, of which the log was told.
    told: Mutex<HashSet<OsString>>,
}

/// A directory's state, and whether every later change must leave another one.
#[derive(Debug, PartialEq, Eq)]
struct State {
    state: source::State,
    is_settled: bool,
}

/// Threads that parse the checkpoints of a directory: most of it is waiting for the disk.
pub const PARSERS: usize = 8;

/// Directories beneath a revision that are looked through for what is hidden.
const MOST_BENEATH: usize = 1_000;

impl State {
    fn of(attributes: &Attributes) -> State {
        let state = attributes.state();
        State { state, is_settled: source::is_past_clock_step(&state) }
    }
}

impl Directory {
    /// Reads the names in a directory. What is known of checkpoints that stayed what they were is kept.
    pub fn read(
        view: &View,
        way: &Path,
        attributes: &Attributes,
        known: Option<&Directory>,
    ) -> Result<Directory, Error> {
        let state = State::of(attributes);
        let mut entries = view.root.entries(way)?;
        if let Some(only) = view.only.as_ref().filter(|_| way == view.base) {
            entries.retain(|entry| only.has(&entry.name));
        }
        // A directory that changes during the reading may return a name twice.
        entries.dedup_by(|a, b| a.name == b.name);
        let names = Names::of(entries.iter().map(|entry| &*entry.name));
        let kinds: Box<[Kind]> = entries.iter().map(|entry| entry.kind).collect();
        drop(entries);
        let files: Vec<&OsStr> = names
            .iter()
            .zip(&kinds)
            .filter(|(name, kind)| match kind {
                Kind::File => true,
                // A link to nothing is a file that cannot be opened.
                Kind::Link => match view.root.attributes_at_hand(&way.join(name)) {
                    Ok(target) => target.kind == Kind::File,
                    Err(_) => true,
                },
                _ => false,
            })
            .map(|(name, _)| name)
            .collect();
        let texts: Vec<String> =
            files.iter().filter_map(|name| name.to_str().map(str::to_owned)).collect();
        let keep = &view.options.keep;
        let candidates = match &view.only {
            // A file that was named is looked at, whatever it is called.
            Some(Only::File(_)) if way == view.base => {
                let alone =
                    |name: String| Candidate { whole: name.clone(), name, members: Members::File };
                texts.into_iter().map(alone).collect()
            }
            _ => by_name(&view.root, way, &texts, &|name| keep.keeps(name)),
        };
        let mut left = unlike(&files, &candidates, keep);
        let taken: Vec<String> =
            names.iter().filter_map(|name| name.to_str().map(str::to_owned)).collect();
        let rules::Plans { plans, left: by_rule } = rules::plan(&taken, candidates, keep);
        left.extend(by_rule.into_iter().map(|(name, why)| (name.into(), why)));
        left.sort();
        let before: HashMap<&str, &Arc<Planned>> = known
            .iter()
            .flat_map(|known| &known.planned)
            .map(|planned| (planned.plan.shown.as_str(), planned))
            .collect();
        let planned: Vec<Arc<Planned>> = plans
            .into_iter()
            .map(|plan| match before.get(plan.shown.as_str()) {
                Some(before) => Planned::again(before, &view.root, way, plan),
                None => Arc::new(Planned::new(way, plan)),
            })
            .collect();
        let mut images = HashMap::new();
        let mut originals = HashMap::new();
        for (n, planned) in planned.iter().enumerate() {
            images.insert(OsString::from(&planned.plan.shown), n);
            for original in planned.plan.candidate.originals() {
                originals.insert(original.into(), n);
            }
        }
        // Originals that are shown have their own.
        let indexes = match view.options.show_originals {
            true => HashMap::new(),
            false => virtual_index::that_stay(&planned, names.iter(), &originals),
        };
        let notes = hf_cache::notes(view.root.real(), way);
        let way = way.to_path_buf();
        // What was told of a link is not told again.
        let told = known.map(|known| lock(&known.told).clone()).unwrap_or_default().into();
        let left = left.into();
        Ok(Directory {
            way,
            state,
            names,
            kinds,
            planned,
            images,
            originals,
            indexes,
            left,
            notes,
            told,
        })
    }

    /// Whether this is what the directory holds now, given what it says of itself now.
    pub fn is_of(&self, attributes: &Attributes) -> bool {
        self.state.is_settled && State { is_settled: true, ..State::of(attributes) } == self.state
    }

    /// Makes the checkpoints that another look at the same directory began to read its own.
    pub fn take_over(&mut self, other: &Directory) {
        for planned in &mut self.planned {
            let name = OsStr::new(&planned.plan.shown);
            if let Some(&n) = other.images.get(name)
                && other.planned[n].plan == planned.plan
            {
                *planned = Arc::clone(&other.planned[n]);
            }
        }
    }

    /// Whether all that was read of it still holds.
    pub fn is_fresh(&self, root: &Root) -> bool {
        self.planned.iter().all(|planned| planned.is_fresh(root))
    }

    /// Reads again what was read and has changed.
    pub fn refresh(&self, view: &View, is_last: bool) -> Answer<()> {
        for planned in self.planned.iter().filter(|planned| planned.was_asked()) {
            if self.outcome(view, planned, is_last).is_none() {
                return Answer::Stale;
            }
        }
        Answer::Is(())
    }

    /// What became of a planned image; nothing if its files have changed since, unless this is the
    /// last time that the directory is asked.
    fn outcome(&self, view: &View, planned: &Planned, is_last: bool) -> Option<Outcome> {
        let outcome = planned.outcome(view, &self.way);
        if outcome.is_none() && is_last { Some(planned.restless(view, &self.way)) } else { outcome }
    }

    /// What a name stands for.
    pub fn entry(
        &self,
        view: &View,
        name: &OsStr,
        is_last: bool,
    ) -> Result<Answer<Option<Entry>>, Error> {
        if let Some(&n) = self.images.get(name) {
            let planned = &self.planned[n];
            if planned.is_expired() && !is_last {
                return Ok(Answer::Stale);
            }
            match self.outcome(view, planned, is_last) {
                None => return Ok(Answer::Stale),
                Some(Outcome::Image(facts)) => {
                    return Ok(Answer::Is(planned.shown(&facts).map(image)));
                }
                Some(Outcome::Refused(_)) => {}
            }
        }
        if let Some(&n) = self.indexes.get(name) {
            let planned = &self.planned[n];
            match self.outcome(view, planned, is_last) {
                None => return Ok(Answer::Stale),
                Some(Outcome::Image(facts)) => {
                    return Ok(Answer::Is(
                        planned.index(&facts).map(|shown| Entry::Index(Arc::new(shown))),
                    ));
                }
                Some(Outcome::Refused(_)) => {}
            }
        }
        match self.shows(view, name, is_last) {
            Answer::Stale => Ok(Answer::Stale),
            Answer::Is(true) => Ok(Answer::Is(self.as_it_is(view, name)?)),
            Answer::Is(false) => Ok(Answer::Is(None)),
        }
    }

    /// Whether a name that is there is shown as what it is.
    pub fn shows(&self, view: &View, name: &OsStr, is_last: bool) -> Answer<bool> {
        if self.names.find(name).is_err() {
            return Answer::Is(false);
        }
        if let Some(&n) = self.originals.get(name) {
            match self.outcome(view, &self.planned[n], is_last) {
                None => return Answer::Stale,
                Some(Outcome::Image(_)) if !view.options.show_originals => {
                    return Answer::Is(false);
                }
                Some(_) => {}
            }
        }
        Answer::Is(self.hidden_note(view, name).is_none())
    }

    /// The last look at what a name is an image of is not good any more.
    pub fn look_again(&self, name: &OsStr) {
        if let Some(&n) = self.images.get(name) {
            self.planned[n].look_again();
        }
    }

    /// Whether a name stands for an image.
    pub fn has_image(&self, view: &View, name: &OsStr, is_last: bool) -> Answer<bool> {
        let Some(&n) = self.images.get(name) else { return Answer::Is(false) };
        match self.outcome(view, &self.planned[n], is_last) {
            None => Answer::Stale,
            Some(outcome) => Answer::Is(matches!(outcome, Outcome::Image(_))),
        }
    }

    /// Whether originals are hidden here, and the directories in it.
    pub fn hides(&self, view: &View, is_last: bool) -> Answer<(bool, Vec<OsString>)> {
        let mut hides = false;
        for outcome in self.outcomes(view, is_last) {
            match outcome {
                None => return Answer::Stale,
                Some(outcome) => hides |= matches!(outcome, Outcome::Image(_)),
            }
        }
        let folders = self.names.iter().zip(&self.kinds);
        let folders = folders.filter(|(_, kind)| **kind == Kind::Directory);
        let folders = folders.map(|(name, _)| name.to_owned()).collect();
        Answer::Is((hides && !view.options.show_originals, folders))
    }

    fn as_it_is(&self, view: &View, name: &OsStr) -> Result<Option<Entry>, Error> {
        let way = self.way.join(name);
        for _ in 0..TRIES {
            let found = match view.root.attributes_of_link(&way) {
                Err(source::Error::Missing { .. }) => return Ok(None),
                found => view.timed(&way, found?),
            };
            if found.kind != Kind::Link {
                return Ok(Some(Entry::Source(found)));
            }
            // A link that is gone by now is what came in its place.
            if let Some(entry) = symlinks::present(view, &self.way, name, found) {
                if matches!(entry, Entry::Link(_, None)) && lock(&self.told).insert(name.to_owned())
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
    fn as_listed(&self, view: &View, name: &OsStr, kind: Kind) -> Result<Option<Entry>, Error> {
        if kind == Kind::Directory
            && let Ok(found) = view.root.attributes_at_hand(&self.way.join(name))
            && found.kind == Kind::Directory
            && found.dev != self.state.state.identity.dev
        {
            return Ok(Some(Entry::Source(found)));
        }
        self.as_it_is(view, name)
    }

    /// Why a name is not shown that notes something about what the view shows otherwise. Only what
    /// became of checkpoints is asked for it, so that links and notes cannot lead round in circles.
    fn hidden_note(&self, view: &View, name: &OsStr) -> Option<&'static str> {
        match self.notes.as_ref()? {
            Notes::Absent { revision } => {
                let has_image = view.has_image(revision, name).unwrap_or(false);
                has_image.then_some("notes as absent what the view shows")
            }
            Notes::Trees { revisions } => {
                let revision = name.to_str()?.strip_suffix(".json")?;
                let hides = hides_any(view, &revisions.join(revision));
                hides.then_some("lists originals that the view hides")
            }
        }
    }

    /// Everything: each checkpoint is read for it.
    pub fn list(&self, view: &View, is_last: bool) -> Result<Answer<Listing>, Error> {
        let Some(outcomes) = self.all_outcomes(view, is_last) else { return Ok(Answer::Stale) };
        let mut listing = Listing { left: self.left.to_vec(), ..Listing::default() };
        for (planned, outcome) in self.planned.iter().zip(&outcomes) {
            match outcome {
                Outcome::Refused(refusal) => listing.refused.push(Arc::clone(refusal)),
                Outcome::Image(facts) => {
                    if let Some(shown) = planned.shown(facts) {
                        let name = OsString::from(&planned.plan.shown);
                        listing.entries.push(Named { name, entry: image(shown) });
                    }
                }
            }
        }
        for name in self.names.iter() {
            if let Some(why) = self.why_hidden(view, name, &outcomes) {
                listing.hidden.push((name.to_owned(), why));
                continue;
            }
            match self.list_entry(view, name, is_last)? {
                Answer::Stale => return Ok(Answer::Stale),
                Answer::Is(Ok(Some(entry))) => {
                    listing.entries.push(Named { name: name.to_owned(), entry });
                }
                Answer::Is(Ok(None)) => {}
                Answer::Is(Err((kind, error))) => {
                    listing.unreadable.push((name.to_owned(), kind, error));
                }
            }
        }
        listing.entries.sort_by(|a, b| a.name.cmp(&b.name));
        Ok(Answer::Is(listing))
    }

    /// The names that it shows. Parses each checkpoint, and reads nothing of other files.
    pub fn shown_names(&self, view: &View, is_last: bool) -> Answer<Names> {
        let Some(outcomes) = self.all_outcomes(view, is_last) else { return Answer::Stale };
        let images = self.planned.iter().zip(&outcomes);
        let images = images.filter(|(_, outcome)| matches!(outcome, Outcome::Image(_)));
        let images = images.map(|(planned, _)| OsStr::new(&planned.plan.shown));
        let others =
            self.names.iter().filter(|name| self.why_hidden(view, name, &outcomes).is_none());
        let mut names: Vec<&OsStr> = images.chain(others).collect();
        names.sort();
        names.dedup();
        Answer::Is(Names::of(names))
    }

    /// What a shown name stands for; `None` if it is gone. An error where only its kind is known. A listing must
    /// not wait for another filesystem, so a directory there has the attributes that the system last knew.
    pub fn list_entry(
        &self,
        view: &View,
        name: &OsStr,
        is_last: bool,
    ) -> Result<Answer<ListedEntry>, Error> {
        let is_own = self.images.contains_key(name) || self.indexes.contains_key(name);
        match self.names.find(name) {
            Ok(index) if !is_own => {
                let kind = self.kinds[index];
                let entry = self.as_listed(view, name, kind);
                Ok(Answer::Is(entry.map_err(|error| (kind, error))))
            }
            _ => Ok(match self.entry(view, name, is_last)? {
                Answer::Stale => Answer::Stale,
                Answer::Is(entry) => Answer::Is(Ok(entry)),
            }),
        }
    }

    /// Why the view hides a name, given the outcomes of its plans; `None` if the name is shown.
    fn why_hidden(&self, view: &View, name: &OsStr, outcomes: &[Outcome]) -> Option<String> {
        let is_image = |n: &&usize| matches!(outcomes[**n], Outcome::Image(_));
        match self.originals.get(name).filter(is_image) {
            Some(_) if self.indexes.contains_key(name) => None,
            Some(&n) if !view.options.show_originals => {
                Some(format!("is in {}", self.planned[n].plan.shown))
            }
            _ => self.hidden_note(view, name).map(str::to_owned),
        }
    }

    /// Bytes of memory for the names and what belongs to each.
    pub fn weight(&self) -> usize {
        size_of::<Directory>() + self.names.weight() + self.kinds.len()
    }

    /// The outcomes of all plans; `None` if files of one have changed since.
    fn all_outcomes(&self, view: &View, is_last: bool) -> Option<Vec<Outcome>> {
        self.outcomes(view, is_last).into_iter().collect()
    }

    /// What became of each planned image, read by several threads where that is to be found out.
    fn outcomes(&self, view: &View, is_last: bool) -> Vec<Option<Outcome>> {
        let unread = self.planned.iter().filter(|planned| planned.known().is_none()).count();
        if unread > 1 {
            let cores = std::thread::available_parallelism().map_or(1, NonZeroUsize::get);
            let threads = unread.min(PARSERS).min(2 * cores);
            // Asked for again below; this is for its effect.
            together(&self.planned, threads, |planned| drop(planned.outcome(view, &self.way)));
        }
        self.planned.iter().map(|planned| self.outcome(view, planned, is_last)).collect()
    }

    /// Adds what became of the checkpoints that were read.
    pub fn count(&self, known: &mut Known) {
        for planned in &self.planned {
            match planned.known() {
                Some(Outcome::Image(_)) => known.images += 1,
                Some(Outcome::Refused(refusal)) if !refusal.is_other => known.refused += 1,
                _ => {}
            }
        }
    }
}

/// Files that are none of the candidates', and what is to be told of them.
fn unlike(files: &[&OsStr], candidates: &[Candidate], keep: &Keep) -> Vec<(OsString, String)> {
    let parts: HashSet<OsString> =
        candidates.iter().flat_map(Candidate::originals).map(OsString::from).collect();
    let others = files.iter().filter(|name| !parts.contains(**name));
    others.filter_map(|name| Some(((*name).to_owned(), near_misses::why(name, keep)?))).collect()
}

fn image(shown: Shown) -> Entry {
    Entry::Image(Arc::new(shown))
}

/// Whether originals are hidden in a directory or beneath it. What cannot be read hides nothing.
fn hides_any(view: &View, way: &Path) -> bool {
    let mut todo = vec![way.to_path_buf()];
    let mut seen = 0;
    while let Some(way) = todo.pop() {
        seen += 1;
        let Ok((hides, folders)) = view.hides(&way) else { continue };
        if hides || seen > MOST_BENEATH {
            return true;
        }
        todo.extend(folders.into_iter().map(|folder| way.join(folder)));
    }
    false
}
