//! The steps of a recipe for one file, from checkpoints to one checkpoint.

use std::path::Path;

use serde::{Deserialize, Serialize};

use crate::checkpoint::{Checkpoint, NameIndex, Tensor};

use super::error::{RecipeError, StepError, StepFault};
use super::name_glob::GlobRule;
use super::shape::{FileShape, check_length};
use super::steps::{
    CastRule, NameSelection, RenameRule, SliceRule, SplitRule, StackRule, cast_tensors,
    rename_tensors, slice_tensors, split_tensors, stack_tensors,
};

/// Steps with tensors, done in the order of the fields.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct Transform {
    /// Keep only what one of these matches. Empty keeps all.
    pub only: Vec<GlobRule>,
    /// Leave out what one of these matches.
    pub drop: Vec<GlobRule>,
    /// Rename by each rule once, in order.
    pub rename: Vec<RenameRule>,
    /// Keep a part of an axis.
    pub slice: Vec<SliceRule>,
    /// Make each step of an axis a tensor.
    pub split: Vec<SplitRule>,
    /// Stack tensors by number.
    pub stack: Vec<StackRule>,
    /// Cast to another type; the last match counts.
    pub cast: Vec<CastRule>,
}

impl Transform {
    /// Whether there is no step.
    pub fn is_empty(&self) -> bool {
        self.rule_count() == 0
    }

    /// The number of rules.
    pub fn rule_count(&self) -> usize {
        let Transform { only, drop, rename, slice, split, stack, cast } = self;
        let selection = only.len() + drop.len() + rename.len();
        selection + slice.len() + split.len() + stack.len() + cast.len()
    }

    /// Parses steps in JSON, which has the keys of a recipe.
    pub fn parse_json(json: &str, path: &Path) -> Result<Transform, RecipeError> {
        check_length(json.as_bytes(), path)?;
        let syntax = |message| RecipeError::Syntax { path: path.to_path_buf(), message };
        let shape: FileShape =
            serde_json::from_str(json).map_err(|error| syntax(error.to_string()))?;
        shape.check().map_err(syntax)?;
        serde_json::from_str(json).map_err(|error| syntax(error.to_string()))
    }

    /// A text that is equal for equal steps.
    pub fn canonical_text(&self) -> String {
        // Strings, numbers and lists always have a JSON form.
        serde_json::to_string(self).unwrap_or_default()
    }

    /// Does the steps with the tensors of a checkpoint, and of others that are joined with it.
    pub fn apply(
        &self,
        first: Checkpoint,
        others: Vec<Checkpoint>,
    ) -> Result<Checkpoint, StepError> {
        let mut joined = first;
        for other in others {
            joined.append(other);
            joined.open_file = None;
        }
        let had_tensors = !joined.tensors.is_empty();
        let mut selection = NameSelection::new(&self.only, &self.drop);
        let is_kept: Vec<bool> =
            joined.tensors.iter().map(|tensor| selection.keeps(&tensor.name)).collect();
        // An entry that cannot be shown is no reason to refuse what leaves it out.
        joined.refused.retain(|entry| selection.keeps(&entry.name));
        selection.finish(joined.tensors.iter().map(|tensor| &*tensor.name))?;
        let mut is_kept = is_kept.into_iter();
        joined.tensors.retain(|_| is_kept.next().unwrap_or(true));
        if had_tensors && joined.tensors.is_empty() && joined.refused.is_empty() {
            return Err(StepError::new("`only` and `drop`", StepFault::NothingLeft));
        }
        let mut tensors = joined.tensors;
        check_unique(&tensors, "`from`", |name| StepFault::SameSourceName { name })?;
        rename_tensors(&self.rename, &mut tensors)?;
        check_unique(&tensors, "`rename`", |name| StepFault::SameName { name })?;
        slice_tensors(&self.slice, &mut tensors)?;
        let tensors = split_tensors(&self.split, tensors)?;
        let tensors = stack_tensors(&self.stack, tensors)?;
        check_unique(&tensors, "`split` and `stack`", |name| StepFault::SameName { name })?;
        joined.tensors = cast_tensors(&self.cast, tensors)?;
        if !self.is_empty() {
            let earlier = joined.recipe.as_deref().unwrap_or_default();
            joined.recipe = Some(format!("{earlier}{}", self.canonical_text()).into());
        }
        Ok(joined)
    }
}

/// Fails if two tensors have one name after some steps.
fn check_unique(
    tensors: &[Tensor],
    steps: &str,
    fault: impl FnOnce(String) -> StepFault,
) -> Result<(), StepError> {
    let unique = NameIndex::build(tensors.len(), |place| &*tensors[place].name);
    let Err(second) = unique else { return Ok(()) };
    Err(StepError::new(steps, fault(tensors[second].name.to_string())))
}
