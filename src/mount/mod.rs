//! The mount: a checkpoint, or a directory of checkpoints, as files that any program reads.
//!
//! [`mount`] makes a [`MountSession`] of [`MountOptions`]. The session replies to the kernel from its own threads until
//! it is unmounted. [`lifecycle`] attaches a filesystem, serves it, asks whether mounts live, and takes dead ones away.
//! `fs` replies to the kernel's requests.

pub(crate) mod error;
mod fs;
pub(crate) mod fuse_device;
pub mod lifecycle;
mod memory_limit;
mod options;
pub mod stats;
mod survey;

use std::path::Path;
use std::sync::Arc;

pub use error::MountError;
pub use lifecycle::session::MountSession;
pub use memory_limit::{cgroup_limit, machine_memory};
pub use options::{
    MAX_THREADS, MIN_MEMORY_BYTES, MIN_READAHEAD_BYTES, MountOptions, default_memory,
};
pub use stats::{MountStats, StatsReporter};
pub use survey::MountSurvey;

use crate::cache::{Cache, CacheLimits};
use crate::checkpoint;
use crate::source::shown_path;
use crate::view::{View, ViewEntry};
use fs::{
    BlockingPool, FilesystemState, FuseFilesystem, HandleTable, Listings, MountDescription,
    OwnerOverride,
};
use lifecycle::{attach, mountpoint, session, stale_mounts};
use options::{
    CLOSED_FILES_DIVISOR, DEFAULT_THREADS, KERNEL_READAHEAD_BYTES, LISTINGS_DIVISOR,
    MIN_LISTINGS_BYTES,
};
use survey::RunningSurvey;

/// Mounts, and returns when the mount answers.
pub fn mount(options: &MountOptions) -> Result<MountSession, MountError> {
    let MountOptions {
        source,
        mountpoint,
        allow_other,
        uid,
        gid,
        memory,
        threads,
        readahead,
        passthrough,
        traces,
        nonempty: _,
        view,
        log,
    } = options;
    mountpoint::require_free_descriptors(mountpoint)?;
    let paths = mountpoint::resolve(options)?;
    let budget = memory.unwrap_or_else(default_memory);
    let closed_files_bytes = budget / CLOSED_FILES_DIVISOR;
    // Opened before it may be mounted over.
    let view = View::with_cache(&paths.source, view.clone(), closed_files_bytes)
        .map_err(|error| error.with_typed_path(source))?;
    let view = Arc::new(view);
    // The mount table, lists and attributes show what names no file with a secret.
    let shown_source = shown_path(&paths.source).into_owned();
    require_checkpoint(&paths.source, &view)?;
    let survey = RunningSurvey::start(&view);
    // A trace that is written through the mount itself would wait for the mount.
    let traces = traces.clone().filter(|traces| !paths.hides(&traces.folder));
    let cache =
        Cache::new(CacheLimits { memory_bytes: budget, readahead_bytes: *readahead }, traces);
    let pool = BlockingPool::new()
        .map_err(|e| MountError::io(&paths.source, "start a thread for it", e))?;
    let handles = Arc::new(HandleTable::new(
        Arc::clone(&view),
        Arc::clone(&cache),
        pool.handle(),
        budget,
        *passthrough,
    ));
    let (root, surveyed) = (Arc::clone(view.root()), Arc::clone(&view));
    let about = MountDescription {
        source: shown_source.clone(),
        mountpoint: paths.mountpoint.clone(),
        budget,
        log: log.clone(),
    };
    let state = Arc::new(FilesystemState::new(
        about,
        view,
        cache,
        Arc::clone(&handles),
        Listings::new((budget / LISTINGS_DIVISOR).max(MIN_LISTINGS_BYTES) as usize),
        OwnerOverride { uid: *uid, gid: *gid },
    )?);
    let reporter: StatsReporter = {
        let state = Arc::clone(&state);
        Arc::new(move || state.stats())
    };
    let mut config = fuser::Config::default();
    config.n_threads = Some(threads.unwrap_or(DEFAULT_THREADS));
    let request = attach::AttachRequest {
        mountpoint: &paths.mountpoint,
        fsname: shown_source.as_os_str(),
        allow_other: *allow_other,
    };
    // A mount that was attached and then failed is dead.
    let attached =
        attach::attach(&request).inspect_err(|_| drop(stale_mounts::heal(&paths.mountpoint)))?;
    root.exclude_device(attached.1.device().to_raw());
    survey.look_up_recipe(&surveyed);
    let filesystem = FuseFilesystem::new(state, pool);
    let mut session = session::start(filesystem, attached, config, reporter, |notifier| {
        handles.set_notifier(notifier);
    })?;
    // The handshake lowers it to the kernel's offer, so it can only be raised now.
    session.is_privileged = session.attached().raise_readahead(KERNEL_READAHEAD_BYTES);
    session.survey = survey.finish();
    Ok(session)
}

/// Refuses a single file that is no checkpoint. A file that the view shows as it is was not parsed yet.
fn require_checkpoint(source: &Path, view: &View) -> Result<(), MountError> {
    if !view.is_single() {
        return Ok(());
    }
    let entries = view.list(Path::new(""))?.entries;
    if !entries.iter().any(|named| matches!(named.entry, ViewEntry::VirtualFile(_))) {
        checkpoint::open(source, &view.options().parse)?;
    }
    Ok(())
}
