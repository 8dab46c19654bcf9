//! Reads folders of training: one checkpoint in the files of many ranks.
//!
//! In: a folder whose format is known by its names. Out: a [`Checkpoint`](super::contents::Checkpoint) whose tensors are
//! joined from the pieces of the ranks ([`Boxes`](super::tensor::Boxes)).
//!
//! Nothing of a pickle is executed, also not of a `.metadata`. [`select_root`] finds the model among
//! the names. Each format has a folder or file of its own.

mod dcp;
mod dcp_safetensors;
mod deepspeed;
mod rank_files;
mod select_root;

use std::path::{Path, PathBuf};
use std::sync::Arc;

use crate::source::Root;

use super::contents::Checkpoint;
use super::directory::{TrainingFolder, TrainingFormat};
use super::error::CheckpointError;
use super::options::ParseOptions;
use super::refusal::{RESERVED_NAME, TensorError};
use super::training_error::{TrainingError, count_ranks};

/// Reads the checkpoint in the files of a folder.
pub fn read_training_folder(
    root: &Arc<Root>,
    directory: &Path,
    path: PathBuf,
    folder: &TrainingFolder,
    options: &ParseOptions,
) -> Result<Checkpoint, CheckpointError> {
    let directory = &match folder.folder.to_str() {
        Some("..") => directory.parent().unwrap_or(directory).to_path_buf(),
        _ => directory.join(&folder.folder),
    };
    let mut checkpoint = read_files(root, directory, path, folder, options)?;
    if let Some(tensor) = checkpoint.tensors.iter().find(|tensor| *tensor.name == *RESERVED_NAME) {
        let error = TensorError::ReservedName;
        let error = TrainingError::Tensor { tensor: tensor.name.to_string(), error };
        let path = folder_path(root, directory);
        return Err(CheckpointError::Training { path, error: Box::new(error) });
    }
    if let (Some(pointer), Some(name)) = (&folder.pointer, directory.file_name()) {
        let name = name.to_string_lossy();
        checkpoint.obvious_choices.push(format!("of the folder that `{pointer}` names: {name}"));
    }
    Ok(checkpoint)
}

fn read_files(
    root: &Arc<Root>,
    directory: &Path,
    path: PathBuf,
    folder: &TrainingFolder,
    options: &ParseOptions,
) -> Result<Checkpoint, CheckpointError> {
    match folder.format {
        TrainingFormat::Dcp => dcp::read_folder(root, directory, path, &folder.names, options),
        TrainingFormat::RankFiles => {
            rank_files::read_folder(root, directory, path, &folder.names, options)
        }
        TrainingFormat::DcpSafetensors => {
            dcp_safetensors::read_folder(root, directory, path, &folder.names, options)
        }
        TrainingFormat::Zero => {
            deepspeed::read_folder(root, directory, path, &folder.names, options)
        }
        TrainingFormat::Universal => {
            deepspeed::read_universal_folder(root, directory, path, &folder.names, options)
        }
    }
}

/// Fails if the user gave another number of ranks than was found.
fn check_rank_count(found: u64, options: &ParseOptions) -> Result<(), TrainingError> {
    match options.ranks.map(u64::from) {
        Some(expected) if expected != found => Err(TrainingError::RankCount { found, expected }),
        _ => Ok(()),
    }
}

/// What a checkpoint was joined from, in words.
fn origin_note(library: &str, folder: &Path, ranks: u64) -> String {
    let step = step_of(folder).map(|step| format!(", step {step}")).unwrap_or_default();
    format!("joined from {library}: {}{step}", count_ranks(ranks))
}

/// The note on files that do not record the number of ranks, unless the user gave it.
fn unrecorded_note(ranks: u64, options: &ParseOptions) -> Option<String> {
    let note = || {
        format!("{} found, the number is not recorded: --ranks N enforces it", count_ranks(ranks))
    };
    options.ranks.is_none().then(note)
}

/// Words before the number of a step in the names of folders.
const STEP_WORDS: [&str; 4] = ["step", "checkpoint", "iter", "epoch"];

/// The step that a folder or the one above it has in its name.
fn step_of(folder: &Path) -> Option<u64> {
    folder.ancestors().take(2).find_map(|folder| {
        let name = folder.file_name()?.to_str()?;
        let digits = name.bytes().rev().take_while(u8::is_ascii_digit).count();
        let (words, number) = name.split_at(name.len() - digits);
        let words = words.to_ascii_lowercase();
        STEP_WORDS.iter().any(|word| words.contains(word)).then(|| number.parse().ok())?
    })
}

/// The path of a folder in messages.
fn folder_path(root: &Root, directory: &Path) -> PathBuf {
    match directory.as_os_str().is_empty() {
        true => root.path().to_path_buf(),
        false => root.path().join(directory),
    }
}
