//! Selects the model among the names of a training run's state.
//!
//! A save flattens the state of a run into one list of names, and records the keys that led to each. The first rule that
//! fits decides:
//!
//! 1. the key of the user;
//! 2. the dictionary `model` or `state_dict`;
//! 3. the only dictionary, in which the rules are applied again;
//! 4. all that is not training state.
//!
//! If several dictionaries remain, the user has to choose.

use std::collections::BTreeMap;

use crate::checkpoint::torch::is_training_key;
use crate::checkpoint::truncated_list::TruncatedList;

use crate::checkpoint::training_error::TrainingError;

/// Keys of the model in the state of a run, in order of preference.
const MODEL_KEYS: [&str; 2] = ["model", "state_dict"];

/// Keys of training state that [`is_training_key`] does not find by their words.
const TRAINING_KEYS: [&str; 7] = [
    "dataloader",
    "train_state",
    "trainer",
    "rng_state",
    "rerun_state_machine_state",
    "loops",
    "callbacks",
];

/// The prefix of names in one of Megatron's several optimizers.
const CHAINED_OPTIMIZER_PREFIX: &str = "chained_";

/// Maximum depth of dictionaries with a single entry.
const MAX_DEPTH: usize = 64;

/// A name, and the keys that led to it. Without keys, the name is all that is known.
#[derive(Clone, Copy, Debug)]
pub struct FlatName<'a> {
    pub name: &'a str,
    pub keys: &'a [&'a str],
}

/// The names that are shown.
#[derive(Debug, Default)]
pub struct SelectedNames {
    /// Indexes of the names, each with the number of bytes to leave out at its beginning.
    pub names: Vec<(usize, usize)>,
    /// The prefix of all names in the selected dictionary; empty if it is the whole.
    pub prefix: String,
    /// Choices that leave no doubt, in words: only training state is left out.
    pub obvious_choices: Vec<String>,
    /// What else was selected and what was left out, in words.
    pub notes: Vec<String>,
}

/// Selects the names of the model among those of all tensors.
pub fn select_root(
    names: &[FlatName<'_>],
    root_key: Option<&str>,
) -> Result<SelectedNames, TrainingError> {
    if names.is_empty() {
        return Err(TrainingError::NoTensors);
    }
    if let Some(key) = root_key {
        return select_by_user(names, key);
    }
    let mut at: Vec<usize> = (0..names.len()).collect();
    let mut path: Vec<&str> = Vec::new();
    for _ in 0..MAX_DEPTH {
        let groups = Groups::new(names, &at, path.len());
        let model = MODEL_KEYS.into_iter().find(|key| groups.dictionaries.contains_key(key));
        let mut weights = groups.weights();
        let key = match (model, weights.next(), weights.next()) {
            (Some(key), ..) => key,
            (None, Some(key), None) if groups.single.is_empty() => key,
            _ => return select_weights(names, &groups, &path),
        };
        let others = || groups.dictionaries.keys().filter(|other| **other != key);
        let is_obvious = others().all(|other| is_training_dictionary(other));
        let others = TruncatedList::from_names(others().map(|other| join_keys(&path, other)));
        path.push(key);
        if let Some(inner) = groups.dictionaries.get(key) {
            at = inner.clone();
        }
        if model.is_some() {
            let mut selected = select_all(names, &at, &path);
            let mut note = format!("shown: `{}`", path.join("."));
            if !others.is_empty() {
                note += &format!("; not shown, choose with --root: {others}");
                match is_obvious {
                    true => selected.obvious_choices.push(note),
                    false => selected.notes.push(note),
                }
            }
            return Ok(selected);
        }
    }
    Err(TrainingError::NoTensors)
}

/// The tensors and dictionaries under a path of keys.
struct Groups<'a> {
    /// Tensors outside any dictionary.
    single: Vec<usize>,
    dictionaries: BTreeMap<&'a str, Vec<usize>>,
}

impl<'a> Groups<'a> {
    fn new(names: &[FlatName<'a>], at: &[usize], depth: usize) -> Groups<'a> {
        let mut groups = Groups { single: Vec::new(), dictionaries: BTreeMap::new() };
        for &n in at {
            match names[n].keys.get(depth..) {
                Some([key, _, ..]) => groups.dictionaries.entry(*key).or_default().push(n),
                _ => groups.single.push(n),
            }
        }
        groups
    }

    /// The keys of dictionaries that are not training state.
    fn weights(&self) -> impl Iterator<Item = &'a str> {
        self.dictionaries.keys().copied().filter(|key| !is_training_dictionary(key))
    }
}

fn is_training_dictionary(key: &str) -> bool {
    is_training_key(key, true) || TRAINING_KEYS.contains(&key)
}

/// Whether a tensor outside any dictionary is training state, by its name: Megatron joins all keys into one.
pub fn is_training_name(name: &str) -> bool {
    let mut parts = name.split('.');
    let first = parts.next().unwrap_or_default();
    let is_state = |part: &str| {
        matches!(part, "optimizer" | "opt_param_scheduler") || TRAINING_KEYS.contains(&part)
    };
    let is_chained =
        first.starts_with(CHAINED_OPTIMIZER_PREFIX) && parts.next().is_some_and(is_state);
    // The name of a whole tensor of the model has a dot in it.
    is_state(first) && name.len() > first.len() || is_chained
}

/// Selects the tensors outside any dictionary that are not training state. Fails if several dictionaries could be the
/// model.
fn select_weights(
    names: &[FlatName<'_>],
    groups: &Groups<'_>,
    path: &[&str],
) -> Result<SelectedNames, TrainingError> {
    let keys =
        || TruncatedList::from_names(groups.dictionaries.keys().map(|key| join_keys(path, key)));
    if groups.weights().next().is_some() {
        return Err(TrainingError::SeveralRoots { keys: keys() });
    }
    let is_weight = |n: &usize| !is_training_name(names[*n].name);
    let weights: Vec<usize> = groups.single.iter().copied().filter(is_weight).collect();
    let left_out = groups.single.len() - weights.len();
    if weights.is_empty() {
        let mut found = keys();
        if found.is_empty() {
            let first = groups.single.first().map(|&n| names[n].name);
            found = TruncatedList::from_names(first.and_then(|name| name.split('.').next()));
        }
        return Err(TrainingError::OnlyTrainingState { keys: found });
    }
    let mut selected = select_all(names, &weights, path);
    let keys = keys();
    if !keys.is_empty() {
        selected.obvious_choices.push(format!("not shown, choose with --root: {keys}"));
    }
    if left_out > 0 {
        selected.obvious_choices.push(format!("not shown: {left_out} tensors of the optimizer"));
    }
    Ok(selected)
}

fn join_keys(path: &[&str], key: &str) -> String {
    [path, &[key]].concat().join(".")
}

/// All of these names, without the keys of a path.
fn select_all(names: &[FlatName<'_>], at: &[usize], path: &[&str]) -> SelectedNames {
    let skip = path.iter().map(|key| key.len() + 1).sum::<usize>();
    let is_joined = |n: &usize| {
        let prefix = path.join(".");
        prefix.is_empty()
            || names[*n].name.strip_prefix(&*prefix).is_some_and(|rest| rest.starts_with('.'))
    };
    // A name that is not its keys joined by dots is shown whole.
    let names = at.iter().map(|n| (*n, if is_joined(n) { skip } else { 0 })).collect();
    let prefix = path.iter().map(|key| format!("{key}.")).collect();
    SelectedNames { names, prefix, ..SelectedNames::default() }
}

/// The tensors whose names begin with the user's key.
fn select_by_user(names: &[FlatName<'_>], key: &str) -> Result<SelectedNames, TrainingError> {
    let is_under = |(n, name): (usize, &FlatName<'_>)| {
        let rest = name.name.strip_prefix(key)?.strip_prefix('.')?;
        (!rest.is_empty()).then_some((n, key.len() + 1))
    };
    let selected: Vec<(usize, usize)> = names.iter().enumerate().filter_map(is_under).collect();
    if selected.is_empty() {
        let mut keys: Vec<&str> = names
            .iter()
            .filter_map(|name| match name.keys {
                [key, _, ..] => Some(*key),
                _ => name.name.split_once('.').map(|(first, _)| first),
            })
            .collect();
        keys.sort_unstable();
        keys.dedup();
        let keys = TruncatedList::from_names(keys);
        return Err(TrainingError::NoSuchKey { key: key.to_owned(), keys });
    }
    Ok(SelectedNames { names: selected, prefix: format!("{key}."), ..SelectedNames::default() })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn select(all: &[&[&str]], root_key: Option<&str>) -> Result<Vec<String>, TrainingError> {
        let joined: Vec<String> = all.iter().map(|keys| keys.join(".")).collect();
        let names = joined.iter().zip(all);
        let names: Vec<FlatName<'_>> = names.map(|(name, keys)| FlatName { name, keys }).collect();
        let selected = select_root(&names, root_key)?;
        Ok(selected.names.iter().map(|&(n, skip)| joined[n][skip..].to_owned()).collect())
    }

    #[test]
    fn the_model_is_found_where_trainers_put_it() {
        let optimizer: &[&str] = &["optimizer", "state", "a.weight", "exp_avg"];
        for (all, expected) in [
            // accelerate, Lightning: the key `model`.
            (&[&["model", "a.weight"][..], optimizer][..], &["a.weight"][..]),
            (&[&["state_dict", "a.weight"], &["optimizer_0", "x"]], &["a.weight"]),
            // torchtitan: names of the model at the top.
            (
                &[&["a.weight"], optimizer, &["dataloader", "x"], &["train_state", "step"]],
                &["a.weight"],
            ),
            // A state dict saved by itself, in which `model` is a part of names.
            (&[&["model.a.weight"], &["lm_head.weight"]], &["model.a.weight", "lm_head.weight"]),
            // torch's tutorial: an object with both, under a key of the user.
            (&[&["app", "model", "a.weight"], &["app", "optim", "x"]], &["a.weight"]),
            (&[&["net", "a.weight"], optimizer], &["a.weight"]),
            // Megatron: everything at the top.
            (
                &[
                    &["decoder.a"],
                    &["optimizer.state.exp_avg.decoder.a"],
                    &["chained_0.optimizer.x"],
                ],
                &["decoder.a"],
            ),
        ] {
            assert_eq!(select(all, None).unwrap(), expected, "{all:?}");
        }
    }

    #[test]
    fn an_unclear_choice_is_refused_with_its_keys() {
        let actor_and_critic: &[&[&str]] = &[&["actor", "w"], &["critic", "w"], &["optim", "x"]];
        let error = select(actor_and_critic, None).unwrap_err();
        assert!(matches!(error, TrainingError::SeveralRoots { .. }), "{error}");
        assert_eq!(select(actor_and_critic, Some("critic")).unwrap(), ["w"]);
        let error = select(actor_and_critic, Some("model")).unwrap_err().to_string();
        assert!(error.contains("`actor`") && error.contains("`critic`"), "{error}");
        let optimizer: &[&[&str]] = &[&["optimizer", "state", "x"]];
        let error = select(optimizer, None).unwrap_err();
        assert!(matches!(error, TrainingError::OnlyTrainingState { .. }), "{error}");
        assert_eq!(select(optimizer, Some("optimizer")).unwrap(), ["state.x"]);
        assert!(matches!(select(&[], None), Err(TrainingError::NoTensors)));
    }
}
