//! Stacks tensors by the numbers in their names.

use std::collections::BTreeMap;
use std::fmt;

use serde::{Deserialize, Serialize};

use crate::checkpoint::Tensor;
use crate::recipe::error::{StepError, StepFault};
use crate::recipe::name_glob::NameRegex;
use crate::recipe::template::Template;

use super::{check_matched, check_name, expand};

/// A stack: tensors of names that differ by a number become one, with a new first axis.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[serde(try_from = "StackForm", into = "StackForm")]
pub struct StackRule {
    form: StackForm,
    /// Matches whole names. Its first group is the number.
    pattern: NameRegex,
    template: Template,
}

/// A stack as written in a recipe.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct StackForm {
    tensors: NameRegex,
    to: String,
    #[serde(default)]
    optional: bool,
}

impl TryFrom<StackForm> for StackRule {
    type Error = String;

    fn try_from(form: StackForm) -> Result<StackRule, String> {
        let pattern = form.tensors.whole()?;
        if pattern.regex.captures_len() < 2 {
            return Err(format!("`{}` has no group for the number: write (\\d+)", form.tensors));
        }
        let template = Template::parse(&form.to, &pattern.regex, false)?;
        Ok(StackRule { form, pattern, template })
    }
}

impl From<StackRule> for StackForm {
    fn from(rule: StackRule) -> StackForm {
        rule.form
    }
}

impl fmt::Display for StackRule {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "stack = {{ tensors = '{}', to = \"{}\" }}", self.form.tensors, self.form.to)
    }
}

/// Stacks tensors. A stack takes the place of its first tensor.
pub fn stack_tensors(
    rules: &[StackRule],
    mut tensors: Vec<Tensor>,
) -> Result<Vec<Tensor>, StepError> {
    for rule in rules {
        let fail = |fault| StepError::new(rule, fault);
        let mut stacks: BTreeMap<String, BTreeMap<u64, usize>> = BTreeMap::new();
        for (place, tensor) in tensors.iter().enumerate() {
            let Some(captures) = rule.pattern.regex.captures(&tensor.name) else { continue };
            let name = || tensor.name.to_string();
            let text = captures.get(1).map_or("", |found| found.as_str());
            let number: u64 = text
                .parse()
                .map_err(|_| fail(StepFault::NoNumber { tensor: name(), text: text.to_owned() }))?;
            let stack = expand(&rule.template, &captures, 0, &tensor.name).map_err(fail)?;
            check_name(&stack, &tensor.name).map_err(fail)?;
            let members = stacks.entry(stack.clone()).or_default();
            if let Some(first) = members.insert(number, place) {
                let (first, second) = (tensors[first].name.to_string(), name());
                return Err(fail(StepFault::SameNumber { stack, number, first, second }));
            }
        }
        check_matched(rule, &rule.pattern, !stacks.is_empty(), rule.form.optional, &tensors)?;
        let mut places: Vec<Option<Tensor>> = tensors.into_iter().map(Some).collect();
        for (stack, members) in stacks {
            if let Some((missing, _)) =
                (0..).zip(members.keys()).find(|(expected, number)| expected != *number)
            {
                return Err(fail(StepFault::Gap { stack, missing }));
            }
            let first = members.values().copied().min().unwrap_or_default();
            let parts = members.values().filter_map(|&place| places[place].take()).collect();
            let stacked = Tensor::stack(stack.as_str().into(), parts)
                .map_err(|error| fail(StepFault::Stack { stack, error }))?;
            places[first] = Some(stacked);
        }
        tensors = places.into_iter().flatten().collect();
    }
    Ok(tensors)
}
