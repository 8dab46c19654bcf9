//! Slices tensors along an axis.

use std::fmt;

use serde::{Deserialize, Serialize};

use crate::checkpoint::{AxisSlice, Tensor};
use crate::recipe::error::{StepError, StepFault};
use crate::recipe::name_glob::NameGlob;

use super::{check_matched, resolve_axis};

/// A part of an axis of some tensors.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[serde(try_from = "SliceForm", into = "SliceForm")]
pub struct SliceRule {
    tensors: NameGlob,
    dim: i64,
    part: AxisPart,
    optional: bool,
}

/// A part of an axis.
#[derive(Clone, Copy, Debug)]
enum AxisPart {
    /// A chunk of `torch.chunk`, counted from 1.
    Chunk { number: u64, parts: u64 },
    /// The steps from the first number to before the second.
    Range([u64; 2]),
}

/// A slice as written in a recipe.
#[derive(Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct SliceForm {
    tensors: NameGlob,
    dim: i64,
    #[serde(skip_serializing_if = "Option::is_none")]
    part: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    range: Option<[u64; 2]>,
    #[serde(default)]
    optional: bool,
}

impl TryFrom<SliceForm> for SliceRule {
    type Error = String;

    fn try_from(
        SliceForm { tensors, dim, part, range, optional }: SliceForm,
    ) -> Result<Self, String> {
        let part = match (part, range) {
            (Some(part), None) => parse_part(&part)
                .ok_or_else(|| format!("`{part}` is no part: write k/n with k from 1 to n"))?,
            (None, Some([start, end])) if start <= end => AxisPart::Range([start, end]),
            (None, Some([start, end])) => {
                return Err(format!("the range [{start}, {end}] ends before it starts"));
            }
            _ => {
                return Err(
                    "a slice needs either part = \"k/n\" or range = [start, end]".to_owned()
                );
            }
        };
        Ok(SliceRule { tensors, dim, part, optional })
    }
}

impl From<SliceRule> for SliceForm {
    fn from(SliceRule { tensors, dim, part, optional }: SliceRule) -> SliceForm {
        let (part, range) = match part {
            AxisPart::Chunk { number, parts } => (Some(format!("{number}/{parts}")), None),
            AxisPart::Range(range) => (None, Some(range)),
        };
        SliceForm { tensors, dim, part, range, optional }
    }
}

impl fmt::Display for SliceRule {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let SliceRule { tensors, dim, part, .. } = self;
        write!(f, "slice = {{ tensors = \"{tensors}\", dim = {dim}, ")?;
        match part {
            AxisPart::Chunk { number, parts } => write!(f, "part = \"{number}/{parts}\" }}"),
            AxisPart::Range([start, end]) => write!(f, "range = [{start}, {end}] }}"),
        }
    }
}

fn parse_part(text: &str) -> Option<AxisPart> {
    let (number, parts) = text.split_once('/')?;
    // `str::parse` also takes a sign.
    let parse = |text: &str| {
        let is_number = text.bytes().all(|byte| byte.is_ascii_digit());
        text.parse::<u64>().ok().filter(|_| is_number)
    };
    let (number, parts) = (parse(number)?, parse(parts)?);
    (1..=parts).contains(&number).then_some(AxisPart::Chunk { number, parts })
}

/// Slices tensors. A tensor that several rules match is sliced by each in turn.
pub fn slice_tensors(rules: &[SliceRule], tensors: &mut [Tensor]) -> Result<(), StepError> {
    for rule in rules {
        let mut is_matched = false;
        for tensor in tensors.iter_mut().filter(|tensor| rule.tensors.matches(&tensor.name)) {
            is_matched = true;
            *tensor = slice_tensor(rule, tensor).map_err(|fault| StepError::new(rule, fault))?;
        }
        check_matched(rule, &rule.tensors, is_matched, rule.optional, tensors)?;
    }
    Ok(())
}

fn slice_tensor(rule: &SliceRule, tensor: &Tensor) -> Result<Tensor, StepFault> {
    let name = || tensor.name.to_string();
    let axis = resolve_axis(rule.dim, tensor)?;
    let size = tensor.torch_shape()[axis];
    let range = match rule.part {
        AxisPart::Range([start, end]) => start..end,
        AxisPart::Chunk { number, parts } => {
            let chunk = size.div_ceil(parts).max(1);
            let cut = size.div_ceil(chunk).max(1);
            if number > cut && size > 0 {
                return Err(StepFault::NoPart { tensor: name(), part: number, parts: cut });
            }
            let start = ((number - 1).saturating_mul(chunk)).min(size);
            start..start.saturating_add(chunk).min(size)
        }
    };
    // A header counts the values, torch the elements, of which one can hold several.
    let is_last = axis + 1 == tensor.shape.len();
    let packing = if is_last { tensor.dtype.torch_packing() } else { 1 };
    let range = range.start.saturating_mul(packing)..range.end.saturating_mul(packing);
    let whole = tensor.shape.iter().map(|&size| AxisSlice::range(0..size));
    let mut slices: Vec<AxisSlice> = whole.collect();
    slices[axis] = AxisSlice::range(range);
    tensor.slice(&slices).map_err(|error| StepFault::Slice { tensor: name(), error })
}
