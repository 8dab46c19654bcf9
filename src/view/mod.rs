//! What a directory shows: images in the place of checkpoints, everything else as it is.
//!
//! In: a directory of a [`Root`], and [`Options`]. Out: [`Entry`]s by name, and why what is not
//! shown is hidden, left as it is or refused. Nothing is read before it is asked for; a checkpoint
//! is parsed once, when its directory is first listed or one of its names looked up, and again when
//! its files have changed, which every look at it finds out.
//!
//! What is shown beside images, and why, is in `rules`. How an image is read is not known here.

mod build;
mod directory;
mod directory_cache;
mod error;
mod exclude;
mod headers;
mod hf_cache;
mod layout_cache;
mod names;
mod near_misses;
mod rules;
mod single_target;
mod symlinks;
mod virtual_index;

use std::ffi::{OsStr, OsString};
use std::num::NonZeroUsize;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex};
use std::time::SystemTime;

use lru::LruCache;

use crate::checkpoint;
use crate::image::Image;
use crate::source::{self, Attributes, Kind, Links, OpenFile, Root};
use crate::threads::lock;

pub use build::{Refusal, Shown};
use directory::Directory;
use directory_cache::DirectoryCache;
pub use error::Error;
pub use exclude::{Keep, KeepError};
pub use headers::Header;
use layout_cache::Images;
pub use names::Names;
use single_target::Only;
pub use single_target::open;

/// How a view is to be made.
#[derive(Clone, Debug, Default)]
pub struct Options {
    /// How checkpoints are read.
    pub checkpoint: checkpoint::Options,
    /// Keep the originals visible beside their images.
    pub show_originals: bool,
    /// Names that never become an image.
    pub keep: Keep,
    /// Bytes for virtual files that are not open, and about as many again for directories.
    pub memory: u64,
}

/// Bytes for the plans of directories, whatever the budget: at least the first, at most the second.
const DIRECTORY_BYTES: [u64; 2] = [1 << 20, 64 << 20];

/// Directories for which a change is remembered that their own timestamp does not show.
const MAX_MOVED: NonZeroUsize = NonZeroUsize::new(4_096).unwrap();

/// Looks at a directory that changes under our hands before we give up.
const TRIES: usize = 5;

/// The view of a directory and all beneath it.
#[derive(Debug)]
pub struct View {
    root: Arc<Root>,
    /// The way from the root to what is shown.
    base: PathBuf,
    /// Where it is one checkpoint, its files.
    only: Option<Only>,
    options: Options,
    directories: Mutex<DirectoryCache>,
    /// When something changed in a directory that its own time does not tell.
    moved: Mutex<LruCache<PathBuf, SystemTime>>,
    images: Images,
}

/// What a name stands for.
#[derive(Clone, Debug)]
pub enum Entry {
    /// A checkpoint as one file.
    Image(Arc<Shown>),
    /// The index of a set that is shown as one file, which says that everything is in that.
    Index(Arc<Shown>),
    /// Anything else, as it is; a link that leads to what is not shown, as what it leads to.
    Source(Attributes),
    /// A link, and what it says; nothing where following it is refused.
    Link(Attributes, Option<PathBuf>),
}

impl Entry {
    /// The attributes of the virtual file, source file or link.
    pub fn attributes(&self) -> &Attributes {
        match self {
            Entry::Image(shown) | Entry::Index(shown) => shown.attributes(),
            Entry::Source(attributes) | Entry::Link(attributes, _) => attributes,
        }
    }
}

/// One name of a listing.
#[derive(Clone, Debug)]
pub struct Named {
    /// The name.
    pub name: OsString,
    /// What it stands for.
    pub entry: Entry,
}

/// What a name of a listing stands for; `None` if it is gone. An error where only its kind is known.
pub type ListedEntry = Result<Option<Entry>, (Kind, Error)>;

/// Everything that is to be told of a directory.
#[derive(Debug, Default)]
pub struct Listing {
    /// What is shown, by name.
    pub entries: Vec<Named>,
    /// What is not shown, and why.
    pub hidden: Vec<(OsString, String)>,
    /// What stays as it is although it could have been an image, or has a name like those that could,
    /// and why.
    pub left: Vec<(OsString, String)>,
    /// Checkpoints that cannot be shown as images.
    pub refused: Vec<Arc<Refusal>>,
    /// Names that are there, and the system says no more of them than their kind.
    pub unreadable: Vec<(OsString, Kind, Error)>,
}

impl View {
    /// The view of what a path names: a directory, or a single checkpoint, which is then shown alone.
    pub fn new(path: &Path, options: Options) -> Result<View, Error> {
        let links = links_of(&options.checkpoint);
        let is_directory = match source::is_directory(path) {
            // A numbered set is called by a name that no file has.
            Err(source::Error::Missing { .. }) => false,
            is_directory => is_directory?,
        };
        let (root, base, only) = if is_directory {
            let (root, base) = Root::around(path, links)?;
            (root, base, None)
        } else {
            let (parent, name) = single_target::taken_apart(path)?;
            let (root, base) = Root::around(parent, links)?;
            match single_target::alone(&root, &base, name, &options.keep)? {
                // Where the links of a path that was typed lead is the user's to say.
                only @ Only::File(_) => {
                    let (root, base) = Root::around(parent, Links::Anywhere)?;
                    (root, base, Some(only))
                }
                only @ Only::Set(_) => (root, base, Some(only)),
            }
        };
        let images = Images::new(options.memory);
        let [least, most] = DIRECTORY_BYTES;
        let directories =
            Mutex::new(DirectoryCache::new(options.memory.clamp(least, most) as usize));
        let moved = Mutex::new(LruCache::new(MAX_MOVED));
        let view = View { root, base, only, options, directories, moved, images };
        if view.only.is_some() {
            let listing = view.list(Path::new(""))?;
            if let Some(refusal) = listing.refused.into_iter().next() {
                return Err(Error::Refused(refusal));
            }
        }
        Ok(view)
    }

    /// The root that everything is opened beneath.
    pub fn root(&self) -> &Arc<Root> {
        &self.root
    }

    /// How it is made.
    pub fn options(&self) -> &Options {
        &self.options
    }

    /// The way from the root to a place in the view.
    pub fn way(&self, place: &Path) -> PathBuf {
        if place.as_os_str().is_empty() { self.base.clone() } else { self.base.join(place) }
    }

    /// What the file or directory at a place says of itself, links followed. A directory's time is
    /// its source's, or later where what it shows has changed without that.
    pub fn attributes(&self, place: &Path) -> Result<Attributes, Error> {
        let way = self.way(place);
        Ok(self.timed(&way, self.root.attributes(&way)?))
    }

    fn timed(&self, way: &Path, mut attributes: Attributes) -> Attributes {
        if attributes.kind == Kind::Directory {
            self.refresh(way);
        }
        if attributes.kind == Kind::Directory
            && let Some(&moved) = lock(&self.moved).peek(way)
            && moved > attributes.mtime
        {
            attributes.mtime = moved;
            attributes.ctime = attributes.ctime.max(moved);
        }
        attributes
    }

    /// Finds out what became of checkpoints that were read and have changed: who goes by the time of
    /// a directory does not look at its names.
    fn refresh(&self, way: &Path) {
        let known = lock(&self.directories).peek(way);
        if known.is_some_and(|known| !known.is_fresh(&self.root)) {
            // What goes wrong is for those to hear who ask for the names.
            let _ = self.settled(way, |directory, is_last| Ok(directory.refresh(self, is_last)));
        }
    }

    /// What a directory shows has changed although its own time has not.
    fn moved(&self, way: &Path, when: SystemTime) {
        let mut moved = lock(&self.moved);
        let last = moved.get(way).map_or(when, |last| when.max(*last));
        moved.put(way.to_path_buf(), last);
    }

    /// What a name in the directory at a place stands for; nothing if it is not shown.
    pub fn entry(&self, place: &Path, name: &OsStr) -> Result<Option<Entry>, Error> {
        self.settled(&self.way(place), |directory, is_last| directory.entry(self, name, is_last))
    }

    /// What was known of a place did not hold when it was opened: who asks next is told what is there
    /// then.
    pub fn look_again(&self, place: &Path) {
        let (Some(parent), Some(name)) = (place.parent(), place.file_name()) else { return };
        let known = lock(&self.directories).peek(&self.way(parent));
        if let Some(known) = known {
            known.look_again(name);
        }
    }

    /// Whether a name that is there is shown as what it is.
    fn shows(&self, way: &Path, name: &OsStr) -> Result<bool, Error> {
        self.settled(way, |directory, is_last| Ok(directory.shows(self, name, is_last)))
    }

    /// Whether a name stands for an image.
    fn has_image(&self, way: &Path, name: &OsStr) -> Result<bool, Error> {
        self.settled(way, |directory, is_last| Ok(directory.has_image(self, name, is_last)))
    }

    /// Whether originals are hidden in a directory, and the directories in it.
    fn hides(&self, way: &Path) -> Result<(bool, Vec<OsString>), Error> {
        self.settled(way, |directory, is_last| Ok(directory.hides(self, is_last)))
    }

    /// Everything in the directory at a place. All its checkpoints are parsed for it, several at once.
    pub fn list(&self, place: &Path) -> Result<Listing, Error> {
        self.settled(&self.way(place), |directory, is_last| directory.list(self, is_last))
    }

    /// The names that a directory shows. Parses all its checkpoints, several at once.
    pub fn names(&self, place: &Path) -> Result<Names, Error> {
        self.settled(
            &self.way(place),
            |directory, is_last| Ok(directory.shown_names(self, is_last)),
        )
    }

    /// What some names of a directory stand for, in their order.
    pub fn list_entries<'a>(
        &self,
        place: &Path,
        names: impl Iterator<Item = &'a OsStr> + Clone,
    ) -> Result<Vec<ListedEntry>, Error> {
        self.settled(&self.way(place), |directory, is_last| {
            let mut all = Vec::new();
            for name in names.clone() {
                match directory.list_entry(self, name, is_last)? {
                    Answer::Stale => return Ok(Answer::Stale),
                    Answer::Is(entry) => all.push(entry),
                }
            }
            Ok(Answer::Is(all))
        })
    }

    /// What the headers of the safetensors files say that a listing of this place shows as they are.
    pub fn headers(&self, place: &Path, listing: &Listing) -> Vec<(OsString, Header)> {
        headers::of(self, &self.way(place), &listing.entries)
    }

    /// The image of what was shown: remembered, or made again.
    pub fn image(&self, shown: &Shown) -> Result<Arc<Image>, Error> {
        shown.image(self)
    }

    fn links(&self) -> Links {
        links_of(&self.options.checkpoint)
    }

    /// Opens a file that is shown as it is.
    pub fn open(&self, place: &Path) -> Result<OpenFile, Error> {
        Ok(self.root.open(&self.way(place))?)
    }

    /// Bytes of the images that are kept for the next who opens them.
    pub fn kept_bytes(&self) -> u64 {
        self.images.bytes()
    }

    /// Images that are known, and checkpoints that were refused.
    pub fn known(&self) -> Known {
        let mut known = Known::default();
        for directory in lock(&self.directories).iter() {
            directory.count(&mut known);
        }
        known
    }

    /// Asks a directory, again if it is no longer what was looked at. The last time it is told so:
    /// then what never stays the same must not keep the rest from being shown.
    fn settled<T>(
        &self,
        way: &Path,
        ask: impl Fn(&Directory, bool) -> Result<Answer<T>, Error>,
    ) -> Result<T, Error> {
        let mut directory = self.directory(way, None)?;
        for left in (0..TRIES).rev() {
            match ask(&directory, left == 0)? {
                Answer::Is(answer) => return Ok(answer),
                Answer::Stale => directory = self.directory(way, Some(&directory))?,
            }
        }
        Err(Error::Restless { path: self.root.path().join(way) })
    }

    /// The directory as it is now, but not `old`, which is known not to be.
    fn directory(&self, way: &Path, old: Option<&Arc<Directory>>) -> Result<Arc<Directory>, Error> {
        let known = lock(&self.directories).get(way);
        let attributes = self.root.attributes(way)?;
        if let Some(known) = &known
            && !old.is_some_and(|old| Arc::ptr_eq(old, known))
            && known.is_of(&attributes)
        {
            return Ok(Arc::clone(known));
        }
        let mut new = Directory::read(self, way, &attributes, known.as_deref())?;
        let mut directories = lock(&self.directories);
        // Another may have read it meanwhile; what it began to parse is not parsed again.
        if let Some(other) = directories.get(way)
            && !known.is_some_and(|known| Arc::ptr_eq(&other, &known))
        {
            if other.is_of(&attributes) {
                return Ok(other);
            }
            new.take_over(&other);
        }
        let new = Arc::new(new);
        directories.put(way, Arc::clone(&new));
        Ok(new)
    }
}

fn links_of(options: &checkpoint::Options) -> Links {
    if options.follow_symlinks { Links::Anywhere } else { Links::Inside }
}

/// What there is to count.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Known {
    /// Checkpoints shown as images.
    pub images: u64,
    /// Checkpoints refused.
    pub refused: u64,
}

/// An answer of a directory, or that a file has changed and it must be read again.
enum Answer<T> {
    Is(T),
    Stale,
}
