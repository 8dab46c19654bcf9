//! The steps of a recipe, each a function from tensors to tensors.

mod cast;
mod rename;
mod select;
mod similar_name;
mod slice;
mod split;
mod stack;

use std::fmt;

use regex::Captures;

use crate::checkpoint::{RESERVED_NAME, Tensor};

use super::error::{StepError, StepFault};
use super::template::Template;

pub use cast::{CastRule, cast_tensors};
pub use rename::{RenameRule, rename_tensors};
pub use select::NameSelection;
use similar_name::find_similar;
pub use slice::{SliceRule, slice_tensors};
pub use split::{SplitRule, split_tensors};
pub use stack::{StackRule, stack_tensors};

/// Fails if a rule that must match something matched nothing.
fn check_matched(
    rule: impl fmt::Display,
    pattern: impl fmt::Display,
    is_matched: bool,
    optional: bool,
    tensors: &[Tensor],
) -> Result<(), StepError> {
    if is_matched || optional {
        return Ok(());
    }
    let similar = find_similar(&pattern.to_string(), tensors.iter().map(|tensor| &*tensor.name));
    Err(StepError::new(rule, StepFault::MatchesNothing { similar }))
}

/// The text of a template for a match in the name of a tensor.
fn expand(
    template: &Template,
    captures: &Captures<'_>,
    number: u64,
    tensor: &str,
) -> Result<String, StepFault> {
    template.expand(captures, number).ok_or_else(|| StepFault::Name {
        tensor: tensor.to_owned(),
        reason: "it would be too long",
    })
}

/// Fails if no tensor can have a name that a rule gives to one.
fn check_name(name: &str, tensor: &str) -> Result<(), StepFault> {
    let reason = match name {
        "" => "it would be empty",
        RESERVED_NAME => "`__metadata__` is reserved for metadata",
        // A name of the source may have control characters, and keeps them.
        _ if name.contains(char::is_control) && !tensor.contains(char::is_control) => {
            "it would have a control character"
        }
        _ => return Ok(()),
    };
    Err(StepFault::Name { tensor: tensor.to_owned(), reason })
}

/// The number of an axis that may be counted from the end, as in torch.
fn resolve_axis(dim: i64, tensor: &Tensor) -> Result<usize, StepFault> {
    let axes = tensor.shape.len();
    let axis = if dim < 0 { dim.checked_add(axes as i64) } else { Some(dim) };
    let axis = axis.and_then(|axis| usize::try_from(axis).ok()).filter(|&axis| axis < axes);
    axis.ok_or_else(|| StepFault::NoAxis { tensor: tensor.name.to_string(), axis: dim, axes })
}
