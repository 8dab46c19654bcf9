//! Open source files: passed through to the kernel, or read through the cache as they are.

use std::collections::HashMap;
use std::io;
use std::num::NonZeroUsize;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, OnceLock, Weak};

use fuser::{BackingId, INodeNo, Notifier, ReplyOpen};
use lru::LruCache;

use crate::cache::{Cache, CachedFile};
use crate::source::{self, FileState, OpenFile};
use crate::threads::lock;
use crate::view::ViewError;
use crate::virtual_file::{VirtualFile, VirtualFileReader};

use super::inodes::Inode;

/// Source files that are open, by inode number.
pub struct SourceHandles {
    cache: Arc<Cache>,
    /// The readahead of each file, shared by its handles.
    cached_files: Mutex<HashMap<u64, Weak<CachedFile>>>,
    /// Files passed through, with the number of handles of each. The kernel wants one backing for each inode.
    backings: Mutex<HashMap<u64, (Arc<BackingId>, usize)>>,
    /// The state of each file when the kernel last began to cache its pages.
    cached_states: Mutex<LruCache<u64, FileState>>,
    passthrough: AtomicBool,
    /// Tells the kernel that attributes which it caches are outdated.
    notifier: OnceLock<Notifier>,
}

/// How an open file is read.
pub enum SourceAccess {
    /// By the kernel itself.
    Backing(Arc<BackingId>),
    /// By this process.
    File {
        file: Arc<OpenFile>,
        /// Its readahead, if it has any.
        cached_file: Option<Arc<CachedFile>>,
        /// Whether the kernel may keep the pages that it has.
        is_cache_valid: bool,
        /// The state that the page cache will hold once the open has completed; `None` if it may not be relied on.
        fresh_state: Option<FileState>,
    },
}

/// Files whose last state is remembered.
const MAX_CACHED_STATES: NonZeroUsize = NonZeroUsize::new(65_536).unwrap();

/// Smaller files have no readahead, which would gain nothing.
const MIN_CACHED_FILE_BYTES: u64 = 1 << 20;

/// An offset by which the kernel drops attributes and no page, by the protocol.
const ATTRIBUTES_ONLY: i64 = -1;

impl SourceHandles {
    pub fn new(cache: Arc<Cache>, passthrough: bool) -> SourceHandles {
        SourceHandles {
            cache,
            cached_files: Mutex::default(),
            backings: Mutex::default(),
            cached_states: Mutex::new(LruCache::new(MAX_CACHED_STATES)),
            passthrough: AtomicBool::new(passthrough),
            notifier: OnceLock::new(),
        }
    }

    pub fn set_notifier(&self, notifier: Notifier) {
        // Each mount has one session.
        let _ = self.notifier.set(notifier);
    }

    pub fn is_passthrough_enabled(&self) -> bool {
        self.passthrough.load(Ordering::Relaxed)
    }

    pub fn set_passthrough(&self, is_enabled: bool) {
        self.passthrough.store(is_enabled, Ordering::Relaxed);
    }

    pub fn open(
        &self,
        number: u64,
        inode: &Inode,
        file: OpenFile,
        reply: &ReplyOpen,
    ) -> Result<SourceAccess, ViewError> {
        let identity = file.file().identity();
        if !inode.attributes.has_identity(&identity)
            && let Some(notifier) = self.notifier.get()
        {
            // The file may have grown: its reader must see all of it. This fails if the kernel has forgotten the
            // inode, and then it asks for the attributes anyway.
            let _ = notifier.inval_inode(INodeNo(number), ATTRIBUTES_ONLY, 0);
        }
        if let Some(backing) = self.pass_through(number, &file, reply) {
            return Ok(SourceAccess::Backing(backing));
        }
        let state = file.file().state();
        let is_settled = source::is_settled(&file);
        let is_cache_valid = is_settled && lock(&self.cached_states).get(&number) == Some(&state);
        if !is_cache_valid {
            lock(&self.cached_states).pop(&number);
        }
        // Readahead caches blocks. Those of an unsettled file could become outdated unnoticed.
        let has_readahead = is_settled && identity.size >= MIN_CACHED_FILE_BYTES;
        let cached_file = if has_readahead { Some(self.cached_file(number, &file)?) } else { None };
        let fresh_state = (is_settled && !is_cache_valid).then_some(state);
        Ok(SourceAccess::File { file: Arc::new(file), cached_file, is_cache_valid, fresh_state })
    }

    /// Records that the page cache holds this state of a file.
    pub fn record_cached_state(&self, number: u64, state: FileState) {
        lock(&self.cached_states).put(number, state);
    }

    /// The readahead of a file: that of its other handles if the file is still the same.
    fn cached_file(&self, number: u64, file: &OpenFile) -> Result<Arc<CachedFile>, ViewError> {
        let shared = lock(&self.cached_files).get(&number).and_then(Weak::upgrade);
        let is_same = |shared: &Arc<CachedFile>| {
            let sources = shared.virtual_file().source_files();
            sources.iter().all(|source| source.state() == file.file().state())
        };
        if let Some(shared) = shared.filter(is_same) {
            return Ok(shared);
        }
        let virtual_file = Arc::new(VirtualFile::plain(Arc::clone(file.file())));
        let cached_file = self.cache.open(Arc::new(VirtualFileReader::open(&virtual_file)?));
        lock(&self.cached_files).insert(number, Arc::downgrade(&cached_file));
        Ok(cached_file)
    }

    /// Passes a file through to the kernel, if that is possible.
    pub fn pass_through(
        &self,
        number: u64,
        file: &OpenFile,
        reply: &ReplyOpen,
    ) -> Option<Arc<BackingId>> {
        if !self.is_passthrough_enabled() {
            return None;
        }
        let mut backings = lock(&self.backings);
        if let Some((backing, count)) = backings.get_mut(&number) {
            *count += 1;
            return Some(Arc::clone(backing));
        }
        match reply.open_backing(file.descriptor()?) {
            Ok(backing) => {
                let backing = Arc::new(backing);
                backings.insert(number, (Arc::clone(&backing), 1));
                Some(backing)
            }
            Err(error) if error.kind() == io::ErrorKind::PermissionDenied => {
                self.set_passthrough(false);
                None
            }
            // This file's filesystem cannot; others may.
            Err(error) => {
                tracing::debug!(%error, path = %file.file().path().display(), "not passed through");
                None
            }
        }
    }

    /// Drops the readahead of a file whose last handle was closed.
    pub fn close_file(&self, number: u64) {
        let mut cached_files = lock(&self.cached_files);
        if cached_files.get(&number).is_some_and(|file| file.strong_count() == 0) {
            cached_files.remove(&number);
        }
    }

    /// Closes one handle of a file that is passed through.
    pub fn close_backing(&self, number: u64) {
        let mut backings = lock(&self.backings);
        if let Some((_, count)) = backings.get_mut(&number) {
            *count -= 1;
            if *count == 0 {
                backings.remove(&number);
            }
        }
    }
}
