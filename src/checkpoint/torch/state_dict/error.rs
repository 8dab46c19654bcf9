//! Why no dictionary of a checkpoint can be shown.

use crate::checkpoint::truncated_list::TruncatedList;

/// Why there is no dictionary to show.
#[allow(missing_docs)] // The messages name the fields.
#[derive(Debug, thiserror::Error)]
pub enum SelectError {
    /// No value is a tensor.
    #[error("holds no tensors that could be shown{}{}", if .0.is_empty() { "" } else { "; it has: " }, .0)]
    NoTensors(TruncatedList),
    /// The checkpoint lacks the key of the user.
    #[error("has no `{key}` with tensors; there are: {}", if .found.is_empty() { "none".to_owned() } else { .found.to_string() })]
    NoSuchKey {
        key: String,
        /// The keys of dictionaries with tensors.
        found: TruncatedList,
    },
    /// The value is an object, not a dictionary.
    #[error("holds a Python object of class {class}, not a dictionary of tensors")]
    Object { class: String },
    /// DeepSpeed's model states of one rank at ZeRO stage 3, in which the parameters are empty.
    #[error(
        "has no weights: at ZeRO stage 3, DeepSpeed keeps them in the files `*_optim_states.pt` of all ranks"
    )]
    ZeroStage3,
    /// Two entries have the same name.
    #[error("two entries have the name `{name}`")]
    NameCollision { name: String },
    /// Names take more bytes than a header can hold, or than the size of the pickle allows.
    #[error(
        "its entries have too many or too long names for a header, or for its size in the file"
    )]
    TooLong,
    /// Dictionaries are nested too deep, or there are too many of them.
    #[error("its dictionaries are nested deeper or more widely than any checkpoint's")]
    TooDeep,
}

impl SelectError {
    /// What the user can do.
    pub fn remedy(&self) -> &'static str {
        match self {
            SelectError::ZeroStage3 => {
                "join the ranks with `python zero_to_fp32.py . OUT` in the folder of the run, and give OUT"
            }
            SelectError::NoTensors(_) => "give the file that holds the weights",
            SelectError::NoSuchKey { .. } | SelectError::NameCollision { .. } => {
                "choose another dictionary with --root KEY"
            }
            SelectError::Object { .. } => {
                "in the program that wrote the file, save model.state_dict() instead of the model: reading an object means running its code"
            }
            SelectError::TooDeep | SelectError::TooLong => "save the state dict alone",
        }
    }
}
