//! Why a folder of training cannot be shown as one checkpoint.

use std::borrow::Cow;
use std::path::Path;

use crate::checkpoint::refusal::TensorError;
use crate::checkpoint::tensor::TilingError;
use crate::checkpoint::torch::{FLAT_PARAMETER_REMEDY, PickleError, TorchError};
use crate::checkpoint::truncated_list::TruncatedList;
use crate::shell_word::{shell_text, shell_word};

/// What is wrong with a folder of training.
#[allow(missing_docs)] // The messages name the fields.
#[derive(Debug, thiserror::Error)]
pub enum TrainingError {
    /// The file that is written last is not there.
    #[error("the save did not end: {missing} is missing")]
    Unfinished { missing: &'static str },
    /// A save is writing into the folder, or was stopped while it did.
    #[error("a save into this folder has not ended: {name} is there")]
    BeingWritten { name: String },
    /// Tables of two ways to save.
    #[error("files of two saves lie in this folder: {first} and {second} do not belong together")]
    MixedSaves { first: String, second: String },
    /// A file that DeepSpeed does not write.
    #[error("{name} is not as DeepSpeed writes it: {what}")]
    States { name: String, what: &'static str },
    /// A way of saving that is not joined.
    #[error("saved with {what}, which is not joined")]
    Unsupported { what: String },
    /// Two tensors of one name.
    #[error("tensor `{tensor}` is there twice")]
    DuplicateTensor { tensor: String },
    /// Files of another number of ranks than the user gave.
    #[error("{} found, and {expected} were asked for", count_ranks(*.found))]
    RankCount { found: u64, expected: u64 },
    /// Files of ranks that hold whole tensors only.
    #[error(
        "the files of {ranks} ranks hold plain tensors: how the model is cut over them is not recorded"
    )]
    UncutRanks { ranks: u64 },
    /// The parameters of a module in one, without their names.
    #[error(
        "{name}: `{tensor}` is a flat parameter (LOCAL_STATE_DICT): the names in it are not recorded"
    )]
    FlatParameter { tensor: String, name: String },
    /// A file of a rank that is no checkpoint of torch.
    #[error("{name} is not readable: {error}")]
    RankFile { name: String, error: Box<TorchError> },
    /// A file whose tensors are compressed.
    #[error("{name}: its tensors are compressed")]
    Compressed { name: String },
    /// A file of a rank that must be there.
    #[error("the file of a rank is missing: {name}")]
    MissingFile { name: String },
    /// A pickle breaks its format or its limits.
    #[error("{name} is not readable: {error}")]
    Pickle { name: String, error: PickleError },
    /// A table that torch does not write.
    #[error("{name} is not a table as torch.distributed.checkpoint writes it: {what}")]
    Table { name: String, what: &'static str },
    /// A tensor whose pieces the table does not place.
    #[error("tensor `{tensor}`: the table does not say where its piece at {start:?} lies")]
    UnplacedPiece { tensor: String, start: Vec<u64> },
    /// A piece that ends after its file.
    #[error("tensor `{tensor}`: {name} ends before its piece: it is shorter than was recorded")]
    ShortFile { tensor: String, name: String },
    /// A piece that was changed as it was written.
    #[error("tensor `{tensor}`: its pieces are stored as {transform}, which is not read")]
    Transform { tensor: String, transform: String },
    /// A piece that is no tensor file of torch.
    #[error("tensor `{tensor}`: its piece in {name} is not readable: {error}")]
    Piece { tensor: String, name: String, error: Box<TorchError> },
    /// A piece that is not what the table says.
    #[error(
        "tensor `{tensor}`: its piece in {name} is not what was recorded: {what}; the folder may hold files of two saves"
    )]
    OtherPiece { tensor: String, name: String, what: &'static str },
    /// An entry that cannot be shown.
    #[error("tensor `{tensor}` {error}")]
    Tensor { tensor: String, error: TensorError },
    /// Pieces that do not make a tensor.
    #[error("tensor `{tensor}`: {error}")]
    Tiling { tensor: String, error: TilingError },
    /// No dictionary plainly is the model.
    #[error("it is not plain which of its dictionaries is the model: {keys}")]
    SeveralRoots { keys: TruncatedList },
    /// No tensor under the key of the user.
    #[error("no tensors under `{key}`; there are: {keys}")]
    NoSuchKey { key: String, keys: TruncatedList },
    /// The state of an optimizer or the like, without a model.
    #[error("it holds the state of training ({keys}), and no model")]
    OnlyTrainingState { keys: TruncatedList },
    /// The folder of the config, whose weights are the files of ranks in the folder above.
    #[error("the weights of this config are in the folder above, in the files of its ranks")]
    WeightsAbove,
    /// Nothing at all.
    #[error("it holds no tensors")]
    NoTensors,
}

/// A number of ranks, in words.
pub fn count_ranks(n: u64) -> String {
    if n == 1 { "1 rank".to_owned() } else { format!("{n} ranks") }
}

impl TrainingError {
    /// The error of a folder with 32-bit weights by DeepSpeed, and without their names and shapes.
    pub fn no_model_states() -> TrainingError {
        TrainingError::MissingFile { name: "mp_rank_00_model_states.pt".to_owned() }
    }

    /// What the user can do about the folder at a path.
    pub fn remedy(&self, folder: &Path) -> Cow<'static, str> {
        match self {
            TrainingError::Unfinished { .. } => {
                "give the folder of another step: this one was not saved to its end".into()
            }
            TrainingError::BeingWritten { .. } => {
                "wait until the save has ended; if no program is saving, give the folder of another step".into()
            }
            TrainingError::MixedSaves { first, second } => format!(
                "move the files of the other save out of the folder, with {} or {}",
                shell_word(&folder.join(first)),
                shell_word(&folder.join(second))
            )
            .into(),
            TrainingError::MissingFile { name } => {
                format!("fetch {}", shell_word(&folder.join(name))).into()
            }
            TrainingError::ShortFile { name, .. } => {
                format!("fetch {} again", shell_word(&folder.join(name))).into()
            }
            TrainingError::Transform { .. } => {
                "save it again without extensions: they change the bytes of its tensors".into()
            }
            TrainingError::Tensor { error, .. } => error.remedy(false),
            TrainingError::SeveralRoots { keys } => match keys.first() {
                Some(key) => format!("name one of them, such as --root {}", shell_text(key)).into(),
                None => "name one with --root".into(),
            },
            TrainingError::NoSuchKey { keys, .. } => match keys.first() {
                Some(key) => format!("give one that is there, such as --root {}", shell_text(key)).into(),
                None => "leave --root out".into(),
            },
            TrainingError::OnlyTrainingState { keys } => match keys.first() {
                Some(key) => format!(
                    "give the folder of the model; to see this state: --root {}",
                    shell_text(key)
                )
                .into(),
                None => "give the folder of the model".into(),
            },
            TrainingError::WeightsAbove => {
                let above = folder.parent().filter(|above| !above.as_os_str().is_empty());
                format!("give that folder: {}", shell_word(above.unwrap_or(Path::new("..")))).into()
            }
            TrainingError::NoTensors => "give the folder of the model".into(),
            TrainingError::RankCount { found, expected } => {
                if found < expected {
                    "fetch the files of the other ranks".into()
                } else {
                    "move the files of another save out of the folder, or give the right --ranks".into()
                }
            }
            TrainingError::Unsupported { .. } => {
                "join it with the library that wrote it, and give the result".into()
            }
            TrainingError::UncutRanks { .. } => {
                "give one file of a rank by its path; or save the whole model, in the program that wrote it: get_model_state_dict with full_state_dict=True".into()
            }
            TrainingError::FlatParameter { .. } => {
                FLAT_PARAMETER_REMEDY.into()
            }
            TrainingError::Compressed { .. } => {
                "save it again with torch.save, which does not compress".into()
            }
            TrainingError::RankFile { name, .. } => {
                format!("see what it is: ckptfs inspect {}", shell_word(&folder.join(name))).into()
            }
            TrainingError::Pickle { .. }
            | TrainingError::Table { .. }
            | TrainingError::States { .. }
            | TrainingError::DuplicateTensor { .. }
            | TrainingError::UnplacedPiece { .. }
            | TrainingError::Piece { .. }
            | TrainingError::OtherPiece { .. }
            | TrainingError::Tiling { .. } => {
                "fetch the folder again, whole: it is damaged, or files of two saves lie in it".into()
            }
        }
    }
}
