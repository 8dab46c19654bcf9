//! What became of a checkpoint that was to be an image: an image, or a refusal and why.
//!
//! Either holds as long as the files that it was made of are what they were.

use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, OnceLock, Weak};
use std::time::{Duration, Instant, SystemTime};

use crate::checkpoint::{self, Checkpoint, Format, Options};
use crate::image::{Hash, Image};
use crate::source::{Attributes, Kind, OpenFile, Root, State};
use crate::threads::lock;

use super::rules::Plan;
use super::{Error, View, virtual_index};

/// How long a look at the files of a checkpoint is good for: within a second a change must show, and
/// the kernel asks twice a second for each name in use.
const LOOK: Duration = Duration::from_millis(100);

/// What was read from unsettled files is read again after this many times the duration of that read.
const REREAD_FACTOR: u32 = 10;

/// The least time until unsettled files are read again.
const MIN_REREAD_DELAY: Duration = Duration::from_millis(250);

/// A plan, and what became of it.
#[derive(Debug)]
pub struct Planned {
    pub plan: Plan,
    /// The files that it is made of, from the root.
    files: Vec<PathBuf>,
    made: OnceLock<Made>,
    looked: Mutex<Option<Looked>>,
    /// A reader found other bytes than those that were parsed, under an unchanged state.
    is_outdated: AtomicBool,
    after: Option<After>,
}

/// The last look at the files.
#[derive(Debug)]
struct Looked {
    /// When it was; nothing if it is not good any more.
    at: Option<Instant>,
    attributes: Arc<Attributes>,
}

/// What was shown by the name before the files changed.
#[derive(Clone, Debug)]
struct After {
    changed: Change,
    previous: Outcome,
}

/// When files changed; nothing if they were only touched: moved, linked, given other permissions.
type Change = Option<SystemTime>;

#[derive(Debug)]
struct Made {
    /// The state of each of the files, as it was before they were read.
    states: Vec<Option<State>>,
    outcome: Outcome,
    /// When unsettled files are read again although their states are equal; `None` if the files were settled.
    expires: Option<Instant>,
}

#[derive(Clone, Debug)]
pub enum Outcome {
    Image(Arc<Facts>),
    Refused(Arc<Refusal>),
}

impl Outcome {
    /// The identity of the virtual file, if it is one.
    fn identity(&self) -> Option<Hash> {
        match self {
            Outcome::Image(facts) => Some(facts.identity),
            Outcome::Refused(_) => None,
        }
    }

    /// Whether it was refused for this reason.
    fn is_refused_for(&self, reason: &str) -> bool {
        matches!(self, Outcome::Refused(refusal) if refusal.reason == reason)
    }
}

/// What is known of an image without holding it.
#[derive(Debug)]
pub struct Facts {
    /// The directory's way from the root, and the candidate: to read it again.
    way: PathBuf,
    plan: Plan,
    options: Options,
    size: u64,
    /// Bytes of the index that names the image, where there is one.
    index_size: u64,
    identity: Hash,
    layout: Hash,
    tensors: usize,
    format: Format,
    notes: Vec<String>,
    /// Whether every change to its files since they were read shows in their states.
    is_settled: bool,
    open: Mutex<Weak<Image>>,
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
    pub is_other: bool,
}

/// An image as it is shown now.
#[derive(Clone, Debug)]
pub struct Shown {
    facts: Arc<Facts>,
    attributes: Arc<Attributes>,
    is_index: bool,
}

impl Planned {
    pub fn new(way: &Path, plan: Plan) -> Planned {
        let files = plan.candidate.originals();
        let files = files.into_iter().map(|name| way.join(name)).collect();
        let (made, looked) = (OnceLock::new(), Mutex::new(None));
        Planned { plan, files, made, looked, is_outdated: AtomicBool::new(false), after: None }
    }

    /// A plan for a name that there was one for before, which goes on if it still holds.
    pub fn again(before: &Arc<Planned>, root: &Root, way: &Path, plan: Plan) -> Arc<Planned> {
        let is_same = before.plan == plan;
        let after = match before.made.get() {
            None if is_same => return Arc::clone(before),
            None => before.after.clone(),
            Some(made) => {
                // Another plan comes of other names, or of an index that was written since the last look.
                let changed = match is_same {
                    true if before.is_expired() => Some(Some(SystemTime::now())),
                    true => before.look(root, made).err(),
                    false => before.changes(root, made).err(),
                };
                if is_same && changed.is_none() {
                    return Arc::clone(before);
                }
                changed.map(|changed| After { changed, previous: made.outcome.clone() })
            }
        };
        Arc::new(Planned { after, ..Planned::new(way, plan) })
    }

    /// What became of it: read now if it was not. Others who ask meanwhile wait for the answer.
    /// Nothing if its files have changed since: then it is a plan for what is gone.
    pub fn outcome(&self, view: &View, way: &Path) -> Option<Outcome> {
        let made = self.made.get_or_init(|| {
            let settled = self.settled_states(&view.root);
            let states: Vec<Option<State>> =
                self.states(&view.root).into_iter().map(|a| a.map(|a| a.state())).collect();
            let is_settled = settled == states;
            let started = Instant::now();
            let previous = self.after.as_ref().map(|after| &after.previous);
            let outcome = make(view, way, &self.plan, is_settled, previous);
            let delay = || MIN_REREAD_DELAY.max(started.elapsed() * REREAD_FACTOR);
            let expires = (!is_settled).then(|| Instant::now() + delay());
            if let Some(After { changed: Some(when), previous }) = &self.after
                && previous.identity() != outcome.identity()
            {
                view.moved(way, *when);
            }
            Made { states, outcome, expires }
        });
        self.look(&view.root, made).ok()?;
        Some(made.outcome.clone())
    }

    /// Whether it is to be read again although its files look the same. Asked for one name at a time: a listing of
    /// many would never end.
    pub fn is_expired(&self) -> bool {
        let expires = self.made.get().and_then(|made| made.expires);
        expires.is_some_and(|at| self.is_outdated.load(Ordering::Relaxed) || Instant::now() >= at)
    }

    /// Whether what became of it still holds, if that was asked before.
    pub fn is_fresh(&self, root: &Root) -> bool {
        match self.made.get() {
            Some(made) => self.look(root, made).is_ok(),
            // Until it is read, what the name showed before is not known to have changed.
            None => self.after.is_none(),
        }
    }

    /// Whether it was read, or took the place of what was.
    pub fn was_asked(&self) -> bool {
        self.made.get().is_some() || self.after.is_some()
    }

    /// The refusal of what never stays the same long enough to be read.
    pub fn restless(&self, view: &View, way: &Path) -> Outcome {
        let path = view.root.path().join(way).join(&self.plan.candidate.name);
        Outcome::Refused(Arc::new(refusal(&self.plan, &Error::Restless { path })))
    }

    /// What became of it, if that was asked before.
    pub fn known(&self) -> Option<&Outcome> {
        self.made.get().map(|made| &made.outcome)
    }

    /// An image with what it says of itself at this moment.
    pub fn shown(&self, facts: &Arc<Facts>) -> Option<Shown> {
        let attributes = Arc::clone(&lock(&self.looked).as_ref()?.attributes);
        Some(Shown { facts: Arc::clone(facts), attributes, is_index: false })
    }

    /// The index that names the image, likewise.
    pub fn index(&self, facts: &Arc<Facts>) -> Option<Shown> {
        let image = self.shown(facts)?;
        let attributes = Arc::new(sized(*image.attributes, facts.index_size));
        Some(Shown { attributes, is_index: true, ..image })
    }

    /// Invalidates the last look at the files, and the outcome if the files were not settled.
    pub fn look_again(&self) {
        self.is_outdated.store(true, Ordering::Relaxed);
        if let Some(looked) = lock(&self.looked).as_mut() {
            looked.at = None;
        }
    }

    /// The state of each settled file; `None` for the others.
    fn settled_states(&self, root: &Arc<Root>) -> Vec<Option<State>> {
        let settled = |file: &PathBuf| {
            let open = root.open(file).ok().filter(OpenFile::is_settled)?;
            Some(open.file().state())
        };
        self.files.iter().map(settled).collect()
    }

    fn states(&self, root: &Root) -> Vec<Option<Attributes>> {
        self.files.iter().map(|file| root.attributes(file).ok()).collect()
    }

    /// Compares the files with what they were, if the last look is not good any more. An error is a
    /// change.
    fn look(&self, root: &Root, made: &Made) -> Result<(), Change> {
        let at = lock(&self.looked).as_ref().and_then(|looked| looked.at);
        if at.is_some_and(|at| at.elapsed() < LOOK) {
            return Ok(());
        }
        let states = self.changes(root, made)?;
        let size = match &made.outcome {
            Outcome::Image(facts) => facts.size,
            Outcome::Refused(_) => 0,
        };
        if let Some(together) = together(&states, size) {
            let attributes = Arc::new(together);
            *lock(&self.looked) = Some(Looked { at: Some(Instant::now()), attributes });
        }
        Ok(())
    }

    /// The files as they are, or how they changed.
    fn changes(&self, root: &Root, made: &Made) -> Result<Vec<Attributes>, Change> {
        let states = self.states(root);
        let mut change: Option<Change> = None;
        for (now, then) in states.iter().zip(&made.states) {
            let state = now.as_ref().map(Attributes::state);
            if state == *then {
                continue;
            }
            let identity = |state: Option<State>| state.map(|state| state.identity);
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
fn together(sources: &[Attributes], size: u64) -> Option<Attributes> {
    let mut whole = *sources.first()?;
    for source in sources {
        whole.mode &= source.mode;
        whole.mtime = whole.mtime.max(source.mtime);
        whole.ctime = whole.ctime.max(source.ctime);
        whole.atime = whole.atime.max(source.atime);
    }
    whole.kind = Kind::File;
    whole.mode &= 0o777;
    whole.links = 1;
    Some(sized(whole, size))
}

fn sized(mut attributes: Attributes, size: u64) -> Attributes {
    attributes.size = size;
    attributes.blocks = size.div_ceil(512);
    attributes
}

fn refusal(plan: &Plan, error: &Error) -> Refusal {
    Refusal {
        path: error.path().to_path_buf(),
        originals: plan.candidate.originals(),
        reason: error.to_string(),
        remedy: error.remedy().to_owned(),
        is_other: matches!(error, Error::Checkpoint(checkpoint::Error::NotACheckpoint { .. })),
    }
}

fn make(
    view: &View,
    way: &Path,
    plan: &Plan,
    is_settled: bool,
    previous: Option<&Outcome>,
) -> Outcome {
    let read = read(view, way, plan, &view.options.checkpoint);
    let (image, facts) = match read {
        Ok((image, facts)) => (image, Facts { is_settled, ..facts }),
        Err(error) => {
            let refusal = refusal(plan, &error);
            let name = plan.candidate.name.as_str();
            let is_known =
                previous.is_some_and(|previous| previous.is_refused_for(&refusal.reason));
            if refusal.is_other || is_known {
                tracing::debug!(name, reason = refusal.reason, "stays as it is");
            } else {
                tracing::warn!(
                    name,
                    reason = refusal.reason,
                    remedy = refusal.remedy,
                    "refused, stays as it is"
                );
            }
            return Outcome::Refused(Arc::new(refusal));
        }
    };
    if is_settled {
        view.images.keep(&image);
    }
    for note in &facts.notes {
        tracing::info!(name = plan.shown, note, "shown");
    }
    Outcome::Image(Arc::new(facts))
}

fn read(
    view: &View,
    way: &Path,
    plan: &Plan,
    options: &Options,
) -> Result<(Arc<Image>, Facts), Error> {
    let read =
        |options: &Options| checkpoint::open_candidate(&view.root, way, &plan.candidate, options);
    let mut checkpoint = match read(options) {
        // The key is for those that have it.
        Err(checkpoint::Error::Choice {
            fault: checkpoint::ChoiceFault::NoSuchKey { key, .. },
            ..
        }) => {
            let mut whole = read(&Options { root_key: None, ..options.clone() })?;
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
    let image = Arc::new(Image::new(checkpoint)?);
    let index_size = match plan.candidate.index() {
        Some(_) => virtual_index::text(&image, &plan.shown).len() as u64,
        None => 0,
    };
    let facts = Facts {
        way: way.to_path_buf(),
        plan: plan.clone(),
        options,
        size: image.size(),
        index_size,
        identity: image.identity(),
        layout: image.layout(),
        tensors: image.tensors().len(),
        format,
        notes,
        is_settled: false,
        open: Mutex::new(Arc::downgrade(&image)),
    };
    Ok((image, facts))
}

impl Shown {
    /// Mode, owner, size and times.
    pub fn attributes(&self) -> &Attributes {
        &self.attributes
    }

    /// A hash of the sources' states and the options: another is another file.
    pub fn identity(&self) -> Hash {
        self.facts.identity
    }

    /// A hash of the header.
    pub fn layout(&self) -> Hash {
        self.facts.layout
    }

    /// How many tensors it has.
    pub fn tensors(&self) -> usize {
        self.facts.tensors
    }

    /// The format of its sources.
    pub fn format(&self) -> Format {
        self.facts.format
    }

    /// The options that it was read with.
    pub fn options(&self) -> &Options {
        &self.facts.options
    }

    /// Whether every change to its files since they were read shows in their states. If not, bytes read before an
    /// open may be older than what the open must show.
    pub fn is_settled(&self) -> bool {
        self.facts.is_settled
    }

    /// What was chosen and left out.
    pub fn notes(&self) -> &[String] {
        &self.facts.notes
    }

    /// The names of the files that it takes the place of.
    pub fn originals(&self) -> Vec<String> {
        self.facts.plan.candidate.originals()
    }

    /// The way from the root to what it is made of: its file, its index, or a numbered set's name.
    pub fn source(&self) -> PathBuf {
        self.facts.way.join(&self.facts.plan.candidate.name)
    }

    /// Whether it is the index that names the image, and not the image.
    pub fn is_index(&self) -> bool {
        self.is_index
    }

    pub(super) fn image(&self, view: &View) -> Result<Arc<Image>, Error> {
        let image = self.whole(view)?;
        if self.is_index {
            let text = virtual_index::text(&image, &self.facts.plan.shown);
            return Ok(Arc::new(Image::made(text)));
        }
        Ok(image)
    }

    /// The image, also of its index.
    fn whole(&self, view: &View) -> Result<Arc<Image>, Error> {
        let facts = &self.facts;
        let known = || lock(&facts.open).upgrade().or_else(|| view.images.get(facts.identity));
        if let Some(image) = facts.is_settled.then(known).flatten() {
            return Ok(image);
        }
        let (image, _) = read(view, &facts.way, &facts.plan, &facts.options)?;
        if image.identity() != facts.identity {
            let path = view.root.path().join(self.source());
            return Err(crate::source::Error::Changed { path }.into());
        }
        if !facts.is_settled {
            return Ok(image);
        }
        let mut open = lock(&facts.open);
        // Another may have read it meanwhile; one is enough.
        let image = open.upgrade().unwrap_or(image);
        *open = Arc::downgrade(&image);
        drop(open);
        view.images.keep(&image);
        Ok(image)
    }
}
