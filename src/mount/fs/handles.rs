//! Open files by handle, and the reads of each.

use std::collections::{HashMap, HashSet};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex};

use fuser::{BackingId, FopenFlags, Notifier, ReplyOpen};

use crate::cache::{Cache, CacheError, CachedFile};
use crate::mount::options::CLOSED_FILES_DIVISOR;
use crate::source::{FileState, OpenFile, SourceError};
use crate::threads::lock;
use crate::view::{ShownFile, View, ViewError};

use super::blocking_pool::BlockingPoolHandle;
use super::inodes::{Inode, InodeKind};
use super::open_virtual_files::{OpenVirtualFile, OpenVirtualFiles};
use super::outcomes::{ReadReply, RequestFailure};
use super::source_handles::{SourceAccess, SourceHandles};

/// The open files of a mount.
pub struct HandleTable {
    next: AtomicU64,
    handles: Mutex<HashMap<u64, Arc<OpenHandle>>>,
    virtual_files: OpenVirtualFiles,
    sources: SourceHandles,
    view: Arc<View>,
    cache: Arc<Cache>,
    pool: BlockingPoolHandle,
    /// Inode numbers of virtual files that the page cache may hold from a read of unsettled sources.
    unsettled: Mutex<HashSet<u64>>,
    /// The memory budget of the mount, in bytes.
    budget: u64,
}

/// Bytes of the budget that stay for blocks, a few for each reader. Virtual files, open or kept for the next open,
/// take at most the rest, unless a single one is larger.
const MIN_BLOCKS_BYTES: u64 = 8 << 20;

/// The bytes that a read asks for.
#[derive(Clone, Copy, Debug)]
pub struct ReadRange {
    pub offset: u64,
    pub size: u32,
}

/// A file that is open, before the kernel has a handle of it.
pub enum PreparedOpen {
    VirtualFile {
        file: Arc<OpenVirtualFile>,
        /// Whether the kernel may keep the pages that it has.
        is_cache_valid: bool,
        is_settled: bool,
    },
    Source(OpenFile),
    /// The source of a virtual file that is identical to it.
    IdenticalSource(OpenFile),
}

/// What the kernel is told of an open.
pub struct OpenReply {
    pub handle: u64,
    pub flags: FopenFlags,
    /// The file that the kernel reads by itself from now on.
    pub backing: Option<Arc<BackingId>>,
}

struct OpenHandle {
    /// Its inode number.
    number: u64,
    content: HandleContent,
    /// An open that does not keep the page cache drops it when the open completes. The first read or close of the
    /// handle shows that it has completed: the page cache is valid from then on.
    fresh_cache: Mutex<Option<FreshCache>>,
}

enum HandleContent {
    VirtualFile(Arc<OpenVirtualFile>),
    /// A source file, and its readahead, which serves the state that it had when it was opened.
    Source(Arc<OpenFile>, Option<Arc<CachedFile>>),
    /// Read by the kernel itself.
    Backing,
}

/// What a page cache holds that an open has dropped first.
enum FreshCache {
    /// A virtual file of settled sources.
    VirtualFile,
    /// This state of a source file.
    Source(FileState),
}

impl HandleTable {
    /// `budget` is in bytes, for all memory of the mount.
    pub fn new(
        view: Arc<View>,
        cache: Arc<Cache>,
        pool: BlockingPoolHandle,
        budget: u64,
        passthrough: bool,
    ) -> HandleTable {
        let open_bytes = budget.saturating_sub(MIN_BLOCKS_BYTES + budget / CLOSED_FILES_DIVISOR);
        let virtual_files =
            OpenVirtualFiles::new(Arc::clone(&view), Arc::clone(&cache), open_bytes);
        HandleTable {
            next: AtomicU64::new(1),
            handles: Mutex::default(),
            virtual_files,
            sources: SourceHandles::new(Arc::clone(&cache), passthrough),
            view,
            cache,
            pool,
            unsettled: Mutex::default(),
            budget,
        }
    }

    pub fn set_notifier(&self, notifier: Notifier) {
        self.sources.set_notifier(notifier);
    }

    pub fn is_passthrough_enabled(&self) -> bool {
        self.sources.is_passthrough_enabled()
    }

    pub fn set_passthrough(&self, is_enabled: bool) {
        self.sources.set_passthrough(is_enabled);
    }

    /// The number of open virtual files.
    pub fn open_virtual_files(&self) -> u64 {
        self.virtual_files.usage().0
    }

    /// About how many bytes virtual files take, open or kept for the next open.
    pub fn held_bytes(&self) -> u64 {
        self.virtual_files.usage().1 + self.view.cached_bytes()
    }

    /// Leaves the memory to blocks that virtual files do not take.
    fn rebalance(&self) {
        let rest = self.budget.saturating_sub(self.held_bytes());
        self.cache.set_memory_limit(rest.max(MIN_BLOCKS_BYTES.min(self.budget)));
    }

    /// Opens an inode, as far as that goes without the kernel.
    pub fn prepare_open(&self, number: u64, inode: &Inode) -> Result<PreparedOpen, ViewError> {
        if let InodeKind::VirtualFile(shown) = &inode.kind {
            if self.is_passthrough_enabled()
                && let Some(source) = shown.identical_source()
            {
                let file = source.open()?;
                file.check_state_unchanged()?;
                return Ok(PreparedOpen::IdenticalSource(file));
            }
            return self.prepare_virtual_file(number, shown);
        }
        let file = self.view.open(&inode.path.to_path())?;
        let identity = file.file().identity();
        if (identity.dev, identity.ino) != (inode.attributes.dev, inode.attributes.ino) {
            let path = file.file().path();
            return Err(SourceError::changed(path).into());
        }
        Ok(PreparedOpen::Source(file))
    }

    fn prepare_virtual_file(
        &self,
        number: u64,
        shown: &Arc<ShownFile>,
    ) -> Result<PreparedOpen, ViewError> {
        let is_settled = shown.is_settled();
        let is_cache_valid = is_settled && !lock(&self.unsettled).contains(&number);
        let file = self.virtual_files.open(number, shown, is_cache_valid)?;
        self.rebalance();
        Ok(PreparedOpen::VirtualFile { file, is_cache_valid, is_settled })
    }

    /// Closes a prepared file that the kernel does not open after all.
    pub fn cancel_open(&self, number: u64, prepared: PreparedOpen) {
        if let PreparedOpen::VirtualFile { .. } = prepared {
            self.virtual_files.close(number);
            self.rebalance();
        }
    }

    /// Adds a handle of a prepared file.
    pub fn open(
        &self,
        number: u64,
        inode: &Inode,
        prepared: PreparedOpen,
        reply: &ReplyOpen,
    ) -> Result<OpenReply, ViewError> {
        let prepared = match (prepared, &inode.kind) {
            (PreparedOpen::IdenticalSource(file), InodeKind::VirtualFile(shown)) => {
                if let Some(backing) = self.sources.pass_through(number, &file, reply) {
                    return Ok(self.add_backing(number, backing));
                }
                self.prepare_virtual_file(number, shown)?
            }
            (prepared, _) => prepared,
        };
        let (content, is_cache_valid, fresh) = match prepared {
            PreparedOpen::VirtualFile { file, is_cache_valid, is_settled } => {
                if !is_settled {
                    lock(&self.unsettled).insert(number);
                }
                let fresh = (is_settled && !is_cache_valid).then_some(FreshCache::VirtualFile);
                (HandleContent::VirtualFile(file), is_cache_valid, fresh)
            }
            PreparedOpen::Source(file) | PreparedOpen::IdenticalSource(file) => {
                match self.sources.open(number, inode, file, reply)? {
                    SourceAccess::Backing(backing) => return Ok(self.add_backing(number, backing)),
                    SourceAccess::File { file, cached_file, is_cache_valid, fresh_state } => {
                        let fresh = fresh_state.map(FreshCache::Source);
                        (HandleContent::Source(file, cached_file), is_cache_valid, fresh)
                    }
                }
            }
        };
        let handle = self.add(number, content, fresh);
        let flags = keep_cache_if(is_cache_valid) | NO_FLUSH_FLAG;
        Ok(OpenReply { handle, flags, backing: None })
    }

    /// Adds a handle that the kernel reads by itself.
    fn add_backing(&self, number: u64, backing: Arc<BackingId>) -> OpenReply {
        let handle = self.add(number, HandleContent::Backing, None);
        OpenReply { handle, flags: NO_FLUSH_FLAG, backing: Some(backing) }
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
            Some(FreshCache::Source(state)) => {
                self.sources.record_cached_state(handle.number, state);
            }
        }
    }

    /// Records that the kernel has forgotten an inode, and dropped its page cache.
    pub fn forget(&self, number: u64) {
        lock(&self.unsettled).remove(&number);
    }

    /// Reads from an open file. The reply is sent now or later, by another thread.
    pub fn read(self: &Arc<Self>, handle: u64, range: ReadRange, reply: ReadReply) {
        let Some(open) = lock(&self.handles).get(&handle).cloned() else {
            return reply.fail(&RequestFailure::closed_handle());
        };
        self.complete_open(&open);
        match &open.content {
            // Only a request to read ahead (`posix_fadvise`) comes here, and only for the kernel's own copy.
            HandleContent::Backing => reply.decline(),
            HandleContent::VirtualFile(file) => match self.virtual_files.resident(file) {
                Some(cached_file) => read_virtual_file(&cached_file, range, reply),
                None => self.reopen_and_read(Arc::clone(file), range, reply),
            },
            HandleContent::Source(file, cached_file) => {
                // The readahead does not know bytes that were appended since the open.
                let is_inside =
                    range.offset.saturating_add(range.size.into()) <= file.file().identity().size;
                match cached_file.as_ref().filter(|_| is_inside) {
                    Some(cached_file) => {
                        read_cached_source(&self.pool, cached_file, range, Arc::clone(file), reply);
                    }
                    None => read_source(&self.pool, Arc::clone(file), range, reply),
                }
            }
        }
    }

    /// Reads from a virtual file that was evicted.
    fn reopen_and_read(
        self: &Arc<Self>,
        file: Arc<OpenVirtualFile>,
        range: ReadRange,
        reply: ReadReply,
    ) {
        let table = Arc::clone(self);
        self.pool.run(file.device, move || match table.virtual_files.resident_or_reopened(&file) {
            Ok(cached_file) => {
                table.rebalance();
                read_virtual_file(&cached_file, range, reply);
            }
            Err(error) => reply.fail(&RequestFailure::from(&error)),
        });
    }

    /// Records that nothing more will be read.
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
            HandleContent::Source(..) => {
                drop(open);
                self.sources.close_file(number);
            }
            HandleContent::Backing => self.sources.close_backing(number),
        }
    }
}

/// Reads from a virtual file.
fn read_virtual_file(cached_file: &Arc<CachedFile>, range: ReadRange, reply: ReadReply) {
    let done = move |read: Result<&[u8], &CacheError>| match read {
        Ok(bytes) => reply.send(bytes),
        Err(error) => reply.fail(&RequestFailure::from(error)),
    };
    cached_file.read(range.offset, range.size, Box::new(done));
}

/// Reads from the readahead of a source file; from the file itself once it has changed since its open.
fn read_cached_source(
    pool: &BlockingPoolHandle,
    cached_file: &Arc<CachedFile>,
    range: ReadRange,
    file: Arc<OpenFile>,
    reply: ReadReply,
) {
    let pool = pool.clone();
    let done = move |read: Result<&[u8], &CacheError>| match read {
        Ok(bytes) => reply.send(bytes),
        Err(_) => read_source(&pool, file, range, reply),
    };
    cached_file.read(range.offset, range.size, Box::new(done));
}

/// Reads from a source file as it is now, up to its present end.
fn read_source(pool: &BlockingPoolHandle, file: Arc<OpenFile>, range: ReadRange, reply: ReadReply) {
    pool.run(file.file().identity().dev, move || {
        let mut bytes = vec![0; range.size as usize];
        match file.read_available_at(&mut bytes, range.offset) {
            Ok(read) => reply.send(&bytes[..read]),
            Err(error) => reply.fail(&RequestFailure::from(&error)),
        }
    });
}

/// Whether the kernel keeps the page cache of a file.
fn keep_cache_if(is_valid: bool) -> FopenFlags {
    if is_valid { FopenFlags::FOPEN_KEEP_CACHE } else { FopenFlags::empty() }
}

/// Nothing is written back when a file is closed.
const NO_FLUSH_FLAG: FopenFlags = FopenFlags::FOPEN_NOFLUSH;
