//! Folders of DeepSpeed's universal checkpoint: each parameter in a subfolder of `zero`, by its name.

use std::path::Path;
use std::sync::Arc;

use crate::source::{FileKind, LinkPolicy, Root};

use super::training_folder::{
    TrainingFolder, TrainingFormat, UNIVERSAL_FOLDER, is_model_states, is_optim_states,
};

/// The file of a parameter's 32-bit weights.
const WEIGHT_NAME: &str = "fp32.pt";

/// Maximum number of subfolders that are searched for weights: those of all parameters have them.
const MAX_SEARCHED_FOLDER_COUNT: usize = 8;

/// The parameter whose weights a file of this path has; `None` if it is no such file.
pub fn parameter_of_path(path: &str) -> Option<&str> {
    let path = path.strip_prefix(UNIVERSAL_FOLDER)?.strip_prefix('/')?;
    path.strip_suffix(WEIGHT_NAME)?.strip_suffix('/')
}

/// Whether a directory is the folder of the parameters of a universal checkpoint.
pub fn is_universal_part(directory: &Path) -> bool {
    let Ok(real_path) = std::fs::canonicalize(directory) else { return false };
    let (Some(parent), Some(name)) = (real_path.parent(), real_path.file_name()) else {
        return false;
    };
    let Ok((root, parent)) = Root::for_directory(parent, LinkPolicy::Inside) else { return false };
    let found = |names: Vec<String>| universal_folder(&root, &parent, &names).is_some();
    name == UNIVERSAL_FOLDER && root.file_names(&parent).is_ok_and(found)
}

/// Finds the checkpoint in a directory that has files of these names. With an optimizer's file among them it is not
/// universal.
pub fn universal_folder(
    root: &Arc<Root>,
    directory: &Path,
    names: &[String],
) -> Option<TrainingFolder> {
    let parameters = directory.join(UNIVERSAL_FOLDER);
    let metadata = |path: &Path| root.cached_metadata(path).ok();
    let found = metadata(&parameters).filter(|found| found.kind == FileKind::Directory)?;
    // Another filesystem may hang.
    if found.dev != metadata(directory)?.dev || names.iter().any(|name| is_optim_states(name)) {
        return None;
    }
    let folders = root.entries(&parameters).ok()?.into_iter();
    let folders = folders.filter(|entry| entry.kind == FileKind::Directory);
    let folders: Vec<String> = folders.filter_map(|entry| entry.name.into_string().ok()).collect();
    let weights = |folder: &String| format!("{UNIVERSAL_FOLDER}/{folder}/{WEIGHT_NAME}");
    let has_weights = |path: String| metadata(&directory.join(path)).is_some();
    if !folders.iter().take(MAX_SEARCHED_FOLDER_COUNT).map(weights).any(has_weights) {
        return None;
    }
    let states = names.iter().filter(|name| is_model_states(name)).cloned();
    let names = states.chain(folders.iter().map(weights)).collect();
    Some(TrainingFolder { names, ..TrainingFolder::empty(TrainingFormat::Universal) })
}
