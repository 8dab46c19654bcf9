//! From a path to an open checkpoint, and the route to its bytes.
//!
//! A file of a mount is read at its source. What a mount says is only where to look. A source is believed if its
//! virtual file has the identity of the mounted file. Of a file that is shown as it is, the system must say the same of
//! both.

use std::num::NonZeroUsize;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use rustix::fs::Stat;

use crate::checkpoint::{self, CandidateFiles, Checkpoint, DefaultChoice, Format, ParseOptions};
use crate::mount_info::{self, MountOrigin, RecordedOptions, SourceAttribute};
use crate::recipe::{Recipe, RecipeError, RecipeFile, Transform};
use crate::source::{self, LinkPolicy, OpenFile, Root, SourceError};
use crate::view::{self, ViewError};
use crate::virtual_file::{VirtualFile, VirtualFileReader};

use super::error::LoadError;
use super::execute::Concurrency;
use super::handle::{OpenCheckpoint, Route};
use super::sink::BUFFER_BYTES;

/// How a checkpoint is opened and read.
#[derive(Clone, Debug, Default)]
pub struct LoadOptions {
    /// How it is parsed.
    pub parse: ParseOptions,
    /// Threads that read at once; by default as many as keep a fast disk busy.
    pub threads: Option<NonZeroUsize>,
    /// Bytes of staging buffers: at least one buffer. They limit the threads to one per buffer.
    pub buffer_bytes: Option<u64>,
    /// Leave in the page cache only what was there before.
    pub leave_cache: bool,
    /// Read tensors of stores past the cache on disk. Headers stay in it.
    pub bypass_disk_cache: bool,
    /// What becomes of the tensors.
    pub recipe: Option<Arc<LoadRecipe>>,
}

/// What becomes of the tensors of a load.
///
/// ```no_run
/// # fn main() -> Result<(), Box<dyn std::error::Error>> {
/// use ckptfs::loader::{LoadOptions, LoadRecipe};
///
/// let steps = LoadRecipe::parse_json(r#"{"cast": [{"tensors": "*", "to": "bfloat16"}]}"#)?;
/// let options = LoadOptions { recipe: Some(steps.into()), ..LoadOptions::default() };
/// let model = options.open("models/llama".as_ref())?;
/// # let _ = model;
/// # Ok(())
/// # }
/// ```
#[derive(Clone, Debug)]
pub enum LoadRecipe {
    /// Steps with the tensors of the checkpoint at the path.
    Steps(Transform),
    /// The path is that of a file which a recipe shows, beneath its source.
    Files(Recipe),
}

impl LoadRecipe {
    /// The recipe of a file.
    pub fn read(path: &Path) -> Result<LoadRecipe, RecipeError> {
        Ok(LoadRecipe::Files(Recipe::read(path)?))
    }

    /// The recipe of a JSON: a whole one, which has the key `file`, or steps alone.
    pub fn parse_json(json: &str) -> Result<LoadRecipe, RecipeError> {
        let path = Path::new("views");
        let is_whole = |value: serde_json::Value| value.get("file").is_some();
        if serde_json::from_str(json).is_ok_and(is_whole) {
            return Ok(LoadRecipe::Files(Recipe::parse_json(json.as_bytes(), path)?));
        }
        Ok(LoadRecipe::Steps(Transform::parse_json(json, path)?))
    }
}

/// Threads that read at once: while some copy or wait for fresh memory, the others keep the disk busy.
const DEFAULT_THREADS: usize = 16;

impl LoadOptions {
    /// Opens a checkpoint.
    pub fn open(&self, path: &Path) -> Result<OpenCheckpoint, LoadError> {
        self.open_from(path, |steps| resolve(path, &self.parse, steps))
    }

    /// Opens a checkpoint at a path that is on a filesystem of this machine's own, and so on no mount of ours, as
    /// [`mount_info::may_block`](crate::mount_info::may_block) tells.
    pub fn open_outside_mounts(&self, path: &Path) -> Result<OpenCheckpoint, LoadError> {
        self.open_from(path, |steps| {
            ResolvedCheckpoint::lay_out(view::open(path, &self.parse)?, steps, Route::Plain)
        })
    }

    /// Opens what a recipe shows at a path, or what else is there, with these steps if there are any.
    fn open_from(
        &self,
        path: &Path,
        resolve: impl FnOnce(Option<&Transform>) -> Result<ResolvedCheckpoint, LoadError>,
    ) -> Result<OpenCheckpoint, LoadError> {
        self.open_resolved(path, || match self.recipe.as_deref() {
            Some(LoadRecipe::Files(recipe)) => {
                let checkpoint = view::open_shown(path, recipe, &self.parse)?;
                ResolvedCheckpoint::lay_out(checkpoint, None, Route::Plain)
            }
            Some(LoadRecipe::Steps(steps)) => resolve(Some(steps)),
            None => resolve(None),
        })
    }

    /// Opens a checkpoint whose bytes are in memory; they are copied.
    pub fn open_bytes(&self, bytes: &[u8]) -> Result<OpenCheckpoint, LoadError> {
        let path = Path::new("bytes in memory");
        self.open_resolved(path, || {
            let checkpoint = checkpoint::parse_bytes(bytes, path, &self.parse)?;
            ResolvedCheckpoint::lay_out(checkpoint, None, Route::Plain)
        })
    }

    fn open_resolved(
        &self,
        path: &Path,
        resolve: impl FnOnce() -> Result<ResolvedCheckpoint, LoadError>,
    ) -> Result<OpenCheckpoint, LoadError> {
        let concurrency = self.concurrency(path)?;
        let ResolvedCheckpoint { virtual_file, open_file, format, notes, route } = resolve()?;
        if let Some(bytes) = self.buffer_bytes {
            checkpoint::lower_patch_limit(bytes / 2);
        }
        let reader = VirtualFileReader::open_with(&Arc::new(virtual_file), open_file)?;
        if self.bypass_disk_cache {
            reader.origins().files().for_each(|file| file.bypass_disk_cache());
        }
        Ok(OpenCheckpoint::new(path, format, notes, reader, route, concurrency))
    }

    fn concurrency(&self, path: &Path) -> Result<Concurrency, LoadError> {
        let LoadOptions {
            parse: _,
            threads,
            buffer_bytes,
            leave_cache,
            bypass_disk_cache: _,
            recipe: _,
        } = self;
        let (allowed, needed) = (buffer_bytes.unwrap_or(u64::MAX), BUFFER_BYTES as u64);
        if allowed < needed {
            return Err(LoadError::MemoryLimit { path: path.to_path_buf(), allowed, needed });
        }
        let is_default = threads.is_none();
        let threads = threads.map_or(DEFAULT_THREADS, NonZeroUsize::get);
        let max_threads = usize::try_from(allowed / needed).unwrap_or(usize::MAX);
        let threads = threads.min(max_threads);
        Ok(Concurrency { threads, is_default, max_threads, leave_cache: *leave_cache })
    }
}

/// Opens a checkpoint with the default options.
pub fn open(path: &Path) -> Result<OpenCheckpoint, LoadError> {
    LoadOptions::default().open(path)
}

/// A checkpoint that is laid out, and the route to it.
struct ResolvedCheckpoint {
    virtual_file: VirtualFile,
    /// Its file, still open, if it is a single one.
    open_file: Option<OpenFile>,
    format: Format,
    notes: Vec<String>,
    route: Route,
}

impl ResolvedCheckpoint {
    /// Lays out a checkpoint, after steps with its tensors if there are any.
    fn lay_out(
        mut checkpoint: Checkpoint,
        steps: Option<&Transform>,
        route: Route,
    ) -> Result<ResolvedCheckpoint, LoadError> {
        if let Some(steps) = steps {
            let path = checkpoint.path.clone();
            checkpoint = steps
                .apply(checkpoint, Vec::new())
                .map_err(|error| ViewError::Recipe { path, fault: Box::new(error.into()) })?;
        }
        let (format, notes) = (checkpoint.format, checkpoint.notes.clone());
        let open_file = checkpoint.open_file.take();
        let virtual_file = VirtualFile::new(checkpoint)?;
        Ok(ResolvedCheckpoint { virtual_file, open_file, format, notes, route })
    }
}

/// Resolves a path, through the mount that it may be on, and applies steps if there are any.
fn resolve(
    path: &Path,
    options: &ParseOptions,
    steps: Option<&Transform>,
) -> Result<ResolvedCheckpoint, LoadError> {
    // A key asks for a dictionary of the original pickle, which a mount's virtual file has not.
    let on_mount = options.root_key.is_none().then(|| mount_origin_of(path)).flatten();
    let route = match on_mount {
        None => Route::Plain,
        Some((file, note, origin)) => {
            match origin.and_then(|origin| open_at_source(&file, &origin)) {
                Ok(mut resolved) => {
                    if steps.is_some() {
                        // What the mount shows was compared without the steps.
                        let ResolvedCheckpoint { virtual_file, format, notes, route, .. } =
                            resolved;
                        let mut checkpoint = virtual_file.to_checkpoint(&file, format);
                        checkpoint.notes = notes;
                        resolved = ResolvedCheckpoint::lay_out(checkpoint, steps, route)?;
                    }
                    resolved.notes.extend(note);
                    return Ok(resolved);
                }
                Err(reason) => {
                    tracing::info!(path = %file.display(), why = reason, "read through the mount");
                    Route::ThroughMount { reason }
                }
            }
        }
    };
    ResolvedCheckpoint::lay_out(view::open(path, options)?, steps, route)
}

type OriginOfFile = (PathBuf, Option<String>, Result<MountOrigin, String>);

/// The mount origin of a path's file, or of the file that a directory stands for; with the note on what that
/// leaves out.
fn mount_origin_of(path: &Path) -> Option<OriginOfFile> {
    let origin = mount_info::mount_origin(path)?;
    if !source::is_directory(path).ok()? {
        return Some((path.to_path_buf(), None, origin));
    }
    let (root, directory) = Root::for_directory(path, LinkPolicy::Inside).ok()?;
    let names = root.file_names(&directory).ok()?;
    let choice = checkpoint::choose_default(&root, &directory, &names).ok()?;
    let DefaultChoice { candidate, note } = choice;
    if candidate.files != CandidateFiles::Single {
        return None;
    }
    let file = path.join(&candidate.name);
    let origin = mount_info::mount_origin(&file)?;
    Some((file, note, origin))
}

/// Opens the source of a file of a mount, or tells why that cannot be read.
fn open_at_source(file: &Path, origin: &MountOrigin) -> Result<ResolvedCheckpoint, String> {
    // A mount of another user could name any address.
    let is_own = origin.owner_uid == Some(rustix::process::geteuid().as_raw());
    if source::is_source_url(&origin.source.source) && !is_own {
        return Err("its source is in a store, and the mount is another user's".to_owned());
    }
    let shown = rustix::fs::stat(file).map_err(|error| format!("it cannot be seen: {error}"))?;
    let options = parse_options(&origin.source.options);
    let mut reason = None;
    for root in source_roots(&origin.source, options.link_policy()) {
        let resolved = root.map_err(LoadError::from).and_then(|root| {
            // Over the source itself a path leads to what the mount shows.
            if root.metadata(Path::new(""))?.dev == shown.st_dev {
                return Ok(None);
            }
            parse_source(&root, &origin.source, &options).map(Some)
        });
        match resolved {
            Ok(Some(resolved)) if is_shown_by(&resolved, origin, &shown) => return Ok(resolved),
            Ok(Some(_)) => reason = Some("its source is not what the mount shows".to_owned()),
            Ok(None) => {}
            Err(error) => {
                reason = reason.or(Some(format!("its source cannot be read: {error}")));
            }
        }
    }
    Err(reason.unwrap_or_else(|| "its source cannot be seen from here".to_owned()))
}

/// The places where a source may lie: where the mounted path leads, and in the directory that the daemon holds open.
/// That directory may be hidden beneath the mount, or have been renamed.
fn source_roots(
    attribute: &SourceAttribute,
    links: LinkPolicy,
) -> impl Iterator<Item = Result<Arc<Root>, SourceError>> {
    let SourceAttribute { source, pid, rootfd, .. } = attribute;
    let by_path = move || {
        let is_directory = source::is_directory(source)?;
        let directory = if is_directory { Some(&**source) } else { source.parent() };
        let root = Root::for_directory(directory.unwrap_or(Path::new("")), links);
        root.map(|(root, _)| root)
    };
    let by_descriptor = move || Root::from_process_fd(*pid, *rootfd, links);
    std::iter::once_with(by_path).chain(std::iter::once_with(by_descriptor))
}

fn parse_options(recorded: &RecordedOptions) -> ParseOptions {
    let RecordedOptions { root, allow_partial, follow_symlinks, ranks, delta_base } = recorded;
    ParseOptions {
        root_key: root.clone(),
        allow_partial: *allow_partial,
        follow_symlinks: *follow_symlinks,
        ranks: *ranks,
        delta_base: delta_base.clone(),
    }
}

fn parse_source(
    root: &Arc<Root>,
    attribute: &SourceAttribute,
    options: &ParseOptions,
) -> Result<ResolvedCheckpoint, LoadError> {
    let path = &*attribute.path;
    if let Some(recipe) = &attribute.recipe {
        let source = root.shown_path(path);
        let file = RecipeFile::from_json(recipe.as_bytes())
            .ok_or_else(|| SourceError::Missing { path: source.clone() })?;
        let checkpoint = view::open_recipe_file(root, path, &file, options)?;
        return ResolvedCheckpoint::lay_out(checkpoint, None, Route::Direct { source });
    }
    let source = root.shown_path(path);
    let Some(name) = path.file_name() else {
        return Err(SourceError::Missing { path: source }.into());
    };
    let directory = path.parent().unwrap_or(Path::new(""));
    let checkpoint = checkpoint::open_by_name(root, directory, name, options)?;
    ResolvedCheckpoint::lay_out(checkpoint, None, Route::Direct { source })
}

/// Whether a mount shows what was read at its source. A file that it shows as it is has the size and the time
/// of that.
fn is_shown_by(resolved: &ResolvedCheckpoint, origin: &MountOrigin, shown: &Stat) -> bool {
    let file = &resolved.virtual_file;
    match &origin.identity {
        Some(identity) => *identity == file.identity().to_string(),
        None => {
            let single = file.source_files().first().filter(|_| !origin.source.is_virtual_file);
            single.is_some_and(|single| {
                let identity = single.identity();
                let times = (identity.mtime, identity.mtime_nsec);
                times == (shown.st_mtime, shown.st_mtime_nsec as u32)
                    && identity.size == shown.st_size as u64
            })
        }
    }
}
