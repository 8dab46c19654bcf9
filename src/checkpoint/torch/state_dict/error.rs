//! Why no dictionary of a checkpoint can be shown.

use std::path::Path;

use crate::checkpoint::conversions::{folder_of, module_remedy};
use crate::checkpoint::truncated_list::TruncatedList;
use crate::shell_word::{shell_text, shell_word};

/// Why there is no dictionary to show.
#[allow(missing_docs)] // The messages name the fields.
#[derive(Debug, thiserror::Error)]
pub enum SelectError {
    /// No value is a tensor.
    #[error("holds no tensors that could be shown{}{}", if .0.is_empty() { "" } else { "; it has: " }, .0)]
    NoTensors(TruncatedList),
    /// The checkpoint lacks the key of the user.
    #[error("has no `{key}` with tensors{}{}", if .found.is_empty() { ", and no other dictionary to choose" } else { "; there are: " }, .found)]
    NoSuchKey {
        key: String,
        /// The keys of dictionaries with tensors.
        found: TruncatedList,
    },
    /// The value is an object, not a dictionary.
    #[error("holds a Python object of class {class}{}, not a dictionary of tensors", if .keys.is_empty() { String::new() } else { format!(" under `{}`", .keys.join(".")) })]
    Object {
        class: String,
        /// The keys that lead to it.
        keys: Box<[String]>,
        /// A class in the pickle that only the program that saved it defines: one of that program's `__main__`.
        script_class: Option<Box<str>>,
        /// The first key of a dictionary with tensors beside it.
        other: Option<Box<str>>,
    },
    /// One rank's pieces of tensors, as FSDP and tensor parallelism save them.
    #[error(
        "one rank's part of a sharded checkpoint (FSDP or tensor parallel): `{name}` is a piece ({kind})"
    )]
    RankPieces {
        name: String,
        /// The class of the piece, or what it is instead.
        kind: &'static str,
    },
    /// DeepSpeed's model states of one rank at ZeRO stage 3, in which the parameters are empty.
    #[error(
        "has no weights: at ZeRO stage 3, DeepSpeed keeps them in the files `*_optim_states.pt` of all ranks"
    )]
    ZeroStage3,
    /// Two entries have the same name.
    #[error("two entries have the name `{name}`")]
    NameCollision {
        name: String,
        /// The first key of a dictionary that may be shown instead.
        root: Option<String>,
    },
    /// Names take more bytes than a header can hold, or than the size of the pickle allows.
    #[error(
        "its entries have too many or too long names for a header, or for its size in the file"
    )]
    TooLong,
    /// Dictionaries are nested too deep, or there are too many of them.
    #[error("its dictionaries are nested deeper or more widely than any checkpoint's")]
    TooDeep,
}

/// The kind of a tensor in which FSDP joined all parameters of a module, without their names.
pub const FLAT_PARAMETER: &str = "a flat parameter";

/// What to do about a flat parameter.
pub const FLAT_PARAMETER_REMEDY: &str =
    "in the program that wrote it, save with StateDictType.SHARDED_STATE_DICT or FULL_STATE_DICT";

impl SelectError {
    /// What the user can do.
    ///
    /// `path` is that of the file.
    pub fn remedy(&self, path: &Path) -> String {
        let folder = folder_of(path);
        let choose = |key: &str| format!("choose with --root {}", shell_text(key));
        match self {
            SelectError::ZeroStage3 => {
                format!("give the folder with the files of all ranks: {}", shell_word(folder))
            }
            SelectError::RankPieces { kind, .. } if *kind == FLAT_PARAMETER => {
                FLAT_PARAMETER_REMEDY.to_owned()
            }
            SelectError::RankPieces { .. } => {
                format!("give the folder with the files of all ranks: {}", shell_word(folder))
            }
            SelectError::NoTensors(_) => {
                format!(
                    "give the file that holds the weights; see what lies beside it: ckptfs ls {}",
                    shell_word(folder)
                )
            }
            SelectError::NoSuchKey { found, .. } => match found.first() {
                Some(key) => choose(key),
                None => "leave --root out".to_owned(),
            },
            SelectError::NameCollision { root: Some(key), .. } => choose(key),
            SelectError::NameCollision { root: None, .. } => {
                "in the program that wrote it, save it with another name for one of the two"
                    .to_owned()
            }
            SelectError::Object { keys, script_class, other, .. } => {
                let other = other.as_ref().map_or(String::new(), |key| {
                    format!("; other tensors in it: --root {}", shell_text(key))
                });
                format!("{}{other}", module_remedy(path, keys, script_class.as_deref()))
            }
            SelectError::TooDeep | SelectError::TooLong => {
                "in the program that wrote it, save the state dict alone".to_owned()
            }
        }
    }
}
