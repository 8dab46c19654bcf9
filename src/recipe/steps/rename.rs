//! Renames tensors by regular expressions.

use std::fmt;

use serde::{Deserialize, Serialize};

use crate::checkpoint::{MAX_HEADER_BYTES, Tensor, TensorName};
use crate::recipe::error::{StepError, StepFault};
use crate::recipe::name_glob::NameRegex;
use crate::recipe::template::Template;

use super::{check_matched, check_name, expand};

/// A rename: the template replaces the first match of the pattern in a name.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[serde(try_from = "RenameForm", into = "RenameForm")]
pub struct RenameRule {
    pattern: NameRegex,
    to: String,
    template: Template,
    optional: bool,
}

/// A rename as written in a recipe.
#[derive(Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct RenameForm {
    r#match: NameRegex,
    to: String,
    #[serde(default)]
    optional: bool,
}

impl RenameRule {
    /// A rename by a pattern and the text of a template.
    pub fn new(pattern: &str, to: &str, optional: bool) -> Result<RenameRule, String> {
        let r#match = NameRegex::try_from(pattern.to_owned())?;
        RenameRule::try_from(RenameForm { r#match, to: to.to_owned(), optional })
    }
}

impl TryFrom<RenameForm> for RenameRule {
    type Error = String;

    fn try_from(RenameForm { r#match: pattern, to, optional }: RenameForm) -> Result<Self, String> {
        let template = Template::parse(&to, &pattern.regex, false)?;
        Ok(RenameRule { pattern, to, template, optional })
    }
}

impl From<RenameRule> for RenameForm {
    fn from(RenameRule { pattern, to, optional, template: _ }: RenameRule) -> RenameForm {
        RenameForm { r#match: pattern, to, optional }
    }
}

impl fmt::Display for RenameRule {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "rename = {{ match = '{}', to = '{}' }}", self.pattern, self.to)
    }
}

/// Renames tensors. Each rule is applied once, in order, to the names that the rule before gave.
pub fn rename_tensors(rules: &[RenameRule], tensors: &mut [Tensor]) -> Result<(), StepError> {
    if rules.is_empty() {
        return Ok(());
    }
    let mut names: Vec<Option<String>> = vec![None; tensors.len()];
    for rule in rules {
        let (mut is_matched, mut total_bytes) = (false, 0);
        for (new_name, tensor) in names.iter_mut().zip(&*tensors) {
            let name = new_name.as_deref().unwrap_or(&tensor.name);
            if let Some(captures) = rule.pattern.regex.captures(name) {
                is_matched = true;
                let renamed = rename(rule, name, &captures);
                *new_name = Some(renamed.map_err(|fault| StepError::new(rule, fault))?);
            }
            total_bytes += new_name.as_ref().map_or(0, |name| name.len() as u64);
            if total_bytes > MAX_HEADER_BYTES {
                let fault = StepFault::NamesTooLong { limit: MAX_HEADER_BYTES };
                return Err(StepError::new(rule, fault));
            }
        }
        check_matched(rule, &rule.pattern, is_matched, rule.optional, tensors)?;
    }
    let renamed: Vec<(&mut Tensor, &String)> = tensors
        .iter_mut()
        .zip(&names)
        .filter_map(|(tensor, name)| Some((tensor, name.as_ref()?)))
        .collect();
    let texts: Vec<&str> = renamed.iter().map(|(_, name)| name.as_str()).collect();
    let packed = TensorName::pack(texts.iter().copied());
    renamed.into_iter().zip(packed).for_each(|((tensor, _), name)| tensor.name = name);
    Ok(())
}

fn rename(
    rule: &RenameRule,
    name: &str,
    captures: &regex::Captures<'_>,
) -> Result<String, StepFault> {
    let to = expand(&rule.template, captures, 0, name)?;
    let found = captures.get_match();
    let renamed = [&name[..found.start()], &to, &name[found.end()..]].concat();
    check_name(&renamed, name)?;
    Ok(renamed)
}
