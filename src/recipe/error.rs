//! Why a recipe cannot be read, or its steps cannot be done.

use std::borrow::Cow;
use std::fmt;
use std::path::{Path, PathBuf};

use crate::checkpoint::{CastError, SliceError, StackError};
use crate::shell_word::shell_word;
use crate::source::SourceError;

/// A recipe that cannot be read.
#[allow(missing_docs)] // The messages name the fields.
#[derive(Debug, thiserror::Error)]
pub enum RecipeError {
    /// The file in the source cannot be read.
    #[error(transparent)]
    Source(#[from] SourceError),
    /// The file cannot be read.
    #[error("{path}: cannot be read: {error}")]
    Io { path: PathBuf, error: std::io::Error },
    /// A file that is longer than any recipe.
    #[error("{path}: longer than the {limit} bytes that a recipe may have")]
    TooLong { path: PathBuf, limit: u64 },
    /// The text is no recipe.
    #[error("{path}: {message}")]
    Syntax { path: PathBuf, message: String },
    /// Two files of one path.
    #[error("{path}: two files have the path {shown}")]
    SamePath { path: PathBuf, shown: String },
}

impl RecipeError {
    /// The recipe's path.
    pub fn path(&self) -> &Path {
        match self {
            RecipeError::Source(error) => error.path(),
            RecipeError::Io { path, .. }
            | RecipeError::TooLong { path, .. }
            | RecipeError::Syntax { path, .. }
            | RecipeError::SamePath { path, .. } => path,
        }
    }

    /// What the user can do about it.
    pub fn remedy(&self) -> Cow<'_, str> {
        match self {
            RecipeError::Source(error) => error.remedy(),
            RecipeError::Io { path, .. } if path == Path::new("auto") => {
                "give the path of a recipe: `auto` is for mount, ls and fetch".into()
            }
            RecipeError::Io { .. } => "give the path of a recipe that you may read".into(),
            RecipeError::TooLong { .. } => {
                "give a recipe: docs/views.md has one for each case".into()
            }
            RecipeError::Syntax { path, .. } | RecipeError::SamePath { path, .. } => {
                format!("correct it, then: ckptfs views check {}", shell_word(path)).into()
            }
        }
    }
}

/// A step of a recipe that cannot be done with a checkpoint.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("the rule {rule} {fault}")]
pub struct StepError {
    /// The rule as written in a recipe.
    pub rule: String,
    /// What is wrong.
    pub fault: StepFault,
}

/// Why a rule cannot be done.
#[allow(missing_docs)] // The messages name the fields.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum StepFault {
    /// No tensor matches.
    #[error("matches no tensor{}", .similar.as_ref().map(|name| format!("; the most similar name is `{name}`")).unwrap_or_default())]
    MatchesNothing {
        /// The name most similar to the pattern of the rule.
        similar: Option<String>,
    },
    /// Every tensor of the source is left out.
    #[error("leave no tensor")]
    NothingLeft,
    /// Two of the joined checkpoints have a tensor of one name.
    #[error("joins two tensors of the name `{name}`")]
    SameSourceName { name: String },
    /// A split of an axis without steps.
    #[error("needs steps of axis {axis} of `{tensor}`, which has none")]
    NoSteps { tensor: String, axis: i64 },
    /// Two tensors of one name.
    #[error("gives two tensors the name `{name}`")]
    SameName { name: String },
    /// A name that no tensor can have.
    #[error("gives `{tensor}` a name that no tensor can have: {reason}")]
    Name { tensor: String, reason: &'static str },
    /// The tensor lacks the axis.
    #[error("needs axis {axis} of `{tensor}`, which has {axes} axes")]
    NoAxis { tensor: String, axis: i64, axes: usize },
    /// The tensor is not cut into so many parts.
    #[error("needs part {part} of `{tensor}`, which torch.chunk cuts into {parts}")]
    NoPart { tensor: String, part: u64, parts: u64 },
    /// The places of a slice are not whole bytes, or lie outside.
    #[error("cannot slice `{tensor}`: {error}")]
    Slice { tensor: String, error: SliceError },
    /// There is no such cast.
    #[error("cannot cast `{tensor}`: {error}")]
    Cast { tensor: String, error: CastError },
    /// A number is missing among stacked tensors.
    #[error(
        "finds no tensor of number {missing} for `{stack}`: the numbers must be 0 to n without a gap"
    )]
    Gap { stack: String, missing: u64 },
    /// Two tensors of one number.
    #[error("finds two tensors of number {number} for `{stack}`: `{first}` and `{second}`")]
    SameNumber { stack: String, number: u64, first: String, second: String },
    /// Other text than a number where a number must be.
    #[error("finds no number in `{tensor}`: its first group has `{text}`")]
    NoNumber { tensor: String, text: String },
    /// Tensors cannot be stacked.
    #[error("cannot stack `{stack}`: {error}")]
    Stack { stack: String, error: StackError },
    /// More tensors than any checkpoint has.
    #[error("makes more than {limit} tensors")]
    TooManyTensors { limit: usize },
    /// Names that take more bytes than a header.
    #[error("makes names of more than {limit} bytes together")]
    NamesTooLong { limit: u64 },
}

impl StepError {
    /// The error of a rule, which is shown as written in a recipe.
    pub fn new(rule: impl fmt::Display, fault: StepFault) -> StepError {
        StepError { rule: rule.to_string(), fault }
    }

    /// What the user can do about it.
    pub fn remedy(&self) -> &'static str {
        match &self.fault {
            StepFault::MatchesNothing { .. } => {
                "correct the rule; in a recipe, `optional = true` lets it match nothing"
            }
            StepFault::NothingLeft => "let `drop` match fewer tensors, or `only` more",
            StepFault::SameSourceName { .. } => {
                "show each checkpoint in a file of its own, or leave the tensor out with `drop`"
            }
            StepFault::SameName { .. } => "drop one of them, or rename it",
            StepFault::Name { .. } => "correct the `to` of the rule",
            StepFault::NoAxis { .. }
            | StepFault::NoPart { .. }
            | StepFault::NoSteps { .. }
            | StepFault::Slice { .. } => "let the rule match fewer tensors, or give another axis",
            StepFault::Cast { .. } => {
                "let the rule match fewer tensors, or add a rule after it with this tensor's own type"
            }
            StepFault::Gap { .. } | StepFault::SameNumber { .. } | StepFault::NoNumber { .. } => {
                "correct the rule: its first group must be the number, such as layers\\.(\\d+)\\.w"
            }
            StepFault::Stack { .. } => "let the rule match tensors of one type and shape",
            StepFault::TooManyTensors { .. } | StepFault::NamesTooLong { .. } => {
                "let the rule match fewer tensors"
            }
        }
    }
}
