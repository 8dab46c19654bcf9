//! What is open: images, files passed through, and files that the kernel reads by itself.

use std::collections::{HashMap, HashSet};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, OnceLock, Weak};

use fuser::{BackingId, Errno, FopenFlags, ReplyOpen};

use crate::cache::{Cache, Served};
use crate::image::Image;
use crate::source::{self, OpenFile, State};
use crate::threads::lock;
use crate::view::{self, View};

use super::FOR_IMAGES;
use super::attr::errno;
use super::inodes::{Node, What};
use super::open_images::{OpenImage, OpenImages};
use super::read_reply::{Answer, Range};

/// An answer to opening.
pub struct Opened {
    pub handle: u64,
    pub flags: FopenFlags,
    /// The file that the kernel reads by itself from now on.
    pub backing: Option<Arc<BackingId>>,
}

/// Everything that is open.
pub struct OpenedFiles {
    next: AtomicU64,
    files: Mutex<HashMap<u64, Arc<OpenHandle>>>,
    images: OpenImages,
    view: Arc<View>,
    cache: Arc<Cache>,
    /// What reads each file passed through ahead, by number of inode: one for all who have it open.
    ahead: Mutex<HashMap<u64, Weak<Served>>>,
    /// Files that the kernel reads by itself, by number of inode, and how often each is open: the
    /// kernel wants one for each inode.
    backings: Mutex<HashMap<u64, (Arc<BackingId>, usize)>>,
    /// The state that each file passed through had when the kernel last began to keep its bytes.
    kept: Mutex<lru::LruCache<u64, State>>,
    /// Inode numbers of virtual files that the page cache may hold from a read of unsettled sources.
    suspect: Mutex<HashSet<u64>>,
    passthrough: AtomicBool,
    /// Who is told that what the kernel knows is no longer so.
    kernel: OnceLock<fuser::Notifier>,
    /// The budget for everything that is held.
    memory: u64,
}

/// Bytes of the budget that stay for blocks, a few for each reader. Open virtual files and those kept for the next open
/// take at most the rest, unless a single one is larger.
const LEAST: u64 = 8 << 20;

/// Files whose last state is remembered.
const KEPT: std::num::NonZeroUsize = std::num::NonZeroUsize::new(65_536).unwrap();

/// A file of fewer bytes is read as it is asked for: reading ahead would gain nothing.
const SMALL: u64 = 1 << 20;

/// One open of a file.
struct OpenHandle {
    number: u64,
    content: Content,
    /// An open that does not keep the page cache drops it when the open completes. The first read or close of the
    /// handle shows that it has completed: the page cache is valid from then on.
    fresh_cache: Mutex<Option<FreshCache>>,
}

/// What a page cache holds that was dropped when an open completed.
enum FreshCache {
    /// A virtual file of settled sources.
    Image,
    /// This state of a file.
    File(State),
}

/// A file that is open, before the kernel has a handle of it.
pub enum Ready {
    Image {
        image: Arc<OpenImage>,
        /// Whether the page cache of it is valid.
        is_cache_valid: bool,
        is_settled: bool,
    },
    File(OpenFile),
}

/// What is behind an open file.
pub enum Content {
    Image(Arc<OpenImage>),
    /// A file that is shown as it is, and what reads it ahead as long as it stays what it was.
    File(Arc<OpenFile>, Option<Arc<Served>>),
    /// Read by the kernel.
    Backing,
}

impl OpenedFiles {
    pub fn new(view: Arc<View>, cache: Arc<Cache>, memory: u64, passthrough: bool) -> OpenedFiles {
        let for_images = memory.saturating_sub(LEAST + memory / FOR_IMAGES);
        OpenedFiles {
            next: AtomicU64::new(1),
            files: Mutex::default(),
            images: OpenImages::new(Arc::clone(&view), Arc::clone(&cache), for_images),
            view,
            cache,
            ahead: Mutex::default(),
            backings: Mutex::default(),
            kept: Mutex::new(lru::LruCache::new(KEPT)),
            suspect: Mutex::default(),
            passthrough: AtomicBool::new(passthrough),
            kernel: OnceLock::new(),
            memory,
        }
    }

    /// From now on the kernel can be told.
    pub fn may_tell(&self, kernel: fuser::Notifier) {
        // There is one session for each mount.
        let _ = self.kernel.set(kernel);
    }

    pub fn wants_passthrough(&self) -> bool {
        self.passthrough.load(Ordering::Relaxed)
    }

    pub fn set_passthrough(&self, works: bool) {
        self.passthrough.store(works, Ordering::Relaxed);
    }

    /// Images that are open, and what they weigh.
    pub fn images(&self) -> (u64, u64) {
        self.images.count()
    }

    /// About how many bytes images take, open or kept.
    pub fn weight(&self) -> u64 {
        self.images.count().1 + self.view.kept_bytes()
    }

    /// Leaves to blocks what images do not take.
    fn balance(&self) {
        let rest = self.memory.saturating_sub(self.weight());
        self.cache.set_memory(rest.max(LEAST.min(self.memory)));
    }

    /// Opens what a number stands for, as far as that goes without the kernel.
    pub fn ready(&self, number: u64, node: &Node) -> Result<Ready, view::Error> {
        if let What::Image(shown) = &node.what {
            let is_cache_valid = shown.is_settled() && !lock(&self.suspect).contains(&number);
            let image = self.images.open(number, shown, is_cache_valid)?;
            self.balance();
            return Ok(Ready::Image { image, is_cache_valid, is_settled: shown.is_settled() });
        }
        let file = self.view.open(&node.path.to_path())?;
        let identity = file.file().identity();
        if (identity.dev, identity.ino) != (node.last.dev, node.last.ino) {
            let path = file.file().path();
            return Err(source::Error::Changed { path }.into());
        }
        Ok(Ready::File(file))
    }

    /// Closes what was made ready and is not opened after all.
    pub fn give_up(&self, number: u64, ready: Ready) {
        if let Ready::Image { .. } = ready {
            self.images.close(number);
            self.balance();
        }
    }

    /// Opens what is ready for the kernel.
    pub fn open(
        &self,
        number: u64,
        node: &Node,
        ready: Ready,
        reply: &ReplyOpen,
    ) -> Result<Opened, view::Error> {
        match ready {
            Ready::Image { image, is_cache_valid, is_settled } => {
                if !is_settled {
                    lock(&self.suspect).insert(number);
                }
                let fresh = (is_settled && !is_cache_valid).then_some(FreshCache::Image);
                let handle = self.add(number, Content::Image(image), fresh);
                let flags = keep_cache_if(is_cache_valid) | NO_FLUSH;
                Ok(Opened { handle, flags, backing: None })
            }
            Ready::File(file) => self.open_source(number, node, file, reply),
        }
    }

    fn open_source(
        &self,
        number: u64,
        node: &Node,
        file: OpenFile,
        reply: &ReplyOpen,
    ) -> Result<Opened, view::Error> {
        let identity = file.file().identity();
        if !node.last.has_identity(&identity)
            && let Some(kernel) = self.kernel.get()
        {
            // Who opens it is to see all of it, and not as much as there was at the last look. What the
            // kernel has forgotten meanwhile it will ask for anyway.
            let _ = kernel.inval_inode(fuser::INodeNo(number), ATTRIBUTES_ALONE, 0);
        }
        if self.wants_passthrough()
            && let Some(backing) = self.backing(number, &file, reply)
        {
            let handle = self.add(number, Content::Backing, None);
            return Ok(Opened { handle, flags: NO_FLUSH, backing: Some(backing) });
        }
        let state = file.file().state();
        let is_settled = file.is_settled();
        let is_cache_valid = is_settled && lock(&self.kept).get(&number) == Some(&state);
        if !is_cache_valid {
            lock(&self.kept).pop(&number);
        }
        // Blocks read ahead are cached, and those of an unsettled file could get outdated unnoticed.
        let is_ahead = is_settled && identity.size >= SMALL;
        let served = if is_ahead { Some(self.ahead(number, &file)?) } else { None };
        let fresh = (is_settled && !is_cache_valid).then_some(FreshCache::File(state));
        let handle = self.add(number, Content::File(Arc::new(file), served), fresh);
        let flags = keep_cache_if(is_cache_valid) | NO_FLUSH;
        Ok(Opened { handle, flags, backing: None })
    }

    /// What reads a file ahead: what already does, if the file is still what it was then.
    fn ahead(&self, number: u64, file: &OpenFile) -> Result<Arc<Served>, view::Error> {
        let known = lock(&self.ahead).get(&number).and_then(Weak::upgrade);
        let is_of_it = |served: &Arc<Served>| {
            let files = served.image().files();
            files.iter().all(|known| known.state() == file.file().state())
        };
        if let Some(known) = known.filter(is_of_it) {
            return Ok(known);
        }
        let image = Arc::new(Image::plain(Arc::clone(file.file())));
        let served = self.cache.serve(Arc::new(image.open()?));
        lock(&self.ahead).insert(number, Arc::downgrade(&served));
        Ok(served)
    }

    /// The file as the kernel is to read it, if it can.
    fn backing(&self, number: u64, file: &OpenFile, reply: &ReplyOpen) -> Option<Arc<BackingId>> {
        let mut backings = lock(&self.backings);
        if let Some((backing, count)) = backings.get_mut(&number) {
            *count += 1;
            return Some(Arc::clone(backing));
        }
        match reply.open_backing(file) {
            Ok(backing) => {
                let backing = Arc::new(backing);
                backings.insert(number, (Arc::clone(&backing), 1));
                Some(backing)
            }
            Err(error) if error.kind() == std::io::ErrorKind::PermissionDenied => {
                self.passthrough.store(false, Ordering::Relaxed);
                None
            }
            // This file's filesystem cannot; others may.
            Err(error) => {
                tracing::debug!(%error, path = %file.file().path().display(), "not passed through");
                None
            }
        }
    }

    fn add(&self, number: u64, content: Content, fresh: Option<FreshCache>) -> u64 {
        let handle = self.next.fetch_add(1, Ordering::Relaxed);
        let open = OpenHandle { number, content, fresh_cache: Mutex::new(fresh) };
        lock(&self.files).insert(handle, Arc::new(open));
        handle
    }

    /// Records that the open of a handle has completed, so that its page cache is valid.
    fn complete_open(&self, handle: &OpenHandle) {
        match lock(&handle.fresh_cache).take() {
            None => {}
            Some(FreshCache::Image) => drop(lock(&self.suspect).remove(&handle.number)),
            Some(FreshCache::File(state)) => drop(lock(&self.kept).put(handle.number, state)),
        }
    }

    /// Records that the kernel has forgotten an inode, and dropped its page cache.
    pub fn forget(&self, number: u64) {
        lock(&self.suspect).remove(&number);
    }

    /// Answers a read of an open file, now or later.
    pub fn read(self: &Arc<Self>, handle: u64, range: Range, answer: Answer) {
        let Some(open) = lock(&self.files).get(&handle).cloned() else {
            return answer.refuse(Errno::EBADF);
        };
        self.complete_open(&open);
        match &open.content {
            // The kernel reads it by itself.
            Content::Backing => answer.refuse(Errno::EBADF),
            Content::Image(image) => match self.images.at_hand(image) {
                Some(served) => answer.with(&served, range),
                None => {
                    let (opened, image) = (Arc::clone(self), Arc::clone(image));
                    let asker = answer.asker.clone();
                    asker.ask(image.device, move || match opened.images.served(&image) {
                        Ok(served) => {
                            opened.balance();
                            answer.with(&served, range);
                        }
                        Err(error) => {
                            if opened.cache.may_say(Some(error.path())) {
                                tracing::error!("{error}");
                            }
                            answer.refuse(errno(&error));
                        }
                    });
                }
            },
            Content::File(file, served) => {
                // What was written behind its end since it was opened is not known to who reads ahead.
                let is_inside =
                    range.offset.saturating_add(range.size.into()) <= file.file().identity().size;
                match served.as_ref().filter(|_| is_inside) {
                    Some(served) => answer.with_or(served, range, Arc::clone(file)),
                    None => answer.plainly(Arc::clone(file), range),
                }
            }
        }
    }

    /// Nothing more is read.
    pub fn settle(&self) {
        self.cache.settle();
    }

    pub fn close(&self, handle: u64) {
        let Some(open) = lock(&self.files).remove(&handle) else { return };
        self.complete_open(&open);
        let number = open.number;
        match &open.content {
            Content::Image(_) => {
                self.images.close(number);
                self.balance();
            }
            Content::File(..) => {
                drop(open);
                let mut ahead = lock(&self.ahead);
                if ahead.get(&number).is_some_and(|served| served.strong_count() == 0) {
                    ahead.remove(&number);
                }
            }
            Content::Backing => {
                let mut backings = lock(&self.backings);
                if let Some((_, count)) = backings.get_mut(&number) {
                    *count -= 1;
                    if *count == 0 {
                        backings.remove(&number);
                    }
                }
            }
        }
    }
}

/// Tells the kernel whether to keep the page cache of a file.
fn keep_cache_if(is_valid: bool) -> FopenFlags {
    if is_valid { FopenFlags::FOPEN_KEEP_CACHE } else { FopenFlags::empty() }
}

/// By the protocol: no page of the file.
const ATTRIBUTES_ALONE: i64 = -1;

/// There is nothing to write back when a file is closed.
const NO_FLUSH: FopenFlags = FopenFlags::FOPEN_NOFLUSH;
