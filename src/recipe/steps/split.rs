//! Splits tensors into the steps of an axis.

use std::fmt;

use serde::{Deserialize, Serialize};

use crate::checkpoint::{MAX_HEADER_BYTES, MAX_TENSOR_COUNT, Tensor};
use crate::recipe::error::{StepError, StepFault};
use crate::recipe::name_glob::{NameGlob, NameRegex};
use crate::recipe::template::Template;

use super::{check_matched, check_name, expand, resolve_axis};

/// A split: each step of an axis becomes a tensor of its own, numbered from 0.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[serde(try_from = "SplitForm", into = "SplitForm")]
pub struct SplitRule {
    form: SplitForm,
    /// Matches whole names.
    pattern: NameRegex,
    template: Template,
}

/// A split as written in a recipe.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct SplitForm {
    #[serde(skip_serializing_if = "Option::is_none")]
    tensors: Option<NameGlob>,
    #[serde(skip_serializing_if = "Option::is_none")]
    r#match: Option<NameRegex>,
    dim: i64,
    to: String,
    #[serde(default)]
    optional: bool,
}

impl TryFrom<SplitForm> for SplitRule {
    type Error = String;

    fn try_from(form: SplitForm) -> Result<SplitRule, String> {
        let pattern = match (&form.tensors, &form.r#match) {
            (Some(glob), None) => glob.to_regex(),
            (None, Some(pattern)) => pattern.whole()?,
            _ => {
                return Err(
                    "a split needs either `tensors`, a glob, or `match`, a regular expression"
                        .to_owned(),
                );
            }
        };
        let template = Template::parse(&form.to, &pattern.regex, true)?;
        if !template.has_number() {
            return Err(format!("`{}` has no place for the number: write {{}}", form.to));
        }
        Ok(SplitRule { form, pattern, template })
    }
}

impl From<SplitRule> for SplitForm {
    fn from(rule: SplitRule) -> SplitForm {
        rule.form
    }
}

impl fmt::Display for SplitRule {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let SplitForm { tensors, r#match, dim, to, .. } = &self.form;
        match (tensors, r#match) {
            (Some(glob), _) => write!(f, "split = {{ tensors = \"{glob}\", ")?,
            (_, Some(pattern)) => write!(f, "split = {{ match = '{pattern}', ")?,
            _ => {}
        }
        write!(f, "dim = {dim}, to = \"{to}\" }}")
    }
}

/// Splits tensors. Their parts take their place, in order.
pub fn split_tensors(
    rules: &[SplitRule],
    mut tensors: Vec<Tensor>,
) -> Result<Vec<Tensor>, StepError> {
    for rule in rules {
        let fail = |fault| StepError::new(rule, fault);
        let (mut is_matched, mut name_bytes, mut split) =
            (false, 0, Vec::with_capacity(tensors.len()));
        for tensor in &tensors {
            let Some(captures) = rule.pattern.regex.captures(&tensor.name) else {
                split.push(tensor.clone());
                continue;
            };
            is_matched = true;
            let axis = resolve_axis(rule.form.dim, tensor).map_err(fail)?;
            let count = tensor.shape[axis];
            if count == 0 {
                let (tensor, axis) = (tensor.name.to_string(), rule.form.dim);
                return Err(fail(StepFault::NoSteps { tensor, axis }));
            }
            if count > (MAX_TENSOR_COUNT - split.len().min(MAX_TENSOR_COUNT)) as u64 {
                return Err(fail(StepFault::TooManyTensors { limit: MAX_TENSOR_COUNT }));
            }
            for number in 0..count {
                let name = expand(&rule.template, &captures, number, &tensor.name).map_err(fail)?;
                check_name(&name, &tensor.name).map_err(fail)?;
                name_bytes += name.len() as u64;
                if name_bytes > MAX_HEADER_BYTES {
                    return Err(fail(StepFault::NamesTooLong { limit: MAX_HEADER_BYTES }));
                }
                let part = tensor.select(axis, number).map_err(|error| {
                    fail(StepFault::Slice { tensor: tensor.name.to_string(), error })
                })?;
                split.push(Tensor { name: name.as_str().into(), ..part });
            }
        }
        check_matched(rule, &rule.pattern, is_matched, rule.form.optional, &tensors)?;
        tensors = split;
    }
    Ok(tensors)
}
