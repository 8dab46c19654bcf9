//! Finds the training folder that is shown beside a config although its files lie in another folder.
//!
//! Trainers put the config in one folder and the files of the ranks in another. Loaders look for weights beside the
//! config.

use std::path::{Path, PathBuf};
use std::sync::Arc;

use crate::source::{FileKind, OpenFile, ReadAt, Root, SourceError};

use super::candidate::{Candidate, LoaderName};
use super::training_folder::{TrainingFolder, TrainingFormat, is_model_states, training_folders};

/// The subfolder in which Trainer and accelerate save the model with FSDP.
const FSDP_FOLDER: &str = "pytorch_model_fsdp_0";

/// The subfolder of a second model. Where it is, neither is the model of the folder.
const SECOND_FSDP_FOLDER: &str = "pytorch_model_fsdp_1";

/// The file in which DeepSpeed writes the name of the subfolder that it saved last.
pub const LATEST_NAME: &str = "latest";

/// The longest name of such a subfolder.
const MAX_TAG_BYTES: u64 = 255;

/// The subfolder in which verl puts config and tokenizer, beside the files of the ranks.
const VERL_CONFIG_FOLDER: &str = "huggingface";

/// Finds the training folder that a directory shows, unless the directory has weights of its own.
pub fn nested_training_folder(
    root: &Arc<Root>,
    directory: &Path,
    names: &[String],
    own: &[Candidate],
) -> Option<TrainingFolder> {
    if own.iter().any(|candidate| LoaderName::parse(&candidate.unsharded_name).is_some()) {
        return None;
    }
    let nested = NestedFolder { root, directory };
    nested.fsdp().or_else(|| nested.latest(names)).or_else(|| nested.verl())
}

/// The subfolder that `latest` names, if it does not exist.
pub fn missing_tag(
    root: &Arc<Root>,
    directory: &Path,
    names: &[String],
) -> Result<Option<String>, SourceError> {
    let tag = match (NestedFolder { root, directory }).read_tag(names) {
        // A dangling symbolic link.
        Err(SourceError::Missing { .. }) => None,
        read => read?,
    };
    Ok(tag.filter(|tag| {
        let found = root.cached_metadata(&directory.join(tag));
        matches!(found, Err(SourceError::Missing { .. }))
    }))
}

/// The path of the file in which DeepSpeed without ZeRO saved the whole model. It lies in a directory with these names,
/// or in the subfolder that `latest` names.
pub fn find_whole_states(root: &Arc<Root>, directory: &Path, names: &[String]) -> Option<String> {
    let sole = |names: &[String]| {
        let mut states = names.iter().filter(|name| is_model_states(name));
        let first = states.next().filter(|name| name.starts_with("mp_rank_00_"))?;
        states.next().is_none().then(|| first.clone())
    };
    let nested = NestedFolder { root, directory };
    sole(names).or_else(|| {
        let tag = nested.tag(names).filter(|tag| nested.is_own_folder(tag))?;
        let name = sole(&root.file_names(&directory.join(&tag)).ok()?)?;
        Some(format!("{tag}/{name}"))
    })
}

struct NestedFolder<'a> {
    root: &'a Arc<Root>,
    directory: &'a Path,
}

impl NestedFolder<'_> {
    /// The subfolder of Trainer or accelerate. It counts even without files: a save may be about to write them.
    fn fsdp(&self) -> Option<TrainingFolder> {
        if !self.is_own_folder(FSDP_FOLDER) || self.is_own_folder(SECOND_FSDP_FOLDER) {
            return None;
        }
        let empty = || TrainingFolder::empty(TrainingFormat::Dcp);
        Some(self.find_in(PathBuf::from(FSDP_FOLDER)).unwrap_or_else(empty).in_folder(FSDP_FOLDER))
    }

    /// The subfolder that `latest` names.
    fn latest(&self, names: &[String]) -> Option<TrainingFolder> {
        let tag = self.tag(names).filter(|tag| self.is_own_folder(tag))?;
        let found = self.find_in(PathBuf::from(&tag))?;
        let is_zero = found.format == TrainingFormat::Zero;
        let pointer = Some(LATEST_NAME.to_owned());
        is_zero.then(|| TrainingFolder { pointer, ..found.in_folder(&tag) })
    }

    /// The subfolder that `latest` names; as [`Self::read_tag`], and `None` if the file cannot be read.
    fn tag(&self, names: &[String]) -> Option<String> {
        self.read_tag(names).ok()?
    }

    /// Reads the subfolder that `latest` names; `None` without the file, or if it holds no folder name.
    fn read_tag(&self, names: &[String]) -> Result<Option<String>, SourceError> {
        if !names.iter().any(|name| name == LATEST_NAME) {
            return Ok(None);
        }
        let file = OpenFile::open_in_root(self.root, &self.directory.join(LATEST_NAME))?;
        if file.size() > MAX_TAG_BYTES {
            return Ok(None);
        }
        let text = file.read_whole()?;
        let tag = std::str::from_utf8(&text).unwrap_or_default().trim();
        let is_name = !tag.is_empty() && !tag.contains(['/', '\0']) && tag != "." && tag != "..";
        Ok(is_name.then(|| tag.to_owned()))
    }

    /// The folder above, if this is where verl puts the config.
    fn verl(&self) -> Option<TrainingFolder> {
        let is_config = self.directory.file_name().is_some_and(|name| name == VERL_CONFIG_FOLDER);
        let is_model = |folder: &TrainingFolder| {
            let first = folder.names.first().map_or("", String::as_str);
            folder.format == TrainingFormat::RankFiles && first.contains("_world_size_")
        };
        is_config.then_some(())?;
        Some(self.find_in(PathBuf::from("..")).filter(is_model)?.in_folder(".."))
    }

    /// Whether a subfolder is there, and on the same filesystem: another filesystem may hang.
    fn is_own_folder(&self, name: &str) -> bool {
        let metadata = |path: &Path| self.root.cached_metadata(path).ok();
        let Some(found) = metadata(&self.directory.join(name)) else { return false };
        let own = metadata(self.directory);
        found.kind == FileKind::Directory && own.is_some_and(|own| own.dev == found.dev)
    }

    fn find_in(&self, folder: PathBuf) -> Option<TrainingFolder> {
        let path = match folder == Path::new("..") {
            true => self.directory.parent()?.to_path_buf(),
            false => self.directory.join(folder),
        };
        let names = self.root.file_names(&path).ok()?;
        let mut found = training_folders(&names, &|_| false).into_iter();
        found.next().filter(|_| found.next().is_none())
    }
}
