//! What replies are made from: the view, the inodes and handles that the kernel has, and the statistics of the mount.

use std::ffi::OsStr;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use fuser::{Errno, FileAttr, INodeNo, ReplyOpen};

use crate::cache::Cache;
use crate::clipped_text::clip;
use crate::mount::error::MountError;
use crate::mount::stats::{
    CacheStats, LogStats, MemoryStats, MountStats, PrefetchStats, STATS_VERSION, VirtualFileStats,
};
use crate::source::{self, FileKind, FileMetadata, SourceError};
use crate::view::{Refusal, View, ViewEntry, ViewError};

use super::attr::{
    OwnerOverride, file_attr, is_stale, kernel_cache_timeout, last_file_attr, open_errno,
    view_errno,
};
use super::handles::{HandleTable, OpenReply};
use super::inodes::{Inode, InodeKind, InodeTable, LastAttributes, ROOT};
use super::listings::Listings;
use super::outcomes::{RequestFailure, RequestOutcomes};
use super::retries::{Retries, RetryFile};

/// The state of one mount's filesystem.
pub struct FilesystemState {
    pub view: Arc<View>,
    pub inodes: Arc<InodeTable>,
    pub handles: Arc<HandleTable>,
    pub listings: Listings,
    pub outcomes: Arc<RequestOutcomes>,
    pub about: MountDescription,
    cache: Arc<Cache>,
    retries: Retries,
    owner: OwnerOverride,
    is_removal_logged: AtomicBool,
    start_time: SystemTime,
    started: Instant,
}

/// What the statistics say of a mount that never changes.
pub struct MountDescription {
    pub source: PathBuf,
    pub mountpoint: PathBuf,
    /// The memory budget of the mount, in bytes.
    pub budget: u64,
    pub log: LogStats,
}

/// The most refusals of a recipe that statistics have: an attribute has little room.
const MAX_REFUSED_VIEWS_COUNT: usize = 8;

/// Why files of the recipe are not shown, with what to do.
fn refused_views(view: &View) -> Vec<String> {
    let refusals = view.recipe_refusals();
    let describe =
        |one: &Arc<Refusal>| clip(&format!("{}; what to do: {}", one.reason, one.remedy));
    let mut lines: Vec<_> = refusals.iter().take(MAX_REFUSED_VIEWS_COUNT).map(describe).collect();
    let rest = refusals.len() - lines.len();
    if rest > 0 {
        lines.push(format!(
            "{rest} more; what to do: ckptfs ls -r --views RECIPE SOURCE lists them all"
        ));
    }
    lines
}

/// Lookups of a name that is renamed over meanwhile, until one can be opened.
const MAX_LOOKUP_TRIES: usize = 8;

impl FilesystemState {
    /// The state of a mount.
    pub fn new(
        about: MountDescription,
        view: Arc<View>,
        cache: Arc<Cache>,
        handles: Arc<HandleTable>,
        listings: Listings,
        owner: OwnerOverride,
    ) -> Result<FilesystemState, MountError> {
        let inodes = Arc::new(InodeTable::new(&view.metadata("".as_ref())?));
        let outcomes = RequestOutcomes::new(Arc::clone(&inodes), about.mountpoint.clone());
        Ok(FilesystemState {
            view,
            inodes,
            retries: Retries::new(Arc::clone(&handles)),
            handles,
            listings,
            outcomes: Arc::new(outcomes),
            about,
            cache,
            owner,
            is_removal_logged: AtomicBool::new(false),
            start_time: SystemTime::now(),
            started: Instant::now(),
        })
    }

    /// The inode of a number; ESTALE if the kernel was never told it, or forgot it.
    pub fn inode(&self, number: INodeNo) -> Result<Arc<Inode>, Errno> {
        let record = || self.outcomes.record(number.0, &RequestFailure::forgotten_inode());
        self.inodes.get(number.0).ok_or_else(record)
    }

    pub fn attr(&self, number: u64, metadata: &FileMetadata) -> FileAttr {
        file_attr(number, metadata, self.owner)
    }

    pub fn last_attr(&self, number: u64, inode: &Inode) -> FileAttr {
        last_file_attr(number, &inode.attributes, self.owner)
    }

    /// How long the kernel may cache the name and the attributes of an inode.
    pub fn kernel_cache_timeout(&self, number: INodeNo) -> Duration {
        self.inodes.get(number.0).map_or(Duration::ZERO, |inode| kernel_cache_timeout(&inode))
    }

    /// Looks a name up for a thread.
    pub fn look_up(&self, thread: u32, parent: INodeNo, name: &OsStr) -> Result<FileAttr, Errno> {
        let directory = self.inode(parent)?.path.to_path();
        if self.retries.is_expected(thread, &directory, name)
            && let Some(attr) = self.look_up_and_open(thread, parent, &directory, name)
        {
            return Ok(attr);
        }
        let entry = self.view.lookup(&directory, name);
        let entry = entry.map_err(|e| self.record_error(&directory.join(name), &e))?;
        let entry = entry.ok_or_else(|| self.not_found())?;
        let path = self.inodes.child_path(parent.0, &directory, name);
        let number = self.inodes.add_lookup(Inode::new(path, &entry));
        Ok(self.attr(number, entry.metadata()))
    }

    /// Looks a name up and opens it for a thread that is about to do so; `None` if that fails.
    fn look_up_and_open(
        &self,
        thread: u32,
        parent: INodeNo,
        directory: &Path,
        name: &OsStr,
    ) -> Option<FileAttr> {
        if let Some((inode, attr)) = self.retries.provided_file(thread) {
            self.inodes.add_lookup(inode);
            return Some(attr);
        }
        let path = directory.join(name);
        for _ in 0..MAX_LOOKUP_TRIES {
            // During renames, a listing can lack a name that exists.
            let Some(entry) = self.view.lookup(directory, name).ok()? else { continue };
            if entry.metadata().kind != FileKind::File {
                self.retries.end(thread);
                return None;
            }
            let inode = Inode::new(self.inodes.child_path(parent.0, directory, name), &entry);
            match self.handles.prepare_open(self.inodes.number_for(&inode), &inode) {
                Ok(prepared) => {
                    let attr = self.attr(self.inodes.add_lookup(inode.clone()), entry.metadata());
                    self.retries.provide(thread, path, RetryFile { inode, attr, prepared });
                    return Some(attr);
                }
                Err(error) if is_stale(&error) => self.view.invalidate(&path),
                Err(_) => return None,
            }
        }
        None
    }

    /// Opens an inode for a thread.
    pub fn open(
        &self,
        thread: u32,
        number: INodeNo,
        reply: &ReplyOpen,
    ) -> Result<OpenReply, Errno> {
        let inode = self.inode(number)?;
        let (is_second_try, prepared) = self.retries.take(thread, number.0);
        let prepared = prepared.map_or_else(|| self.handles.prepare_open(number.0, &inode), Ok);
        let opened =
            prepared.and_then(|prepared| self.handles.open(number.0, &inode, prepared, reply));
        opened.map_err(|error| {
            // The kernel repeats the lookup, which must find what is there now.
            let path = inode.path.to_path();
            self.view.invalidate(&path);
            if is_stale(&error)
                && !is_second_try
                && self.retries.record_first_try(thread, path.clone())
            {
                // No error yet: the kernel tries again.
                tracing::debug!("{error}; the kernel opens it again");
                return open_errno(&error);
            }
            let failure = RequestFailure::from(&error).with_errno(open_errno(&error));
            self.outcomes.record_path(&path, &failure)
        })
    }

    /// The present attributes of an inode; the last ones if its path stands for another file by now.
    pub fn current_attr(&self, number: INodeNo) -> Result<FileAttr, Errno> {
        let inode = self.inode(number)?;
        let metadata = match &inode.kind {
            InodeKind::VirtualFile(shown) => match self.entry_at(&inode) {
                Some(
                    ViewEntry::VirtualFile(now) | ViewEntry::Index(now) | ViewEntry::Config(now),
                ) if now.identity() == shown.identity() => Some(*now.metadata()),
                _ => None,
            },
            InodeKind::Source => {
                let known = (number.0 == ROOT).then(|| self.view.known_store_root()).flatten();
                let now = known.or_else(|| self.view.metadata(&inode.path.to_path()).ok());
                now.filter(|now| inode.attributes.is_same_file(&LastAttributes::from(now)))
            }
            InodeKind::Link(_) => None,
        };
        let Some(metadata) = metadata else { return Ok(self.last_attr(number.0, &inode)) };
        let attributes = LastAttributes::from(&metadata);
        self.inodes.update(number.0, Inode { attributes, ..(*inode).clone() });
        Ok(self.attr(number.0, &metadata))
    }

    fn entry_at(&self, inode: &Inode) -> Option<ViewEntry> {
        let (directory, name) = inode.path.parts()?;
        self.view.lookup(directory, name).ok()?
    }

    pub fn link_target(&self, number: INodeNo) -> Result<PathBuf, Errno> {
        let inode = self.inode(number)?;
        match &inode.kind {
            InodeKind::Link(Some(target)) => Ok((**target).clone()),
            InodeKind::Link(None) => {
                let root = self.view.root().path();
                let path = root.join(self.view.source_path(&inode.path.to_path()));
                let error = SourceError::OutsideRoot { path, root: root.to_path_buf() };
                // A listing has logged it.
                let failure = RequestFailure::new(Errno::EACCES, &error, error.remedy());
                Err(self.outcomes.record(number.0, &failure))
            }
            _ => Err(Errno::EINVAL),
        }
    }

    /// The numbers of the source's filesystem.
    pub fn filesystem_stats(&self) -> Result<rustix::fs::StatVfs, Errno> {
        let stats = self.view.root().filesystem_stats();
        stats.map_err(|error| self.record_error(Path::new(""), &error.into()))
    }

    /// Records the error of a request about a path in the view, and returns its errno.
    pub fn record_error(&self, path: &Path, error: &ViewError) -> Errno {
        match view_errno(error).code() == Errno::ENOENT.code() {
            true => self.not_found(),
            false => self.outcomes.record_path(path, &RequestFailure::from(error)),
        }
    }

    /// ENOENT. A name that is missing may be the first sign that the whole source was removed.
    fn not_found(&self) -> Errno {
        self.is_source_removed();
        Errno::ENOENT
    }

    /// Whether the source directory was removed, which is logged once. Never waits.
    ///
    /// A removed directory stays open here, empty for ever, even if another is created at its path: programs see
    /// an empty mount.
    pub fn is_source_removed(&self) -> bool {
        let is_removed = self.view.root().is_removed();
        if is_removed && !self.is_removal_logged.swap(true, Ordering::Relaxed) {
            tracing::warn!(
                "{}: the directory was removed, and the mount stays empty whatever is made there \
                 now; what to do: unmount it, and mount again",
                self.about.source.display()
            );
        }
        is_removed
    }

    /// The statistics of the mount. Never waits.
    pub fn stats(&self) -> MountStats {
        let counts = self.view.counts();
        let cache = self.cache.counters();
        let start_time = self.start_time.duration_since(UNIX_EPOCH);
        MountStats {
            version: STATS_VERSION,
            ckptfs: env!("CARGO_PKG_VERSION").to_owned(),
            pid: std::process::id(),
            source: self.about.source.clone(),
            source_removed: self.is_source_removed(),
            mountpoint: self.about.mountpoint.clone(),
            started: start_time.map_or(0, |since| since.as_secs()),
            uptime_s: self.started.elapsed().as_secs(),
            passthrough: self.handles.is_passthrough_enabled(),
            bytes_served: self.outcomes.bytes(),
            reads: self.outcomes.reads(),
            errors: self.outcomes.errors(),
            last_errors: self.outcomes.recent(),
            refused_views: refused_views(&self.view),
            log: self.about.log.clone(),
            virtual_files: VirtualFileStats {
                known: counts.virtual_files,
                open: self.handles.open_virtual_files(),
                refused: counts.refused,
            },
            memory: MemoryStats {
                budget: self.about.budget,
                held: self.handles.held_bytes() + cache.held_bytes,
            },
            cache: CacheStats {
                hits: cache.hits,
                misses: cache.misses,
                budget_bytes: cache.budget_bytes,
                held_bytes: cache.held_bytes,
            },
            prefetch: PrefetchStats {
                fetched: cache.prefetched,
                used: cache.prefetch_used,
                wasted: cache.prefetch_wasted,
                replayed: cache.replayed,
            },
            store: source::request_counters(),
        }
    }
}
