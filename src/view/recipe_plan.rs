//! One file of a recipe in its directory: its sources, what is shown beside it, and why it may be refused.

use std::ffi::{OsStr, OsString};
use std::path::{Path, PathBuf};
use std::sync::Arc;

use crate::checkpoint::{
    self, Candidate, Checkpoint, CheckpointError, ParseOptions, candidates_by_name,
};
use crate::recipe::{Recipe, RecipeFile, RelativePath};
use crate::source::{FileKind, OpenFile, ReadAt, Root, SourceError, is_source_url};

use super::error::{RecipeFault, ViewError};
use super::names::SortedNames;
use super::options::KeepRules;
use super::single_target::find_shown;

/// The name of the configuration whose fields `config` sets.
pub const CONFIG_NAME: &str = "config.json";

/// A file of a recipe, in the directory that shows it.
#[derive(Clone, Debug)]
pub struct RecipePlan {
    pub file: Arc<RecipeFile>,
    /// The file as JSON, to compare plans.
    text: Vec<u8>,
    /// The files and directories, from the root, whose state decides what it is.
    watched: Vec<PathBuf>,
    /// The checkpoint of the directory that would have its name.
    pub replaced: Option<Candidate>,
    /// The names that are shown beside it.
    pub beside: Vec<OsString>,
    /// The directory that they are in, from the root.
    pub beside_directory: PathBuf,
    pub fault: Option<RecipeFault>,
}

impl PartialEq for RecipePlan {
    fn eq(&self, other: &RecipePlan) -> bool {
        self.text == other.text
            && self.watched == other.watched
            && self.fault == other.fault
            && self.replaced == other.replaced
            && self.beside == other.beside
            && self.beside_directory == other.beside_directory
    }
}

impl Eq for RecipePlan {}

impl RecipePlan {
    /// Plans a file for a directory of these names. `base` is the path from the root to the view.
    pub fn new(
        root: &Arc<Root>,
        base: &Path,
        names: &SortedNames,
        file: &Arc<RecipeFile>,
        replaced: Option<Candidate>,
    ) -> RecipePlan {
        let mut fault = None;
        let mut watched = Vec::new();
        for from in &file.from {
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
        let beside_directory = beside_directory(root, base, file);
        let beside = match names_beside(root, &beside_directory, file) {
            Ok(beside) => beside,
            Err(found) => {
                fault.get_or_insert(found);
                Vec::new()
            }
        };
        let hides = |name: &str| names.find(OsStr::new(name)).is_ok();
        if hides(file.path.name()) {
            fault = Some(RecipeFault::HidesFile { shown: file.path.as_str().to_owned() });
        }
        let has_config = !file.config.is_empty();
        if has_config && hides(CONFIG_NAME) {
            let shown = file.path.directory().join(CONFIG_NAME).display().to_string();
            fault.get_or_insert(RecipeFault::HidesFile { shown });
        }
        if has_config {
            watched.push(beside_directory.join(CONFIG_NAME));
        }
        // Names that the directory has already are not replaced.
        let beside = beside
            .into_iter()
            .filter(|name| names.find(name).is_err() && !(has_config && name == CONFIG_NAME));
        let text = file.to_json();
        RecipePlan {
            file: Arc::clone(file),
            text,
            watched,
            replaced,
            beside: beside.collect(),
            beside_directory,
            fault,
        }
    }

    /// The files and directories whose state decides what it is.
    pub fn watched_paths(&self) -> &[PathBuf] {
        &self.watched
    }

    /// Reads its checkpoints, and applies its steps.
    pub fn open(
        &self,
        root: &Arc<Root>,
        base: &Path,
        options: &ParseOptions,
    ) -> Result<Checkpoint, ViewError> {
        if let Some(fault) = &self.fault {
            let path = root.shown_path(&base.join(self.file.path.as_path()));
            return Err(ViewError::Recipe { path, fault: Box::new(fault.clone()) });
        }
        open_recipe_file(root, base, &self.file, options)
    }

    /// The text of its `config.json`, if it sets fields of that.
    pub fn config_text(&self, root: &Arc<Root>, base: &Path) -> Result<Option<Vec<u8>>, ViewError> {
        if self.file.config.is_empty() {
            return Ok(None);
        }
        /// Maximum bytes of a configuration: a hundred times the longest.
        const MAX_CONFIG_BYTES: u64 = 8 << 20;
        let source = self.beside_directory.join(CONFIG_NAME);
        let file = OpenFile::open_in_root(root, &source)?;
        let wrong = |reason: &str| ViewError::Recipe {
            path: root.shown_path(&base.join(self.file.path.as_path())),
            fault: Box::new(RecipeFault::Config {
                config: root.shown_path(&source).display().to_string(),
                reason: reason.to_owned(),
            }),
        };
        if file.size() > MAX_CONFIG_BYTES {
            return Err(wrong("is longer than any configuration"));
        }
        let config: serde_json::Value = serde_json::from_slice(&file.read_whole()?)
            .map_err(|error| wrong(&format!("is not valid JSON: {error}")))?;
        let serde_json::Value::Object(mut config) = config else {
            return Err(wrong("is no JSON object"));
        };
        file.check_unchanged()?;
        config.extend(self.file.config.clone());
        Ok(serde_json::to_vec_pretty(&config).ok())
    }
}

/// Opens a file of a recipe: reads its checkpoints, and applies its steps.
pub fn open_recipe_file(
    root: &Arc<Root>,
    base: &Path,
    file: &RecipeFile,
    options: &ParseOptions,
) -> Result<Checkpoint, ViewError> {
    let open = |from: &RelativePath| {
        let (directory, candidate) = locate(root, &base.join(from.as_path()))?;
        checkpoint::open_candidate(root, &directory, &candidate, options)
    };
    let mut checkpoints = file.from.iter().map(open);
    let path = root.shown_path(&base.join(file.path.as_path()));
    let Some(first) = checkpoints.next() else {
        return Err(SourceError::Missing { path }.into());
    };
    let (first, others) = (first?, checkpoints.collect::<Result<Vec<_>, _>>()?);
    let applied = file.transform.apply(first, others);
    let mut checkpoint = applied
        .map_err(|error| ViewError::Recipe { path: path.clone(), fault: Box::new(error.into()) })?;
    checkpoint.path = path;
    // Several files of one recipe may have no steps, and one header.
    checkpoint.recipe = Some(
        format!("{}\n{}", checkpoint.recipe.as_deref().unwrap_or_default(), from_text(file)).into(),
    );
    Ok(checkpoint)
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
    let exact = |file: &&RecipeFile| typed.ends_with(file.path.as_path());
    let mut in_directory = recipe.files.iter().filter(|file| {
        let directory = file.path.directory();
        !directory.as_os_str().is_empty() && typed.ends_with(&directory)
    });
    let found =
        recipe.files.iter().find(exact).map(|file| (file, file.path.as_path().to_path_buf()));
    let found = found.or_else(|| match (in_directory.next(), in_directory.next()) {
        (Some(file), None) => Some((file, file.path.directory())),
        _ => None,
    });
    let Some((file, beneath)) = found else {
        let shown: Vec<&str> = recipe.files.iter().map(|file| file.path.as_str()).collect();
        let fault = Box::new(RecipeFault::NotShown { shown: shown.join(", ") });
        return Err(ViewError::Recipe { path: path.to_path_buf(), fault });
    };
    let source = typed.ancestors().nth(beneath.components().count()).unwrap_or(Path::new("/"));
    let (root, base) = Root::for_directory(source, options.link_policy())?;
    open_recipe_file(&root, &base, file, options)
}

fn from_text(file: &RecipeFile) -> String {
    let from: Vec<&str> = file.from.iter().map(RelativePath::as_str).collect();
    from.join("\n")
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

/// The directory of the first checkpoint.
fn beside_directory(root: &Root, base: &Path, file: &RecipeFile) -> PathBuf {
    let Some(first) = file.from.first() else { return base.to_path_buf() };
    let path = base.join(first.as_path());
    match root.metadata(&path) {
        Ok(metadata) if metadata.kind == FileKind::Directory => path,
        _ => path.parent().map(Path::to_path_buf).unwrap_or_default(),
    }
}

/// The names of a directory that a file shows beside it. Each glob must match one.
fn names_beside(
    root: &Root,
    directory: &Path,
    file: &RecipeFile,
) -> Result<Vec<OsString>, RecipeFault> {
    if file.beside.is_empty() {
        return Ok(Vec::new());
    }
    let entries = root.entries(directory).unwrap_or_default();
    let names: Vec<&str> = entries.iter().filter_map(|entry| entry.name.to_str()).collect();
    for glob in &file.beside {
        if !names.iter().any(|name| glob.matches(name)) {
            let directory = root.shown_path(directory).display().to_string();
            return Err(RecipeFault::NothingBeside { glob: glob.to_string(), directory });
        }
    }
    let is_beside = |name: &&str| file.beside.iter().any(|glob| glob.matches(name));
    Ok(names.into_iter().filter(is_beside).map(OsString::from).collect())
}
