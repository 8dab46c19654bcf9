//! What a directory shows: images in the place of checkpoints, everything else as it is.
//!
//! In: a directory of a [`Root`], and [`ViewOptions`]. Out: [`ViewEntry`]s by name, and why what is not
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
use crate::source::{self, FileKind, FileMetadata, LinkPolicy, OpenFile, Root};
use crate::threads::lock;
use crate::virtual_file::VirtualFile;

pub use build::{Refusal, ShownFile};
use directory::DirectoryView;
use directory_cache::DirectoryCache;
pub use error::ViewError;
pub use exclude::{KeepPatternError, KeepRules};
pub use headers::SafetensorsHeader;
use layout_cache::VirtualFileCache;
pub use names::SortedNames;
use single_target::SingleTarget;
pub use single_target::open;

/// How a view is to be made.
#[derive(Clone, Debug, Default)]
pub struct ViewOptions {
    /// How checkpoints are read.
    pub parse: checkpoint::ParseOptions,
    /// Keep the originals visible beside their images.
    pub show_originals: bool,
    /// Names that never become an image.
    pub keep: KeepRules,
    /// Bytes for virtual files that are not open, and about as many again for directories.
    pub cache_bytes: u64,
}

/// Bytes for the plans of directories, whatever the budget: at least the first, at most the second.
const DIRECTORY_CACHE_BYTES: [u64; 2] = [1 << 20, 64 << 20];

/// Directories for which a change is remembered that their own timestamp does not show.
const MAX_CHANGE_TIMES: NonZeroUsize = NonZeroUsize::new(4_096).unwrap();

/// Looks at a directory that changes under our hands before we give up.
const MAX_READ_TRIES: usize = 5;

/// The view of a directory and all beneath it.
#[derive(Debug)]
pub struct View {
    root: Arc<Root>,
    /// The way from the root to what is shown.
    base: PathBuf,
    /// Where it is one checkpoint, its files.
    target: Option<SingleTarget>,
    options: ViewOptions,
    directories: Mutex<DirectoryCache>,
    /// When something changed in a directory that its own time does not tell.
    change_times: Mutex<LruCache<PathBuf, SystemTime>>,
    virtual_files: VirtualFileCache,
}

/// What a name stands for.
#[derive(Clone, Debug)]
pub enum ViewEntry {
    /// A checkpoint as one file.
    VirtualFile(Arc<ShownFile>),
    /// The index of a set that is shown as one file, which says that everything is in that.
    Index(Arc<ShownFile>),
    /// Anything else, as it is; a link that leads to what is not shown, as what it leads to.
    Source(FileMetadata),
    /// A link, and what it says; nothing where following it is refused.
    Link(FileMetadata, Option<PathBuf>),
}

impl ViewEntry {
    /// The attributes of the virtual file, source file or link.
    pub fn metadata(&self) -> &FileMetadata {
        match self {
            ViewEntry::VirtualFile(shown) | ViewEntry::Index(shown) => shown.metadata(),
            ViewEntry::Source(attributes) | ViewEntry::Link(attributes, _) => attributes,
        }
    }
}

/// One name of a listing.
#[derive(Clone, Debug)]
pub struct NamedEntry {
    /// The name.
    pub name: OsString,
    /// What it stands for.
    pub entry: ViewEntry,
}

/// What a name of a listing stands for; `None` if it is gone. An error where only its kind is known.
pub type ListedEntry = Result<Option<ViewEntry>, (FileKind, ViewError)>;

/// Everything that is to be told of a directory.
#[derive(Debug, Default)]
pub struct Listing {
    /// What is shown, by name.
    pub entries: Vec<NamedEntry>,
    /// What is not shown, and why.
    pub hidden: Vec<(OsString, String)>,
    /// What stays as it is although it could have been an image, or has a name like those that could,
    /// and why.
    pub skipped: Vec<(OsString, String)>,
    /// Checkpoints that cannot be shown as images.
    pub refused: Vec<Arc<Refusal>>,
    /// Names that are there, and the system says no more of them than their kind.
    pub unreadable: Vec<(OsString, FileKind, ViewError)>,
}

impl View {
    /// The view of what a path names: a directory, or a single checkpoint, which is then shown alone.
    pub fn new(path: &Path, options: ViewOptions) -> Result<View, ViewError> {
        let links = options.parse.link_policy();
        let is_directory = match source::is_directory(path) {
            // A numbered set is called by a name that no file has.
            Err(source::SourceError::Missing { .. }) => false,
            is_directory => is_directory?,
        };
        let (root, base, only) = if is_directory {
            let (root, base) = Root::for_directory(path, links)?;
            (root, base, None)
        } else {
            let (parent, name) = single_target::split_parent(path)?;
            let (root, base) = Root::for_directory(parent, links)?;
            match single_target::resolve(&root, &base, name, &options.keep)? {
                // Where the links of a path that was typed lead is the user's to say.
                only @ SingleTarget::File(_) => {
                    let (root, base) = Root::for_directory(parent, LinkPolicy::Anywhere)?;
                    (root, base, Some(only))
                }
                only @ SingleTarget::Files(_) => (root, base, Some(only)),
            }
        };
        let images = VirtualFileCache::new(options.cache_bytes);
        let [least, most] = DIRECTORY_CACHE_BYTES;
        let directories =
            Mutex::new(DirectoryCache::new(options.cache_bytes.clamp(least, most) as usize));
        let moved = Mutex::new(LruCache::new(MAX_CHANGE_TIMES));
        let view = View {
            root,
            base,
            target: only,
            options,
            directories,
            change_times: moved,
            virtual_files: images,
        };
        if view.target.is_some() {
            let listing = view.list(Path::new(""))?;
            if let Some(refusal) = listing.refused.into_iter().next() {
                return Err(ViewError::Refused(refusal));
            }
        }
        Ok(view)
    }

    /// The root that everything is opened beneath.
    pub fn root(&self) -> &Arc<Root> {
        &self.root
    }

    /// How it is made.
    pub fn options(&self) -> &ViewOptions {
        &self.options
    }

    /// The way from the root to a place in the view.
    pub fn source_path(&self, place: &Path) -> PathBuf {
        if place.as_os_str().is_empty() { self.base.clone() } else { self.base.join(place) }
    }

    /// What the file or directory at a place says of itself, links followed. A directory's time is
    /// its source's, or later where what it shows has changed without that.
    pub fn metadata(&self, place: &Path) -> Result<FileMetadata, ViewError> {
        let way = self.source_path(place);
        Ok(self.with_change_time(&way, self.root.metadata(&way)?))
    }

    fn with_change_time(&self, way: &Path, mut attributes: FileMetadata) -> FileMetadata {
        if attributes.kind == FileKind::Directory {
            self.refresh(way);
        }
        if attributes.kind == FileKind::Directory
            && let Some(&moved) = lock(&self.change_times).peek(way)
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
            let _ =
                self.ask_directory(way, |directory, is_last| Ok(directory.refresh(self, is_last)));
        }
    }

    /// What a directory shows has changed although its own time has not.
    fn record_change(&self, way: &Path, when: SystemTime) {
        let mut moved = lock(&self.change_times);
        let last = moved.get(way).map_or(when, |last| when.max(*last));
        moved.put(way.to_path_buf(), last);
    }

    /// What a name in the directory at a place stands for; nothing if it is not shown.
    pub fn lookup(&self, place: &Path, name: &OsStr) -> Result<Option<ViewEntry>, ViewError> {
        self.ask_directory(&self.source_path(place), |directory, is_last| {
            directory.lookup(self, name, is_last)
        })
    }

    /// What was known of a place did not hold when it was opened: who asks next is told what is there
    /// then.
    pub fn invalidate(&self, place: &Path) {
        let (Some(parent), Some(name)) = (place.parent(), place.file_name()) else { return };
        let known = lock(&self.directories).peek(&self.source_path(parent));
        if let Some(known) = known {
            known.invalidate(name);
        }
    }

    /// Whether a name that is there is shown as what it is.
    fn shows_as_is(&self, way: &Path, name: &OsStr) -> Result<bool, ViewError> {
        self.ask_directory(way, |directory, is_last| Ok(directory.shows_as_is(self, name, is_last)))
    }

    /// Whether a name stands for an image.
    fn has_virtual_file(&self, way: &Path, name: &OsStr) -> Result<bool, ViewError> {
        self.ask_directory(way, |directory, is_last| {
            Ok(directory.has_virtual_file(self, name, is_last))
        })
    }

    /// Whether originals are hidden in a directory, and the directories in it.
    fn hides_originals(&self, way: &Path) -> Result<(bool, Vec<OsString>), ViewError> {
        self.ask_directory(way, |directory, is_last| Ok(directory.hides_originals(self, is_last)))
    }

    /// Everything in the directory at a place. All its checkpoints are parsed for it, several at once.
    pub fn list(&self, place: &Path) -> Result<Listing, ViewError> {
        self.ask_directory(&self.source_path(place), |directory, is_last| {
            directory.list(self, is_last)
        })
    }

    /// The names that a directory shows. Parses all its checkpoints, several at once.
    pub fn names(&self, place: &Path) -> Result<SortedNames, ViewError> {
        self.ask_directory(&self.source_path(place), |directory, is_last| {
            Ok(directory.shown_names(self, is_last))
        })
    }

    /// What some names of a directory stand for, in their order.
    pub fn list_entries<'a>(
        &self,
        place: &Path,
        names: impl Iterator<Item = &'a OsStr> + Clone,
    ) -> Result<Vec<ListedEntry>, ViewError> {
        self.ask_directory(&self.source_path(place), |directory, is_last| {
            let mut all = Vec::new();
            for name in names.clone() {
                match directory.list_entry(self, name, is_last)? {
                    MaybeStale::Stale => return Ok(MaybeStale::Stale),
                    MaybeStale::Fresh(entry) => all.push(entry),
                }
            }
            Ok(MaybeStale::Fresh(all))
        })
    }

    /// What the headers of the safetensors files say that a listing of this place shows as they are.
    pub fn safetensors_headers(
        &self,
        place: &Path,
        listing: &Listing,
    ) -> Vec<(OsString, SafetensorsHeader)> {
        headers::read_headers(self, &self.source_path(place), &listing.entries)
    }

    /// The image of what was shown: remembered, or made again.
    pub fn virtual_file(&self, shown: &ShownFile) -> Result<Arc<VirtualFile>, ViewError> {
        shown.virtual_file(self)
    }

    fn link_policy(&self) -> LinkPolicy {
        self.options.parse.link_policy()
    }

    /// Opens a file that is shown as it is.
    pub fn open(&self, place: &Path) -> Result<OpenFile, ViewError> {
        Ok(self.root.open(&self.source_path(place))?)
    }

    /// Bytes of the images that are kept for the next who opens them.
    pub fn cached_bytes(&self) -> u64 {
        self.virtual_files.used_bytes()
    }

    /// Images that are known, and checkpoints that were refused.
    pub fn counts(&self) -> CheckpointCounts {
        let mut known = CheckpointCounts::default();
        for directory in lock(&self.directories).iter() {
            directory.count(&mut known);
        }
        known
    }

    /// Asks a directory, again if it is no longer what was looked at. The last time it is told so:
    /// then what never stays the same must not keep the rest from being shown.
    fn ask_directory<T>(
        &self,
        way: &Path,
        ask: impl Fn(&DirectoryView, bool) -> Result<MaybeStale<T>, ViewError>,
    ) -> Result<T, ViewError> {
        let mut directory = self.current_directory(way, None)?;
        for left in (0..MAX_READ_TRIES).rev() {
            match ask(&directory, left == 0)? {
                MaybeStale::Fresh(answer) => return Ok(answer),
                MaybeStale::Stale => directory = self.current_directory(way, Some(&directory))?,
            }
        }
        Err(ViewError::KeepsChanging { path: self.root.path().join(way) })
    }

    /// The directory as it is now, but not `old`, which is known not to be.
    fn current_directory(
        &self,
        way: &Path,
        old: Option<&Arc<DirectoryView>>,
    ) -> Result<Arc<DirectoryView>, ViewError> {
        let known = lock(&self.directories).get(way);
        let attributes = self.root.metadata(way)?;
        if let Some(known) = &known
            && !old.is_some_and(|old| Arc::ptr_eq(old, known))
            && known.matches(&attributes)
        {
            return Ok(Arc::clone(known));
        }
        let mut new = DirectoryView::read(self, way, &attributes, known.as_deref())?;
        let mut directories = lock(&self.directories);
        // Another may have read it meanwhile; what it began to parse is not parsed again.
        if let Some(other) = directories.get(way)
            && !known.is_some_and(|known| Arc::ptr_eq(&other, &known))
        {
            if other.matches(&attributes) {
                return Ok(other);
            }
            new.adopt_outcomes(&other);
        }
        let new = Arc::new(new);
        directories.put(way, Arc::clone(&new));
        Ok(new)
    }
}

/// What there is to count.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct CheckpointCounts {
    /// Checkpoints shown as images.
    pub virtual_files: u64,
    /// Checkpoints refused.
    pub refused: u64,
}

/// An answer of a directory, or that a file has changed and it must be read again.
enum MaybeStale<T> {
    Fresh(T),
    Stale,
}
