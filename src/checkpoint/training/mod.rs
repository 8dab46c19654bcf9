//! Reads training folders: one checkpoint in the files of many ranks.
//!
//! In: a folder whose format is known by its names. Out: a [`Checkpoint`](super::contents::Checkpoint) whose tensors
//! are joined from the pieces of the ranks ([`Boxes`](super::tensor::Boxes)).
//!
//! No pickle is executed, not even a `.metadata`. [`select_root`] finds the model among the names. Each format has a
//! folder or file of its own; `folder` has what they share.

mod dcp;
mod dcp_safetensors;
mod dcp_shard_set;
mod deepspeed;
mod folder;
mod optimizer_names;
mod rank_files;
mod select_root;
mod state_names;

use std::path::{Path, PathBuf};
use std::sync::Arc;

use crate::source::Root;

use super::contents::Checkpoint;
use super::directory::{TrainingFolder, TrainingFormat};
use super::error::CheckpointError;
use super::options::ParseOptions;
use super::refusal::{RESERVED_NAME, TensorError};
use super::training_error::TrainingError;
use folder::{folder_path, in_folder};

/// Reads the checkpoint of a training folder that was found from a directory.
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
        return Err(in_folder(&folder_path(root, directory))(error));
    }
    if let (Some(pointer), Some(name)) = (&folder.pointer, directory.file_name()) {
        let name = name.to_string_lossy();
        checkpoint.obvious_choices.push(format!("from the folder that `{pointer}` names: {name}"));
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
