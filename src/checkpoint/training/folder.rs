//! Shared by the readers of training folders: errors of a folder and of a rank's file, checks of the options, notes.

use std::path::{Path, PathBuf};

use crate::checkpoint::directory::split_digits;
use crate::checkpoint::error::CheckpointError;
use crate::checkpoint::options::ParseOptions;
use crate::checkpoint::torch::TorchError;
use crate::checkpoint::training_error::{TrainingError, count_ranks};
use crate::source::Root;

/// Turns an error into that of a checkpoint in this folder.
pub fn in_folder(folder: &Path) -> impl Fn(TrainingError) -> CheckpointError + Copy + '_ {
    move |error| CheckpointError::Training { path: folder.to_path_buf(), error: Box::new(error) }
}

/// Why the file of a rank cannot be read.
#[derive(Debug)]
pub enum RankFileError {
    Training(TrainingError),
    Torch(TorchError),
}

impl From<TorchError> for RankFileError {
    fn from(error: TorchError) -> RankFileError {
        RankFileError::Torch(error)
    }
}

impl RankFileError {
    /// The error of the whole checkpoint, given the file's name and [`in_folder`].
    pub fn into_checkpoint_error(
        self,
        name: &str,
        in_folder: impl Fn(TrainingError) -> CheckpointError,
    ) -> CheckpointError {
        match self {
            RankFileError::Training(error) => in_folder(error),
            RankFileError::Torch(error) => match error.into_source() {
                Ok(error) => error.into(),
                Err(error) => {
                    let (name, error) = (name.to_owned(), Box::new(error));
                    in_folder(TrainingError::RankFile { name, error })
                }
            },
        }
    }
}

/// Fails if the user gave a key: files of this format have no dictionaries to choose from.
pub fn check_no_root_key(options: &ParseOptions) -> Result<(), TrainingError> {
    match &options.root_key {
        Some(key) => Err(TrainingError::NoSuchKey { key: key.clone(), keys: Default::default() }),
        None => Ok(()),
    }
}

/// Fails if the user gave another number of ranks than was found.
pub fn check_rank_count(found: u64, options: &ParseOptions) -> Result<(), TrainingError> {
    match options.ranks.map(u64::from) {
        Some(expected) if expected != found => Err(TrainingError::RankCount { found, expected }),
        _ => Ok(()),
    }
}

/// The note on what a checkpoint was joined from.
pub fn origin_note(library: &str, folder: &Path, ranks: u64) -> String {
    let step = step_of(folder).map(|step| format!(", step {step}")).unwrap_or_default();
    format!("joined from {library}: {}{step}", count_ranks(ranks))
}

/// The note on files that do not record the number of ranks, unless the user gave it.
pub fn unrecorded_note(ranks: u64, options: &ParseOptions) -> Option<String> {
    let note = || {
        format!("{} found, the number is not recorded: --ranks N enforces it", count_ranks(ranks))
    };
    options.ranks.is_none().then(note)
}

/// Words that come before the number of a step in the names of folders.
const STEP_WORDS: [&str; 4] = ["step", "checkpoint", "iter", "epoch"];

/// The step that a folder or the one above it has in its name.
fn step_of(folder: &Path) -> Option<u64> {
    folder.ancestors().take(2).find_map(|folder| {
        let name = folder.file_name()?.to_str()?;
        let (words, number) = split_digits(name);
        let words = words.to_ascii_lowercase();
        STEP_WORDS.iter().any(|word| words.contains(word)).then(|| number.parse().ok())?
    })
}

/// The path of a folder in messages.
pub fn folder_path(root: &Root, directory: &Path) -> PathBuf {
    match directory.as_os_str().is_empty() {
        true => root.path().to_path_buf(),
        false => root.shown_path(directory),
    }
}
