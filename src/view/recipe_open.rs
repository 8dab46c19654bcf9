//! Opens a file of a recipe: finds its checkpoints in the source, and applies its steps.

use std::ffi::OsStr;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use crate::checkpoint::{
    self, Candidate, Checkpoint, CheckpointError, DeltaVersions, ParseOptions, candidates_by_name,
};
use crate::recipe::{Recipe, RecipeFile, RelativePath, VersionSource};
use crate::source::{FileKind, Root, SourceError, is_source_url};
use crate::virtual_file::VirtualFile;

use super::error::{RecipeFault, ViewError};
use super::options::KeepRules;
use super::recipe_plan::RecipePlan;
use super::single_target::find_shown;

/// A file of a recipe, opened.
#[derive(Debug)]
pub struct OpenedRecipe {
    pub checkpoint: Checkpoint,
    /// Why a newer version is not shown.
    pub withheld: Option<CheckpointError>,
}

/// Opens a file of a recipe: reads its checkpoints, and applies its steps.
pub fn open_recipe_file(
    root: &Arc<Root>,
    base: &Path,
    file: &RecipeFile,
    options: &ParseOptions,
) -> Result<Checkpoint, ViewError> {
    open_recipe(root, base, file, options).map(|opened| opened.checkpoint)
}

/// Opens the file of a plan. Fails if the plan has a fault, or its file would hide a refused checkpoint.
pub fn open_recipe_plan(
    root: &Arc<Root>,
    base: &Path,
    plan: &RecipePlan,
    options: &ParseOptions,
) -> Result<OpenedRecipe, ViewError> {
    let RecipePlan { file, .. } = plan;
    let refuse = |fault: RecipeFault| {
        let path = root.shown_path(&base.join(file.path.as_path()));
        ViewError::Recipe { path, fault: Box::new(fault) }
    };
    if let Some(fault) = &plan.fault {
        return Err(refuse(fault.clone()));
    }
    if let Some(replaced) = &plan.replaced {
        let directory = base.join(file.path.directory());
        let by_itself =
            checkpoint::open_candidate(root, &directory, replaced, &options.without_root_key())
                .map_err(ViewError::from)
                .and_then(|checkpoint| Ok(VirtualFile::new(checkpoint)?));
        // The files of a refused checkpoint are shown as they are, and must not be hidden.
        if let Err(error) = by_itself {
            let shown = file.path.as_str().to_owned();
            let (hidden, reason) = (replaced.name.clone(), error.to_string());
            return match error.may_pass() {
                true => Err(error),
                false => Err(refuse(RecipeFault::HidesRefused { shown, hidden, reason })),
            };
        }
    }
    open_recipe(root, base, file, options)
}

/// Like [`open_recipe_file`], with the reason why a newer version is not shown.
fn open_recipe(
    root: &Arc<Root>,
    base: &Path,
    file: &RecipeFile,
    options: &ParseOptions,
) -> Result<OpenedRecipe, ViewError> {
    let open = |from: &RelativePath| {
        let (directory, candidate) = locate(root, &base.join(from.as_path()))?;
        let mut checkpoint = checkpoint::open_candidate(root, &directory, &candidate, options)?;
        if file.from.len() > 1 {
            // Dropped before the join, so that the headers of all files are never in memory at once.
            checkpoint.header = None;
        }
        Ok(checkpoint)
    };
    let path = root.shown_path(&base.join(file.path.as_path()));
    let mut withheld = None;
    let (first, others) = match &file.versions {
        Some(versions) => {
            let paths = VersionPaths::new(root, base, versions);
            let newest =
                checkpoint::open_newest(root, paths.versions(), options, &|| open(&versions.base))?;
            withheld = newest.withheld;
            (newest.checkpoint, Vec::new())
        }
        None => {
            let mut checkpoints = file.from.iter().map(open);
            let Some(first) = checkpoints.next() else {
                return Err(SourceError::Missing { path }.into());
            };
            (first?, checkpoints.collect::<Result<Vec<_>, _>>()?)
        }
    };
    let applied = file.transform.apply(first, others);
    let mut checkpoint = applied
        .map_err(|error| ViewError::Recipe { path: path.clone(), fault: Box::new(error.into()) })?;
    checkpoint.path = path;
    if file.versions.is_some() {
        // Each version has a header of one kind, whether deltas change the base or not.
        checkpoint.header = None;
    }
    if let Some(error) = &withheld {
        checkpoint
            .notes
            .push(format!("a newer version is not shown: {error}; what to do: {}", error.remedy()));
    }
    // Several files of one recipe may have no steps, and one header.
    checkpoint.recipe = Some(
        format!("{}\n{}", checkpoint.recipe.as_deref().unwrap_or_default(), source_text(file))
            .into(),
    );
    Ok(OpenedRecipe { checkpoint, withheld })
}

/// The versions of a file, by their paths from the root.
struct VersionPaths {
    base: PathBuf,
    deltas: Option<Vec<PathBuf>>,
}

impl VersionPaths {
    /// `base` is the path from the root to the view. A link that is not named as a version, and leads to one, stands for
    /// that version.
    fn new(root: &Root, base: &Path, versions: &VersionSource) -> VersionPaths {
        let deltas = versions.delta_paths();
        let deltas = deltas.map(|paths| paths.iter().map(|path| base.join(path)).collect());
        let base = base.join(versions.base.as_path());
        let resolved = root.resolve_by_name(&base).map(|resolved| resolved.path);
        let is_version = |folder: &Path| checkpoint::version_of_folder(folder) > 0;
        let base = resolved.filter(|to| is_version(to) && !is_version(&base)).unwrap_or(base);
        VersionPaths { base, deltas }
    }

    fn versions(&self) -> DeltaVersions<'_> {
        DeltaVersions { base: &self.base, listed: self.deltas.as_deref() }
    }
}

/// The files and directories whose state decides what the checkpoints of a file are.
pub fn watched_sources(root: &Arc<Root>, base: &Path, file: &RecipeFile) -> Vec<PathBuf> {
    let mut watched = Vec::new();
    for from in file.source_paths() {
        let path = base.join(from.as_path());
        if let Ok((directory, candidate)) = locate(root, &path) {
            let files = candidate.watched_paths();
            watched.extend(files.into_iter().map(|name| directory.join(name)));
            watched.extend(candidate.watched_root_paths().iter().cloned());
            watched.push(directory);
        } else {
            watched.push(path);
        }
    }
    if let Some(versions) = &file.versions {
        let paths = VersionPaths::new(root, base, versions);
        watched.extend(checkpoint::newest_version_paths(root, paths.versions()));
    }
    watched
}

/// Whether a plan watches the files of all versions that are there now.
pub fn watches_all_versions(root: &Arc<Root>, base: &Path, plan: &RecipePlan) -> bool {
    plan.file.versions.is_none()
        || plan.watched_paths().starts_with(&watched_sources(root, base, &plan.file))
}

/// Opens the checkpoint that a recipe shows at a path: that of the source, followed by that of a file of the
/// recipe. The directory of a single file stands for it.
pub fn open_shown(
    path: &Path,
    recipe: &Recipe,
    options: &ParseOptions,
) -> Result<Checkpoint, ViewError> {
    let typed = match is_source_url(path) {
        true => path.to_path_buf(),
        false => std::path::absolute(path).unwrap_or_else(|_| path.to_path_buf()),
    };
    let Some((file, beneath)) = find_by_end(&typed, &recipe.files) else {
        let shown: Vec<&str> = recipe.files.iter().map(|file| file.path.as_str()).collect();
        let fault = Box::new(RecipeFault::NotShown { shown: shown.join(", ") });
        return Err(ViewError::Recipe { path: path.to_path_buf(), fault });
    };
    let source = typed.ancestors().nth(beneath.components().count()).unwrap_or(Path::new("/"));
    let (root, base) = Root::for_directory(source, options.link_policy())?;
    open_recipe_file(&root, &base, file, options)
}

/// The file of a recipe that a path ends with, and that end: of several, the longest. The directory of a single file stands
/// for it where no path of a file fits.
fn find_by_end<'a>(typed: &Path, files: &'a [RecipeFile]) -> Option<(&'a RecipeFile, PathBuf)> {
    let depth = |path: &Path| path.components().count();
    let exact = files.iter().filter(|file| typed.ends_with(file.path.as_path()));
    if let Some(file) = exact.max_by_key(|file| depth(file.path.as_path())) {
        return Some((file, file.path.as_path().to_path_buf()));
    }
    let directories = files.iter().map(|file| (file, file.path.directory()));
    let ends = directories
        .filter(|(_, directory)| !directory.as_os_str().is_empty() && typed.ends_with(directory));
    let ends: Vec<_> = ends.collect();
    let longest = ends.iter().map(|(_, directory)| depth(directory)).max()?;
    let mut longest = ends.into_iter().filter(|(_, directory)| depth(directory) == longest);
    longest.next().filter(|_| longest.next().is_none())
}

/// A text that is equal for equal sources.
fn source_text(file: &RecipeFile) -> String {
    let sources: Vec<&str> = file.source_paths().map(RelativePath::as_str).collect();
    match &file.versions {
        None => sources.join("\n"),
        Some(versions) => format!("base\n{}\n{:?}", sources.join("\n"), versions.delta_paths()),
    }
}

/// Finds the checkpoint at a path from the root: of a directory, the one that loaders prefer.
fn locate(root: &Arc<Root>, path: &Path) -> Result<(PathBuf, Candidate), CheckpointError> {
    let missing = |path: &Path| SourceError::Missing { path: root.shown_path(path) };
    match root.metadata(path) {
        Ok(metadata) if metadata.kind == FileKind::Directory => {
            let candidate = checkpoint::choose_in_directory(root, path)?;
            Ok((path.to_path_buf(), candidate))
        }
        Err(error @ SourceError::OutsideRoot { .. }) => Err(error.into()),
        found => {
            let (Some(directory), Some(name)) = (path.parent(), path.file_name()) else {
                return Err(missing(path).into());
            };
            let names = root.file_names(directory)?;
            let mut candidates =
                candidates_by_name(root, directory, &names, &|_| false).into_iter();
            if let Some(candidate) = candidates.find(|one| OsStr::new(&one.name) == name) {
                return Ok((directory.to_path_buf(), candidate));
            }
            if let Some(candidate) = find_shown(root, directory, name, &KeepRules::default())? {
                return Ok((directory.to_path_buf(), candidate));
            }
            match (found, name.to_str()) {
                (Ok(_), Some(name)) => {
                    Ok((directory.to_path_buf(), Candidate::single(name.to_owned())))
                }
                _ => Err(missing(path).into()),
            }
        }
    }
}
