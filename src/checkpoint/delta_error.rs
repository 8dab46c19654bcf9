//! Why a version that a trainer wrote as a delta cannot be shown.

use std::borrow::Cow;
use std::path::{Path, PathBuf};

use crate::shell_word::shell_word;

use super::conversions::folder_of;

/// Why a delta cannot be applied.
#[allow(missing_docs)] // The messages name the fields.
#[derive(Debug, thiserror::Error)]
pub enum DeltaError {
    /// An index that no trainer writes.
    #[error("it is not a valid index of a delta: {what}")]
    Index { what: String },
    /// An encoding, compression or checksum that is not read.
    #[error("it is a delta with {name} `{value}`, which is not read")]
    Unknown { name: &'static str, value: String },
    /// An index of another name than trainers give it.
    #[error("it is the index of a delta, and is not called model.safetensors.index.json")]
    IndexName,
    /// A folder of another name than that of the version.
    #[error("it is the index of version {version}, and its folder is not called {folder}")]
    FolderName { version: u64, folder: String },
    /// A delta on another version than the one before it.
    #[error(
        "version {version} is a delta on version {base_version}, and not on the version before it"
    )]
    OutOfOrder { version: u64, base_version: u64 },
    /// The version before a delta is not there.
    #[error("version {version} is a delta on {}, which is not there", .folder.display())]
    MissingVersion { version: u64, folder: PathBuf },
    /// A full version after the deltas that follow a base.
    #[error("version {version} is a full one, which does not follow the versions before it")]
    FullVersion { version: u64, folder: String },
    /// The first delta, without the model that the training began with.
    #[error("version 1 is a delta on the model that the training began with, which is not known")]
    MissingBase { folder: PathBuf },
    /// A longer chain than is read.
    #[error("it is more than {limit} deltas away from a full version")]
    TooLong { limit: usize },
    /// More changed tensors in all deltas of a chain together than are read.
    #[error("the deltas since its last full version change more than {limit} tensors together")]
    TooManyLayers { limit: usize },
    /// A file that trainers' engines would read, and that the index does not name.
    #[error("{name} lies beside it, and the index does not name it")]
    UnnamedFile { name: String },
    /// A tensor that the index puts into another file, or nowhere.
    #[error("tensor `{tensor}` is in {shard}, which the index does not say")]
    Misplaced { tensor: String, shard: String },
    /// A file that trainers do not write.
    #[error("{shard} is not a valid file of a delta: {what}")]
    Shard { shard: String, what: &'static str },
    /// A changed tensor without a checksum of the kind that the index states.
    #[error("tensor `{tensor}`: {shard} has no valid checksum of it")]
    Checksum { tensor: String, shard: String },
    /// A changed tensor that is not in the base.
    #[error("it changes tensor `{tensor}`, which {} does not have", .base.display())]
    UnknownTensor { tensor: String, base: PathBuf },
    /// The files of a delta without their index.
    #[error("its files hold the changes of a delta, whose index is missing")]
    MissingIndex,
}

impl DeltaError {
    /// What the user can do. `path` is that of the index.
    pub fn remedy(&self, path: &Path) -> Cow<'static, str> {
        match self {
            DeltaError::Unknown { name, .. } => {
                format!("have the trainer write another {name}, or a full version").into()
            }
            DeltaError::IndexName => format!(
                "rename it: mv {} {}",
                shell_word(path),
                shell_word(&path.with_file_name("model.safetensors.index.json"))
            )
            .into(),
            DeltaError::FolderName { folder, .. } => {
                let now = folder_of(path);
                let parent = now.parent().unwrap_or(Path::new(""));
                format!(
                    "rename its folder: mv {} {}",
                    shell_word(now),
                    shell_word(&parent.join(folder))
                )
                .into()
            }
            DeltaError::MissingVersion { folder, .. } => {
                format!("fetch {}", shell_word(folder)).into()
            }
            DeltaError::FullVersion { folder, .. } => {
                format!("to show it, and what follows it, give {folder} as the base").into()
            }
            DeltaError::MissingBase { folder } => format!(
                "give the trainer's --hf-checkpoint with --delta-base DIR, or put it at {}",
                shell_word(folder)
            )
            .into(),
            DeltaError::TooLong { .. } | DeltaError::TooManyLayers { .. } => {
                "replace the folder of an earlier version by a full one, which ckptfs export EARLIER_VERSION NEW_FOLDER/model.safetensors writes".into()
            }
            DeltaError::UnnamedFile { name } => {
                format!("move {} out of the folder", shell_word(&path.with_file_name(name))).into()
            }
            DeltaError::OutOfOrder { .. } => {
                "have the trainer write each delta on the version before it".into()
            }
            DeltaError::UnknownTensor { .. } => {
                "give the model that training began with, or have the trainer write a full version".into()
            }
            DeltaError::MissingIndex => {
                "wait until the trainer has written the version: the index comes last".into()
            }
            DeltaError::Index { .. }
            | DeltaError::Misplaced { .. }
            | DeltaError::Shard { .. }
            | DeltaError::Checksum { .. } => {
                "fetch the folder again, whole, or have the trainer write the version again".into()
            }
        }
    }
}
