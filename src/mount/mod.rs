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

use std::path::Path;
use std::sync::Arc;
use std::sync::mpsc;
use std::time::{Duration, Instant};

pub use error::MountError;
pub use lifecycle::session::{MountSession, MountSurvey};
pub use memory_limit::{cgroup_limit, machine_memory};
pub use options::{
    MAX_THREADS, MIN_MEMORY_BYTES, MIN_READAHEAD_BYTES, MountOptions, default_memory,
};
pub use stats::{MountStats, StatsReporter};

use crate::cache::{Cache, CacheLimits};
use crate::checkpoint;
use crate::source::shown_path;
use crate::threads::spawn;
use crate::view::{RefusedView, Survey, View, ViewEntry};
use fs::{
    BlockingPool, FilesystemState, FuseFilesystem, HandleTable, Listings, MountDescription,
    OwnerOverride,
};
use lifecycle::{attach, mountpoint, session, stale_mounts};
use options::{
    CLOSED_FILES_DIVISOR, DEFAULT_THREADS, KERNEL_READAHEAD_BYTES, LISTINGS_DIVISOR,
    MIN_LISTINGS_BYTES,
};

/// How long a mount waits to know whether it shows any virtual file. Most show one in the first directory.
const SURVEY_TIMEOUT: Duration = Duration::from_millis(500);

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

/// Surveys of the view that run while the mount is made.
struct RunningSurvey {
    results: mpsc::Receiver<SurveyResult>,
    sender: mpsc::Sender<SurveyResult>,
    until: Instant,
}

enum SurveyResult {
    Shown(Option<Survey>),
    Refused(RefusedView),
}

impl RunningSurvey {
    fn start(view: &Arc<View>) -> RunningSurvey {
        let (sender, results) = mpsc::channel();
        let survey = RunningSurvey { results, sender, until: Instant::now() + SURVEY_TIMEOUT };
        survey.spawn(view, |view, until, send| send(SurveyResult::Shown(view.survey(until))));
        survey
    }

    /// Looks up the files of the recipe, too. The mount itself must be excluded by then.
    fn look_up_recipe(&self, view: &Arc<View>) {
        self.spawn(view, |view, until, send| {
            view.find_refused_views(until, |refused| send(SurveyResult::Refused(refused)));
        });
    }

    /// Runs work on a thread that may outlive this. Without a thread there is no result.
    fn spawn(
        &self,
        view: &Arc<View>,
        work: impl FnOnce(&View, Instant, &dyn Fn(SurveyResult)) + Send + 'static,
    ) {
        let (view, until, sender) = (Arc::clone(view), self.until, self.sender.clone());
        // Sending fails if the mount was not made, or did not wait.
        let work = move || work(&view, until, &|result| drop(sender.send(result)));
        let _ = spawn("ckptfs survey", work);
    }

    /// The results that come in time.
    fn finish(self) -> MountSurvey {
        let RunningSurvey { results, sender, until } = self;
        drop(sender);
        let mut survey = MountSurvey::default();
        let next = || {
            let remaining = until.saturating_duration_since(Instant::now());
            results.recv_timeout(remaining).ok()
        };
        while let Some(result) = next() {
            match result {
                SurveyResult::Shown(shown) => survey.shown = shown,
                SurveyResult::Refused(refused) => survey.refused_views.push(refused),
            }
        }
        survey
    }
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
