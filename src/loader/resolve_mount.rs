//! Files of a mount: finding where their bytes lie, and making sure that these are the same bytes.
//!
//! In: a path. Out: the checkpoint there, and the [`Route`] to it. What a mount says is only where to
//! look: a source is believed when the virtual file made of it has the identity that the mount's has, or, of a
//! file shown as it is, when the system says the same of both.

use std::path::{Path, PathBuf};
use std::sync::Arc;

use rustix::fs::Stat;

use crate::checkpoint::{self, CandidateFiles, Checkpoint, DefaultChoice, ParseOptions};
use crate::mount_info::{self, MountOrigin};
use crate::source::{self, LinkPolicy, OpenFile, Root};
use crate::view;
use crate::virtual_file::VirtualFile;

use super::{LoadError, Route};

/// A checkpoint that was laid out, and the route to it.
pub struct ResolvedCheckpoint {
    pub virtual_file: VirtualFile,
    /// Its one file, still open.
    pub open_file: Option<OpenFile>,
    pub format: checkpoint::Format,
    pub notes: Vec<String>,
    pub route: Route,
}

/// The checkpoint at a path.
pub fn resolve(path: &Path, options: &ParseOptions) -> Result<ResolvedCheckpoint, LoadError> {
    // Who wants a dictionary of a pickle does not want what a mount made of it.
    let told = options.root_key.is_none().then(|| mount_origin_of(path)).flatten();
    let route = match told {
        None => Route::Plain,
        Some((file, note, told)) => match told.and_then(|told| open_at_source(&file, &told)) {
            Ok(mut found) => {
                found.notes.extend(note);
                return Ok(found);
            }
            Err(why) => {
                tracing::info!(path = %file.display(), why, "read through the mount");
                Route::ThroughMount { reason: why }
            }
        },
    };
    lay_out(view::open(path, options)?, route)
}

/// A checkpoint, laid out.
pub fn lay_out(mut checkpoint: Checkpoint, route: Route) -> Result<ResolvedCheckpoint, LoadError> {
    let (format, notes) = (checkpoint.format, checkpoint.notes.clone());
    let opened = checkpoint.open_file.take();
    Ok(ResolvedCheckpoint {
        virtual_file: VirtualFile::new(checkpoint)?,
        open_file: opened,
        format,
        notes,
        route,
    })
}

/// What a mount of ours says of the file of a path, or of the one in a directory by which a file is meant;
/// and what to tell of the rest of that.
fn mount_origin_of(path: &Path) -> Option<(PathBuf, Option<String>, Result<MountOrigin, String>)> {
    let told = mount_info::mount_origin(path)?;
    if !source::is_directory(path).ok()? {
        return Some((path.to_path_buf(), None, told));
    }
    let (root, way) = Root::for_directory(path, LinkPolicy::Inside).ok()?;
    let DefaultChoice { candidate, note } =
        checkpoint::choose_default(&root, &way, &root.file_names(&way).ok()?).ok()?;
    if candidate.files != CandidateFiles::Single {
        return None;
    }
    let file = path.join(&candidate.name);
    let told = mount_info::mount_origin(&file)?;
    Some((file, note, told))
}

/// What lies at the source of a file of a mount, or why that cannot be read.
fn open_at_source(file: &Path, told: &MountOrigin) -> Result<ResolvedCheckpoint, String> {
    let mount = rustix::fs::stat(file).map_err(|error| format!("it cannot be seen: {error}"))?;
    let mut why = None;
    for root in source_roots(&told.source) {
        let found = root.map_err(LoadError::from).and_then(|root| {
            // Over the source itself a path leads to what the mount shows.
            if root.metadata(Path::new(""))?.dev == mount.st_dev {
                return Ok(None);
            }
            read_source(&root, told).map(Some)
        });
        match found {
            Ok(Some(found)) if is_shown_by(&found, told, &mount) => return Ok(found),
            Ok(Some(_)) => why = Some("its source is not what the mount shows".to_owned()),
            Ok(None) => {}
            Err(error) => why = why.or(Some(format!("its source cannot be read: {error}"))),
        }
    }
    Err(why.unwrap_or_else(|| "its source cannot be seen from here".to_owned()))
}

/// Where a source may lie: where the path leads that was mounted, and in the directory that the daemon
/// holds open, which may be hidden beneath the mount or have another name by now.
fn source_roots(
    told: &mount_info::SourceAttribute,
) -> impl Iterator<Item = Result<Arc<Root>, source::SourceError>> {
    let links =
        if told.options.follow_symlinks { LinkPolicy::Anywhere } else { LinkPolicy::Inside };
    let mount_info::SourceAttribute { source, pid, rootfd, .. } = told.clone();
    let by_path = move || {
        let is_directory = source::is_directory(&source)?;
        let folder = if is_directory { Some(&*source) } else { source.parent() };
        Root::for_directory(folder.unwrap_or(Path::new("")), links).map(|(root, _)| root)
    };
    let by_descriptor = move || Root::from_process_fd(pid, rootfd, links);
    std::iter::once_with(by_path).chain(std::iter::once_with(by_descriptor))
}

fn read_source(root: &Arc<Root>, told: &MountOrigin) -> Result<ResolvedCheckpoint, LoadError> {
    let mount_info::SourceAttribute { path, options, .. } = &told.source;
    let options = ParseOptions {
        root_key: options.root.clone(),
        allow_partial: options.allow_partial,
        follow_symlinks: options.follow_symlinks,
    };
    let missing = || source::SourceError::Missing { path: root.path().join(path) };
    let name = path.file_name().ok_or_else(missing)?;
    let folder = path.parent().unwrap_or(Path::new(""));
    let checkpoint = checkpoint::open_by_name(root, folder, name, &options)?;
    lay_out(checkpoint, Route::Direct { source: root.path().join(path) })
}

/// Whether what was found is what the mount shows. Of a file that it shows as it is, it says what the
/// system says of the source.
fn is_shown_by(found: &ResolvedCheckpoint, told: &MountOrigin, mount: &Stat) -> bool {
    match &told.identity {
        Some(identity) => *identity == found.virtual_file.identity().to_string(),
        None => {
            let file =
                found.virtual_file.source_files().first().filter(|_| !told.source.is_virtual_file);
            file.is_some_and(|file| {
                let is = file.identity();
                let times =
                    (is.mtime, is.mtime_nsec) == (mount.st_mtime, mount.st_mtime_nsec as u32);
                times && is.size == mount.st_size as u64
            })
        }
    }
}
