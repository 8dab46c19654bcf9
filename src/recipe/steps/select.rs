//! Selects tensors by the names of the source.

use crate::recipe::error::{StepError, StepFault};
use crate::recipe::name_glob::GlobRule;

use super::similar_name::find_similar;

/// Which names `only` and `drop` keep.
pub struct NameSelection<'a> {
    only: &'a [GlobRule],
    drop: &'a [GlobRule],
    /// Whether each rule matched a name, those of `only` first.
    is_matched: Vec<bool>,
}

impl<'a> NameSelection<'a> {
    pub fn new(only: &'a [GlobRule], drop: &'a [GlobRule]) -> NameSelection<'a> {
        NameSelection { only, drop, is_matched: vec![false; only.len() + drop.len()] }
    }

    /// Whether a name is kept.
    pub fn keeps(&mut self, name: &str) -> bool {
        let mut matches = [self.only.is_empty(), false];
        let rules =
            self.only.iter().map(|rule| (0, rule)).chain(self.drop.iter().map(|rule| (1, rule)));
        for ((list, rule), is_matched) in rules.zip(&mut self.is_matched) {
            // Every rule is tried on every name, as each must match one.
            if rule.tensors.matches(name) {
                *is_matched = true;
                matches[list] = true;
            }
        }
        matches == [true, false]
    }

    /// Fails if a rule matched no name. `names` are all that were tried.
    pub fn finish<'n>(self, names: impl Iterator<Item = &'n str>) -> Result<(), StepError> {
        let NameSelection { only, drop, is_matched } = self;
        let rules =
            only.iter().map(|rule| ("only", rule)).chain(drop.iter().map(|rule| ("drop", rule)));
        let mut unmatched =
            rules.zip(is_matched).filter(|((_, rule), is_matched)| !is_matched && !rule.optional);
        let Some(((list, rule), _)) = unmatched.next() else { return Ok(()) };
        let shown = format!("{list} = [\"{}\"]", rule.tensors);
        let similar = find_similar(&rule.tensors.to_string(), names);
        Err(StepError::new(shown, StepFault::MatchesNothing { similar }))
    }
}
