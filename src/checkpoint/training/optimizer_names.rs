//! Finds the state of optimizers among flat names: `state` and `param_groups` beside one another.

use std::collections::HashSet;

/// The name of an optimizer's options.
const OPTIONS: &str = "param_groups";

/// The name of the tensors of an optimizer.
const TENSORS: &str = "state";

/// What the names of each optimizer's state begin with.
#[derive(Debug)]
pub struct OptimizerNames<'a> {
    prefixes: HashSet<&'a str>,
}

impl<'a> OptimizerNames<'a> {
    /// Finds the optimizers among all names: options are in most saves no tensors.
    pub fn find(names: impl Iterator<Item = &'a str>) -> OptimizerNames<'a> {
        let options =
            names.filter_map(|name| parts(name).find(|(_, part)| *part == OPTIONS).zip(Some(name)));
        OptimizerNames { prefixes: options.map(|((start, _), name)| &name[..start]).collect() }
    }

    /// Whether a name is that of an optimizer's state.
    pub fn contain(&self, name: &str) -> bool {
        let is_state = |part: &str| matches!(part, TENSORS | OPTIONS);
        !self.prefixes.is_empty()
            && parts(name)
                .any(|(start, part)| is_state(part) && self.prefixes.contains(&name[..start]))
    }
}

/// The parts of a name between its dots, each with its first byte.
fn parts(name: &str) -> impl Iterator<Item = (usize, &str)> {
    let start = |part: &str| part.as_ptr() as usize - name.as_ptr() as usize;
    name.split('.').map(move |part| (start(part), part))
}
