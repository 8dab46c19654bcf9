//! One file of a recipe in its directory: its sources, what is shown beside it, and why it may be refused.

use std::ffi::{OsStr, OsString};
use std::path::{Path, PathBuf};
use std::sync::Arc;

use crate::checkpoint::Candidate;
use crate::recipe::{RecipeFile, RelativePath};
use crate::source::{FileKind, OpenFile, ReadAt, Root, SourceError};

use super::config_json::set_fields;
use super::error::{RecipeFault, ViewError};
use super::names::SortedNames;

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
    /// Plans a file for a directory of these names. `base` is the path from the root to the view. `watched` has the paths
    /// that decide which checkpoints the file is made of.
    pub fn new(
        root: &Arc<Root>,
        base: &Path,
        names: &SortedNames,
        file: &Arc<RecipeFile>,
        mut watched: Vec<PathBuf>,
        replaced: Option<Candidate>,
    ) -> RecipePlan {
        let mut fault = link_in_path(root, base, &file.path);
        let beside_directory = beside_directory(root, base, file);
        let beside = match names_beside(root, &beside_directory, file) {
            Ok(beside) => beside,
            Err(found) => {
                fault.get_or_insert(found);
                Vec::new()
            }
        };
        watched.extend(beside.iter().map(|name| beside_directory.join(name)).filter(|path| {
            // The target of a link may come later.
            root.metadata(path).is_err()
        }));
        let beside = match check_beside(root, &beside_directory, beside) {
            Ok(beside) => beside,
            Err(found) => {
                fault.get_or_insert(found);
                Vec::new()
            }
        };
        if let Some(replaced) = &replaced {
            let directory = base.join(file.path.directory());
            watched.extend(replaced.watched_paths().into_iter().map(|name| directory.join(name)));
            watched.extend(replaced.watched_root_paths().iter().cloned());
        }
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

    /// The text of its `config.json`, if it sets fields of that.
    pub fn config_text(&self, root: &Arc<Root>, base: &Path) -> Result<Option<Vec<u8>>, ViewError> {
        if self.file.config.is_empty() {
            return Ok(None);
        }
        /// Maximum bytes of a configuration: a hundred times the longest.
        const MAX_CONFIG_BYTES: u64 = 8 << 20;
        let source = self.beside_directory.join(CONFIG_NAME);
        let wrong = |reason: &str| ViewError::Recipe {
            path: root.shown_path(&base.join(self.file.path.as_path())),
            fault: Box::new(RecipeFault::Config {
                config: root.shown_path(&source).display().to_string(),
                reason: reason.to_owned(),
            }),
        };
        let file = match OpenFile::open_in_root(root, &source) {
            Err(SourceError::Missing { .. }) => return Err(wrong("does not exist")),
            opened => opened?,
        };
        if file.size() > MAX_CONFIG_BYTES {
            return Err(wrong("is longer than any configuration"));
        }
        let text = file.read_whole()?;
        file.check_unchanged()?;
        let config = set_fields(&text, &self.file.config).map_err(|reason| wrong(&reason))?;
        Ok(Some(config.into_bytes()))
    }
}

/// The fault of a path that leads through a link, or through a file, of the source. The kernel would follow the link, and
/// find another directory.
pub fn link_in_path(root: &Root, base: &Path, path: &RelativePath) -> Option<RecipeFault> {
    let directory = path.directory();
    let mut above: Vec<&Path> = directory.ancestors().collect();
    above.retain(|above| !above.as_os_str().is_empty());
    let found = above.into_iter().rev().find_map(|above| {
        let kind = root.link_metadata(&base.join(above)).ok()?.kind;
        (kind != FileKind::Directory).then_some((above, kind))
    });
    let (above, kind) = found?;
    let what = if kind == FileKind::Link { "a symbolic link" } else { "a file" };
    let (shown, above) = (path.as_str().to_owned(), above.display().to_string());
    Some(RecipeFault::NotADirectory { shown, above, what })
}

/// Fails if a name beside a checkpoint cannot be shown as a link: its own link leads nowhere, or out of the source.
fn check_beside(
    root: &Root,
    directory: &Path,
    names: Vec<OsString>,
) -> Result<Vec<OsString>, RecipeFault> {
    for name in &names {
        let path = directory.join(name);
        if let Err(error) = root.metadata(&path)
            && !error.may_pass()
        {
            let reason = error.to_string();
            return Err(RecipeFault::UnreadableBeside { name: name.display().to_string(), reason });
        }
    }
    Ok(names)
}

/// The directory of the first checkpoint.
fn beside_directory(root: &Root, base: &Path, file: &RecipeFile) -> PathBuf {
    let Some(first) = file.source_paths().next() else { return base.to_path_buf() };
    let path = base.join(first.as_path());
    match root.metadata(&path) {
        Ok(metadata) if metadata.kind == FileKind::Directory => path,
        _ => path.parent().map(Path::to_path_buf).unwrap_or_default(),
    }
}

/// The names of a directory that a file shows beside it. Each rule must match one, unless it is optional.
fn names_beside(
    root: &Root,
    directory: &Path,
    file: &RecipeFile,
) -> Result<Vec<OsString>, RecipeFault> {
    if file.beside.is_empty() {
        return Ok(Vec::new());
    }
    let shown_directory = || root.shown_path(directory).display().to_string();
    let entries = match root.entries(directory) {
        Ok(entries) => entries,
        Err(SourceError::Missing { .. }) => Vec::new(),
        Err(error) => {
            let (directory, reason) = (shown_directory(), error.to_string());
            return Err(RecipeFault::UnlistedBeside { directory, reason });
        }
    };
    let names: Vec<&str> = entries.iter().filter_map(|entry| entry.name.to_str()).collect();
    for rule in file.beside.iter().filter(|rule| !rule.optional) {
        if !names.iter().any(|name| rule.names.matches(name)) {
            let (glob, directory) = (rule.names.to_string(), shown_directory());
            return Err(RecipeFault::NothingBeside { glob, directory });
        }
    }
    let is_beside = |name: &&str| file.beside.iter().any(|rule| rule.names.matches(name));
    Ok(names.into_iter().filter(is_beside).map(OsString::from).collect())
}
