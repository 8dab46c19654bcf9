//! Why a path stands for no checkpoint that can be read, with the path to give instead.

use std::path::Path;
use std::sync::Arc;

use crate::source::Root;

use super::directory::{
    Candidate, LATEST_NAME, find_nested, find_unread_file, find_whole_states, is_universal_part,
    is_zero_optimizer, missing_tag,
};
use super::error::CheckpointError;
use super::training_error::TrainingError;
use super::unread_format::UnreadFormat;

/// Maximum number of candidates that are opened to suggest one.
const MAX_SUGGESTION_COUNT: usize = 4;

/// Why a directory stands for no checkpoint that can be read, given its file names and the candidates among them.
/// `opens` opens a candidate, and returns false if a part of it is refused.
pub fn no_choice_error(
    root: &Arc<Root>,
    directory: &Path,
    path: &Path,
    names: &[String],
    found: Vec<Candidate>,
    opens: &dyn Fn(&Candidate) -> Result<bool, CheckpointError>,
) -> CheckpointError {
    let path = path.to_path_buf();
    if let Some(first) = found.first() {
        let mut read_failure = None;
        let suggested = found.iter().take(MAX_SUGGESTION_COUNT).find(|candidate| {
            opens(candidate).unwrap_or_else(|error| {
                read_failure.get_or_insert(error);
                false
            })
        });
        // No candidate was read, so there is no choice to suggest.
        if let (None, Some(CheckpointError::Source(error))) = (suggested, read_failure)
            && error.is_read_failure()
        {
            return error.into();
        }
        let suggested = suggested.unwrap_or(first).name.clone();
        let names = found.into_iter().map(|candidate| candidate.name).collect();
        return CheckpointError::SeveralCheckpoints { path, names, suggested };
    }
    let training = |path, error| CheckpointError::Training { path, error: Box::new(error) };
    if names.iter().any(|name| is_zero_optimizer(name)) {
        return training(path, TrainingError::no_model_states());
    }
    match missing_tag(root, directory, names) {
        Ok(Some(tag)) => {
            let other = find_nested(root, directory).pop();
            return training(path, TrainingError::MissingTag { tag, other });
        }
        Ok(None) => {}
        Err(error) => return error.into(),
    }
    if let Some(name) = find_whole_states(root, directory, names) {
        return training(path, TrainingError::WholeStates { name });
    }
    if is_universal_part(&path) {
        let path = std::path::absolute(&path).unwrap_or(path);
        return training(path, TrainingError::UniversalPart);
    }
    match find_unread_file(root, directory, names) {
        Some((name, format)) => CheckpointError::UnreadFormat { path: path.join(name), format },
        None => {
            let subdirectories = find_nested(root, directory);
            CheckpointError::NoCheckpoint { path, subdirectories }
        }
    }
}

/// The error of a file of this name. DeepSpeed's `latest` is text that leads to a checkpoint.
pub fn pointer_error(name: &str, error: CheckpointError) -> CheckpointError {
    match error {
        CheckpointError::UnreadFormat { path, format: UnreadFormat::Text }
            if name == LATEST_NAME =>
        {
            CheckpointError::Training { path, error: Box::new(TrainingError::PointerFile) }
        }
        error => error,
    }
}
