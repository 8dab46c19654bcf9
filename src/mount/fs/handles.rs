//! What is open: virtual files, files passed through, and files that the kernel reads by itself.

use std::collections::{HashMap, HashSet};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, OnceLock, Weak};

use fuser::{BackingId, Errno, FopenFlags, ReplyOpen};

use crate::cache::{Cache, CachedFile};
use crate::source::{self, FileState, OpenFile};
use crate::threads::lock;
use crate::view::{self, View};
use crate::virtual_file::VirtualFile;

use super::attr::view_errno;
use super::inodes::{Inode, InodeKind};
use super::open_virtual_files::{OpenVirtualFile, OpenVirtualFiles};
use super::reply::{ReadRange, ReadReply};
use crate::mount::CLOSED_FILES_DIVISOR;

/// An answer to opening.
pub struct OpenedHandle {
    pub handle: u64,
    pub flags: FopenFlags,
    /// The file that the kernel reads by itself from now on.
    pub backing: Option<Arc<BackingId>>,
}

/// Everything that is open.
pub struct HandleTable {
    next: AtomicU64,
    handles: Mutex<HashMap<u64, Arc<OpenHandle>>>,
    virtual_files: OpenVirtualFiles,
    view: Arc<View>,
    cache: Arc<Cache>,
    /// What reads each file passed through ahead, by number of inode: one for all who have it open.
    cached_sources: Mutex<HashMap<u64, Weak<CachedFile>>>,
    /// Files that the kernel reads by itself, by number of inode, and how often each is open: the
    /// kernel wants one for each inode.
    backings: Mutex<HashMap<u64, (Arc<BackingId>, usize)>>,
    /// The state that each file passed through had when the kernel last began to keep its bytes.
    cached_states: Mutex<lru::LruCache<u64, FileState>>,
    /// Inode numbers of virtual files that the page cache may hold from a read of unsettled sources.
    unsettled: Mutex<HashSet<u64>>,
    passthrough: AtomicBool,
    /// Who is told that what the kernel knows is no longer so.
    notifier: OnceLock<fuser::Notifier>,
    /// The budget for everything that is held.
    budget: u64,
}

/// Bytes of the budget that stay for blocks, a few for each reader. Open virtual files and those kept for the next open
/// take at most the rest, unless a single one is larger.
const MIN_BLOCKS_BYTES: u64 = 8 << 20;

/// Files whose last state is remembered.
const MAX_CACHED_STATES: std::num::NonZeroUsize = std::num::NonZeroUsize::new(65_536).unwrap();

/// A file of fewer bytes is read as it is asked for: reading ahead would gain nothing.
const MIN_CACHED_FILE_BYTES: u64 = 1 << 20;

/// One open of a file.
struct OpenHandle {
    number: u64,
    content: HandleContent,
    /// An open that does not keep the page cache drops it when the open completes. The first read or close of the
    /// handle shows that it has completed: the page cache is valid from then on.
    fresh_cache: Mutex<Option<FreshCache>>,
}

/// What a page cache holds that was dropped when an open completed.
enum FreshCache {
    /// A virtual file of settled sources.
    VirtualFile,
    /// This state of a file.
    File(FileState),
}

/// A file that is open, before the kernel has a handle of it.
pub enum PreparedOpen {
    VirtualFile {
        file: Arc<OpenVirtualFile>,
        /// Whether the page cache of it is valid.
        is_cache_valid: bool,
        is_settled: bool,
    },
    File(OpenFile),
}

/// What is behind an open file.
pub enum HandleContent {
    VirtualFile(Arc<OpenVirtualFile>),
    /// A file that is shown as it is, and what reads it ahead as long as it stays what it was.
    File(Arc<OpenFile>, Option<Arc<CachedFile>>),
    /// Read by the kernel.
    Backing,
}

impl HandleTable {
    pub fn new(view: Arc<View>, cache: Arc<Cache>, memory: u64, passthrough: bool) -> HandleTable {
        let for_virtual_files =
            memory.saturating_sub(MIN_BLOCKS_BYTES + memory / CLOSED_FILES_DIVISOR);
        HandleTable {
            next: AtomicU64::new(1),
            handles: Mutex::default(),
            virtual_files: OpenVirtualFiles::new(
                Arc::clone(&view),
                Arc::clone(&cache),
                for_virtual_files,
            ),
            view,
            cache,
            cached_sources: Mutex::default(),
            backings: Mutex::default(),
            cached_states: Mutex::new(lru::LruCache::new(MAX_CACHED_STATES)),
            unsettled: Mutex::default(),
            passthrough: AtomicBool::new(passthrough),
            notifier: OnceLock::new(),
            budget: memory,
        }
    }

    /// From now on the kernel can be told.
    pub fn set_notifier(&self, kernel: fuser::Notifier) {
        // There is one session for each mount.
        let _ = self.notifier.set(kernel);
    }

    pub fn is_passthrough_enabled(&self) -> bool {
        self.passthrough.load(Ordering::Relaxed)
    }

    pub fn set_passthrough(&self, works: bool) {
        self.passthrough.store(works, Ordering::Relaxed);
    }

    /// Virtual files that are open, and what they weigh.
    pub fn virtual_file_usage(&self) -> (u64, u64) {
        self.virtual_files.usage()
    }

    /// About how many bytes virtual files take, open or kept.
    pub fn held_bytes(&self) -> u64 {
        self.virtual_files.usage().1 + self.view.cached_bytes()
    }

    /// Leaves to blocks what virtual files do not take.
    fn rebalance(&self) {
        let rest = self.budget.saturating_sub(self.held_bytes());
        self.cache.set_memory_limit(rest.max(MIN_BLOCKS_BYTES.min(self.budget)));
    }

    /// Opens what a number stands for, as far as that goes without the kernel.
    pub fn prepare_open(&self, number: u64, node: &Inode) -> Result<PreparedOpen, view::ViewError> {
        if let InodeKind::VirtualFile(shown) = &node.kind {
            let is_cache_valid = shown.is_settled() && !lock(&self.unsettled).contains(&number);
            let virtual_file = self.virtual_files.open(number, shown, is_cache_valid)?;
            self.rebalance();
            return Ok(PreparedOpen::VirtualFile {
                file: virtual_file,
                is_cache_valid,
                is_settled: shown.is_settled(),
            });
        }
        let file = self.view.open(&node.path.to_path())?;
        let identity = file.file().identity();
        if (identity.dev, identity.ino) != (node.attributes.dev, node.attributes.ino) {
            let path = file.file().path();
            return Err(source::SourceError::Changed { path }.into());
        }
        Ok(PreparedOpen::File(file))
    }

    /// Closes what was made ready and is not opened after all.
    pub fn cancel_open(&self, number: u64, ready: PreparedOpen) {
        if let PreparedOpen::VirtualFile { .. } = ready {
            self.virtual_files.close(number);
            self.rebalance();
        }
    }

    /// Opens what is ready for the kernel.
    pub fn open(
        &self,
        number: u64,
        node: &Inode,
        ready: PreparedOpen,
        reply: &ReplyOpen,
    ) -> Result<OpenedHandle, view::ViewError> {
        match ready {
            PreparedOpen::VirtualFile { file: virtual_file, is_cache_valid, is_settled } => {
                if !is_settled {
                    lock(&self.unsettled).insert(number);
                }
                let fresh = (is_settled && !is_cache_valid).then_some(FreshCache::VirtualFile);
                let handle = self.add(number, HandleContent::VirtualFile(virtual_file), fresh);
                let flags = keep_cache_if(is_cache_valid) | NO_FLUSH_FLAG;
                Ok(OpenedHandle { handle, flags, backing: None })
            }
            PreparedOpen::File(file) => self.open_source(number, node, file, reply),
        }
    }

    fn open_source(
        &self,
        number: u64,
        node: &Inode,
        file: OpenFile,
        reply: &ReplyOpen,
    ) -> Result<OpenedHandle, view::ViewError> {
        let identity = file.file().identity();
        if !node.attributes.has_identity(&identity)
            && let Some(kernel) = self.notifier.get()
        {
            // Who opens it is to see all of it, and not as much as there was at the last look. What the
            // kernel has forgotten meanwhile it will ask for anyway.
            let _ = kernel.inval_inode(fuser::INodeNo(number), ATTRIBUTES_ONLY, 0);
        }
        if self.is_passthrough_enabled()
            && let Some(backing) = self.backing(number, &file, reply)
        {
            let handle = self.add(number, HandleContent::Backing, None);
            return Ok(OpenedHandle { handle, flags: NO_FLUSH_FLAG, backing: Some(backing) });
        }
        let state = file.file().state();
        let is_settled = source::is_settled(&file);
        let is_cache_valid = is_settled && lock(&self.cached_states).get(&number) == Some(&state);
        if !is_cache_valid {
            lock(&self.cached_states).pop(&number);
        }
        // Blocks read ahead are cached, and those of an unsettled file could get outdated unnoticed.
        let is_ahead = is_settled && identity.size >= MIN_CACHED_FILE_BYTES;
        let served = if is_ahead { Some(self.cached_source(number, &file)?) } else { None };
        let fresh = (is_settled && !is_cache_valid).then_some(FreshCache::File(state));
        let handle = self.add(number, HandleContent::File(Arc::new(file), served), fresh);
        let flags = keep_cache_if(is_cache_valid) | NO_FLUSH_FLAG;
        Ok(OpenedHandle { handle, flags, backing: None })
    }

    /// What reads a file ahead: what already does, if the file is still what it was then.
    fn cached_source(
        &self,
        number: u64,
        file: &OpenFile,
    ) -> Result<Arc<CachedFile>, view::ViewError> {
        let known = lock(&self.cached_sources).get(&number).and_then(Weak::upgrade);
        let is_of_it = |served: &Arc<CachedFile>| {
            let files = served.virtual_file().source_files();
            files.iter().all(|known| known.state() == file.file().state())
        };
        if let Some(known) = known.filter(is_of_it) {
            return Ok(known);
        }
        let virtual_file = Arc::new(VirtualFile::plain(Arc::clone(file.file())));
        let served = self.cache.open(Arc::new(virtual_file.open()?));
        lock(&self.cached_sources).insert(number, Arc::downgrade(&served));
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

    fn add(&self, number: u64, content: HandleContent, fresh: Option<FreshCache>) -> u64 {
        let handle = self.next.fetch_add(1, Ordering::Relaxed);
        let open = OpenHandle { number, content, fresh_cache: Mutex::new(fresh) };
        lock(&self.handles).insert(handle, Arc::new(open));
        handle
    }

    /// Records that the open of a handle has completed, so that its page cache is valid.
    fn complete_open(&self, handle: &OpenHandle) {
        match lock(&handle.fresh_cache).take() {
            None => {}
            Some(FreshCache::VirtualFile) => drop(lock(&self.unsettled).remove(&handle.number)),
            Some(FreshCache::File(state)) => {
                lock(&self.cached_states).put(handle.number, state);
            }
        }
    }

    /// Records that the kernel has forgotten an inode, and dropped its page cache.
    pub fn forget(&self, number: u64) {
        lock(&self.unsettled).remove(&number);
    }

    /// Answers a read of an open file, now or later.
    pub fn read(self: &Arc<Self>, handle: u64, range: ReadRange, answer: ReadReply) {
        let Some(open) = lock(&self.handles).get(&handle).cloned() else {
            return answer.fail(Errno::EBADF);
        };
        self.complete_open(&open);
        match &open.content {
            // The kernel reads it by itself.
            HandleContent::Backing => answer.fail(Errno::EBADF),
            HandleContent::VirtualFile(virtual_file) => {
                match self.virtual_files.resident(virtual_file) {
                    Some(served) => answer.read_virtual_file(&served, range),
                    None => {
                        let (opened, virtual_file) = (Arc::clone(self), Arc::clone(virtual_file));
                        let asker = answer.pool.clone();
                        asker.run(virtual_file.device, move || {
                            match opened.virtual_files.resident_or_reopened(&virtual_file) {
                                Ok(served) => {
                                    opened.rebalance();
                                    answer.read_virtual_file(&served, range);
                                }
                                Err(error) => {
                                    if opened.cache.should_log(Some(error.path())) {
                                        tracing::error!("{error}");
                                    }
                                    answer.fail(view_errno(&error));
                                }
                            }
                        });
                    }
                }
            }
            HandleContent::File(file, served) => {
                // What was written behind its end since it was opened is not known to who reads ahead.
                let is_inside =
                    range.offset.saturating_add(range.size.into()) <= file.file().identity().size;
                match served.as_ref().filter(|_| is_inside) {
                    Some(served) => answer.read_cached_source(served, range, Arc::clone(file)),
                    None => answer.read_source(Arc::clone(file), range),
                }
            }
        }
    }

    /// Nothing more is read.
    pub fn finish(&self) {
        self.cache.flush_traces();
    }

    pub fn close(&self, handle: u64) {
        let Some(open) = lock(&self.handles).remove(&handle) else { return };
        self.complete_open(&open);
        let number = open.number;
        match &open.content {
            HandleContent::VirtualFile(_) => {
                self.virtual_files.close(number);
                self.rebalance();
            }
            HandleContent::File(..) => {
                drop(open);
                let mut ahead = lock(&self.cached_sources);
                if ahead.get(&number).is_some_and(|served| served.strong_count() == 0) {
                    ahead.remove(&number);
                }
            }
            HandleContent::Backing => {
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
const ATTRIBUTES_ONLY: i64 = -1;

/// There is nothing to write back when a file is closed.
const NO_FLUSH_FLAG: FopenFlags = FopenFlags::FOPEN_NOFLUSH;
