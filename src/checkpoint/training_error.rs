//! Why a training folder cannot be shown as one checkpoint.

use std::borrow::Cow;
use std::path::Path;

use crate::checkpoint::refusal::TensorError;
use crate::checkpoint::tensor::TilingError;
use crate::checkpoint::torch::{FLAT_PARAMETER_REMEDY, PickleError, TorchError};
use crate::checkpoint::truncated_list::TruncatedList;
use crate::shell_word::{shell_text, shell_word};

/// Why a training folder cannot be joined.
#[allow(missing_docs)] // The messages name the fields.
#[derive(Debug, thiserror::Error)]
pub enum TrainingError {
    /// The file that is written last is not there.
    #[error("the save did not end: {missing} is missing")]
    Unfinished { missing: &'static str },
    /// A save is writing into the folder, or was stopped while it did.
    #[error("a save into this folder has not ended: {name} is there")]
    BeingWritten { name: String },
    /// Files that cannot be of one save.
    #[error("files of two saves lie in this folder: {first} and {second} do not belong together")]
    MixedSaves { first: String, second: String },
    /// A file that DeepSpeed does not write.
    #[error("{name} is not as DeepSpeed writes it: {what}")]
    MalformedStates { name: String, what: &'static str },
    /// A way of saving that is not joined.
    #[error("saved with {what}, which is not joined")]
    Unsupported { what: String },
    /// Two tensors of one name.
    #[error("tensor `{tensor}` is there twice")]
    DuplicateTensor { tensor: String },
    /// Files of another number of ranks than the user gave.
    #[error("{} found, and {expected} were asked for", count_ranks(*.found))]
    RankCount { found: u64, expected: u64 },
    /// Files of ranks that hold plain tensors only: which are parts is not recorded.
    #[error(
        "the files of {ranks} ranks hold plain tensors: how the model is cut over them is not recorded"
    )]
    PlainTensors { ranks: u64 },
    /// All parameters of a module in one tensor, without their names.
    #[error(
        "{name}: `{tensor}` is a flat parameter (LOCAL_STATE_DICT): the names in it are not recorded"
    )]
    FlatParameter { tensor: String, name: String },
    /// A rank's file that is not a torch checkpoint.
    #[error("{name} is not readable: {error}")]
    RankFile { name: String, error: Box<TorchError> },
    /// A file whose tensors are compressed.
    #[error("{name}: its tensors are compressed")]
    Compressed { name: String },
    /// A rank's file is missing.
    #[error("the file of a rank is missing: {name}")]
    MissingFile { name: String },
    /// A rank's data is there, and its table is not.
    #[error(
        "{data} is there and {table} is not: the save has not ended, or the table of a rank is missing"
    )]
    MissingTable { data: String, table: String },
    /// A file of a rank that the run did not have.
    #[error("{name} is left over from another run: this one had {}", count_ranks(*.ranks))]
    ExcessFile { name: String, ranks: u64 },
    /// A tensor of which no file has a piece.
    #[error("tensor `{tensor}`: no file has a piece of it")]
    NoPieces { tensor: String },
    /// The files of several ranks are missing, the last ones.
    #[error("the files of ranks are missing: {first} and {more} more")]
    MissingFiles { first: String, more: u64 },
    /// A pickle breaks its format or its limits.
    #[error("{name} is not readable: {error}")]
    Pickle { name: String, error: PickleError },
    /// A table that torch does not write.
    #[error("{name} is not as torch.distributed.checkpoint writes it: {what}")]
    MalformedTable { name: String, what: &'static str },
    /// A tensor whose keys in the table do not make its name.
    #[error(
        "tensor `{tensor}`: planner_data of {name} lacks it, or has other keys than those in its name"
    )]
    WrongKeys { name: String, tensor: String },
    /// A tensor whose pieces the table does not place.
    #[error("tensor `{tensor}`: .metadata does not say where its piece at {start:?} is")]
    UnplacedPiece { tensor: String, start: Vec<u64> },
    /// A piece that reaches past the end of its file.
    #[error(
        "tensor `{tensor}`: its piece reaches past the end of {name}, which is shorter than recorded"
    )]
    ShortFile { tensor: String, name: String },
    /// A file that is shorter than recorded, although it has all that is shown.
    #[error(
        "{name} has {bytes} bytes and is shorter than recorded: its last item ends at {recorded_bytes}"
    )]
    ShortData { name: String, bytes: u64, recorded_bytes: u64 },
    /// A file without bytes that should have pieces.
    #[error("{name} is empty")]
    EmptyFile { name: String },
    /// A file name that torch does not write.
    #[error("the table names a file by `{name}`, which has a NUL or a part such as `./` in it")]
    DataFileName { name: String },
    /// Data was written after the table, and is still being written.
    #[error("a save into this folder has not ended: {name} is newer than its table")]
    SaveRunning { name: String },
    /// A piece whose bytes were transformed when it was written, such as compressed.
    #[error("tensor `{tensor}`: its pieces are stored as {transform}, which is not read")]
    Transform { tensor: String, transform: String },
    /// A piece that is not a tensor as torch saves it.
    #[error("tensor `{tensor}`: its piece in {name} is not readable: {error}")]
    Piece { tensor: String, name: String, error: Box<TorchError> },
    /// A piece that is not as recorded.
    #[error(
        "tensor `{tensor}`: its piece in {name} is not as recorded: {what}; the folder may hold files of two saves"
    )]
    PieceMismatch { tensor: String, name: String, what: &'static str },
    /// A file whose metadata has no `DCP_SHARDING_INFO`, or none that can be read.
    #[error("{name} does not say where its pieces lie: it has no valid DCP_SHARDING_INFO")]
    NoOffsets { name: String },
    /// A tensor that cannot be shown.
    #[error("tensor `{tensor}` {error}")]
    Tensor { tensor: String, error: TensorError },
    /// Pieces that do not make a tensor.
    #[error("tensor `{tensor}`: {error}")]
    Tiling { tensor: String, error: TilingError },
    /// Several dictionaries that could be the model.
    #[error("it is unclear which of its dictionaries is the model: {keys}")]
    SeveralRoots { keys: TruncatedList },
    /// No tensor under the user's key.
    #[error("no tensors under `{key}`; {}", describe_keys(.keys))]
    NoSuchKey { key: String, keys: TruncatedList },
    /// The state of an optimizer or the like, without a model.
    #[error("it holds training state ({keys}) and no model")]
    OnlyTrainingState { keys: TruncatedList },
    /// A `latest` that names a folder which is not there.
    #[error("`latest` names {tag}, which is not there")]
    MissingTag { tag: String, other: Option<String> },
    /// A folder of DeepSpeed without ZeRO, whose model is whole in one file.
    #[error("DeepSpeed saved it without ZeRO: {name} has the whole model")]
    WholeStates { name: String },
    /// The file `latest`, given as a checkpoint.
    #[error("it names the folder that DeepSpeed saved last, and holds no tensors")]
    PointerFile,
    /// The folder of the parameters of a universal checkpoint.
    #[error("it holds the parameters of a universal checkpoint, each by itself")]
    UniversalPart,
    /// A folder without tensors.
    #[error("it holds no tensors")]
    NoTensors,
}

/// A number of ranks, in words.
pub fn count_ranks(n: u64) -> String {
    if n == 1 { "1 rank".to_owned() } else { format!("{n} ranks") }
}

fn describe_keys(keys: &TruncatedList) -> String {
    match keys.is_empty() {
        true => "its tensors have no keys".to_owned(),
        false => format!("its keys: {keys}"),
    }
}

impl TrainingError {
    /// The error of a DeepSpeed folder with 32-bit weights, but without the file of their names and shapes.
    pub fn no_model_states() -> TrainingError {
        TrainingError::MissingFile { name: "mp_rank_00_model_states.pt".to_owned() }
    }

    /// What the user can do about the folder at a path.
    pub fn remedy(&self, folder: &Path) -> Cow<'static, str> {
        match self {
            TrainingError::Unfinished { .. } => {
                "give the folder of another step: this one is not complete".into()
            }
            TrainingError::BeingWritten { .. } | TrainingError::SaveRunning { .. } => {
                "wait until the save has ended; if no program is saving, give the folder of another step".into()
            }
            TrainingError::MixedSaves { first, second } => format!(
                "move the files of one of the saves out of the folder: the one of {}, or the one of {}",
                shell_word(&folder.join(first)),
                shell_word(&folder.join(second))
            )
            .into(),
            TrainingError::MissingFiles { first, .. } => {
                format!("fetch {}, and the others", shell_word(&folder.join(first))).into()
            }
            TrainingError::MissingFile { name } => {
                format!("fetch {}", shell_word(&folder.join(name))).into()
            }
            TrainingError::MissingTable { table, .. } => format!(
                "if a program is saving, wait until the save has ended; otherwise fetch {}",
                shell_word(&folder.join(table))
            )
            .into(),
            TrainingError::ExcessFile { name, .. } => {
                format!("move {} out of the folder", shell_word(&folder.join(name))).into()
            }
            TrainingError::ShortFile { name, .. }
            | TrainingError::ShortData { name, .. }
            | TrainingError::EmptyFile { name } => {
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
            TrainingError::MissingTag { tag, other } => {
                let fetch = format!("fetch {}", shell_word(&folder.join(tag)));
                match other {
                    Some(other) => {
                        format!("{fetch}, or give another step: {}", shell_word(&folder.join(other)))
                    }
                    None => fetch,
                }
                .into()
            }
            TrainingError::WholeStates { name } => {
                format!("give that file: {}", shell_word(&folder.join(name))).into()
            }
            TrainingError::PointerFile | TrainingError::UniversalPart => {
                let parent = folder.parent().filter(|parent| !parent.as_os_str().is_empty());
                format!("give the folder that it lies in: {}", shell_word(parent.unwrap_or(Path::new(".")))).into()
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
            TrainingError::PlainTensors { .. } => {
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
            | TrainingError::MalformedTable { .. }
            | TrainingError::MalformedStates { .. }
            | TrainingError::NoOffsets { .. }
            | TrainingError::DuplicateTensor { .. }
            | TrainingError::WrongKeys { .. }
            | TrainingError::DataFileName { .. }
            | TrainingError::UnplacedPiece { .. }
            | TrainingError::NoPieces { .. }
            | TrainingError::Piece { .. }
            | TrainingError::PieceMismatch { .. }
            | TrainingError::Tiling { .. } => {
                "fetch the folder again, whole: it is damaged, or files of two saves lie in it".into()
            }
        }
    }
}
