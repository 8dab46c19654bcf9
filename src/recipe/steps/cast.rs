//! Casts tensors.

use std::fmt;

use serde::{Deserialize, Serialize};

use crate::checkpoint::{Dtype, Tensor};
use crate::recipe::error::{StepError, StepFault};
use crate::recipe::name_glob::NameGlob;

use super::check_matched;

/// A cast of some tensors.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[serde(try_from = "CastForm", into = "CastForm")]
pub struct CastRule {
    tensors: NameGlob,
    to: Dtype,
    optional: bool,
}

/// A cast as written in a recipe.
#[derive(Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct CastForm {
    tensors: NameGlob,
    to: String,
    #[serde(default)]
    optional: bool,
}

impl CastRule {
    /// A cast of the tensors that a glob matches. The type is named as in torch or in safetensors.
    pub fn new(glob: &str, to: &str, optional: bool) -> Result<CastRule, String> {
        let tensors = NameGlob::try_from(glob.to_owned())?;
        CastRule::try_from(CastForm { tensors, to: to.to_owned(), optional })
    }
}

impl TryFrom<CastForm> for CastRule {
    type Error = String;

    fn try_from(CastForm { tensors, to, optional }: CastForm) -> Result<CastRule, String> {
        let dtype = Dtype::from_torch_name(&to).or_else(|| Dtype::from_name(&to));
        let to =
            dtype.ok_or_else(|| format!("`{to}` is no type; name it as torch does: bfloat16"))?;
        Ok(CastRule { tensors, to, optional })
    }
}

impl From<CastRule> for CastForm {
    fn from(CastRule { tensors, to, optional }: CastRule) -> CastForm {
        CastForm { tensors, to: to.name().to_owned(), optional }
    }
}

impl fmt::Display for CastRule {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let to = self.to.torch_name().unwrap_or(self.to.name());
        write!(f, "cast = {{ tensors = \"{}\", to = \"{to}\" }}", self.tensors)
    }
}

/// Casts tensors. Of several rules that match a tensor, the last counts.
pub fn cast_tensors(
    rules: &[CastRule],
    mut tensors: Vec<Tensor>,
) -> Result<Vec<Tensor>, StepError> {
    let mut is_matched = vec![false; rules.len()];
    for tensor in &mut tensors {
        let mut last = None;
        for (rule, is_matched) in rules.iter().zip(&mut is_matched) {
            if rule.tensors.matches(&tensor.name) {
                *is_matched = true;
                last = Some(rule);
            }
        }
        if let Some(rule) = last {
            let cast = tensor.clone().cast(rule.to).map_err(|error| {
                StepError::new(rule, StepFault::Cast { tensor: tensor.name.to_string(), error })
            })?;
            *tensor = cast;
        }
    }
    for (rule, is_matched) in rules.iter().zip(is_matched) {
        check_matched(rule, &rule.tensors, is_matched, rule.optional, &tensors)?;
    }
    Ok(tensors)
}
