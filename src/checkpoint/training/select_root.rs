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
//! If several dictionaries remain, the user has to choose. The notes name or count every tensor that is left out.

use std::collections::BTreeMap;

use crate::checkpoint::torch::is_training_key;
use crate::checkpoint::truncated_list::TruncatedList;

use crate::checkpoint::training_error::TrainingError;

use super::optimizer_names::OptimizerNames;
use super::state_names::{is_certain_state, is_training_dictionary, is_training_name};

/// Keys of the model in the state of a run, in order of preference.
const MODEL_KEYS: [&str; 2] = ["model", "state_dict"];

/// Maximum depth of dictionaries with a single entry.
const MAX_DEPTH: usize = 64;

/// A name, and the ends in it of the keys that led to it. Without keys, the name is all that is known.
#[derive(Clone, Copy, Debug)]
pub struct FlatName<'a> {
    pub name: &'a str,
    pub key_ends: &'a [u32],
}

impl<'a> FlatName<'a> {
    /// The key at a depth, if it leads to a dictionary.
    fn dictionary_at(&self, depth: usize) -> Option<&'a str> {
        let [end, _, ..] = self.key_ends.get(depth..)? else { return None };
        Some(&self.name[self.start_at(depth)..*end as usize])
    }

    /// The first byte of the key at a depth.
    fn start_at(&self, depth: usize) -> usize {
        depth.checked_sub(1).map_or(0, |above| self.key_ends[above] as usize + 1)
    }
}

/// The names that are shown.
#[derive(Debug, Default)]
pub struct SelectedNames {
    /// Indexes of the names, each with the number of bytes to leave out at its beginning.
    pub names: Vec<(usize, usize)>,
    /// The prefix of all names in the selected dictionary; empty if it is the whole.
    prefix: String,
    /// Choices that leave no doubt, in words: only training state is left out.
    pub obvious_choices: Vec<String>,
    /// What else was selected and what was left out, in words.
    pub notes: Vec<String>,
}

/// Selects the names of the model among those of all tensors. `others` are the names of what are not tensors.
pub fn select_root(
    names: &[FlatName<'_>],
    others: &[String],
    root_key: Option<&str>,
) -> Result<SelectedNames, TrainingError> {
    if names.is_empty() {
        return Err(TrainingError::NoTensors);
    }
    let all = names.iter().map(|name| name.name).chain(others.iter().map(String::as_str));
    let optimizers = OptimizerNames::find(all);
    let mut selected = match root_key {
        Some(key) => select_by_user(names, key)?,
        None => select_by_rules(names, &optimizers)?,
    };
    let others = others.iter().filter(|name| name.starts_with(&selected.prefix));
    let others = others.filter(|name| !is_training_name(name) && !optimizers.contain(name));
    let others = TruncatedList::from_names(others);
    if !others.is_empty() {
        selected.notes.push(format!("left out, not tensors: {others}"));
    }
    Ok(selected)
}

fn select_by_rules(
    names: &[FlatName<'_>],
    optimizers: &OptimizerNames<'_>,
) -> Result<SelectedNames, TrainingError> {
    let mut at: Vec<usize> = (0..names.len()).collect();
    let mut path: Vec<&str> = Vec::new();
    let mut left_out = LeftOut::default();
    for _ in 0..MAX_DEPTH {
        let mut groups = Groups::new(names, &at, path.len(), optimizers);
        let model = MODEL_KEYS.into_iter().find(|key| groups.dictionaries.contains_key(key));
        let mut weights = groups.weights();
        let key = match (model, weights.next(), weights.next()) {
            (Some(key), ..) => key,
            (None, Some(key), None) if groups.single.is_empty() => key,
            _ => {
                drop(weights);
                return select_weights(names, &groups, &path, optimizers, left_out);
            }
        };
        drop(weights);
        if let Some(inner) = groups.dictionaries.remove(key) {
            at = inner.names;
        }
        left_out.add_dictionaries(&path, &groups);
        for &n in &groups.single {
            let name = names[n].name;
            let is_value = is_training_key(&name[names[n].start_at(path.len())..], false);
            left_out.add_tensor(name, is_value || is_certain_state(name, optimizers));
        }
        path.push(key);
        if model.is_some() {
            return Ok(left_out.into_selected(select_all(names, &at, &path), &path));
        }
    }
    Err(TrainingError::NoTensors)
}

/// What is not shown, for the notes.
#[derive(Debug, Default)]
struct LeftOut {
    dictionaries: TruncatedList,
    /// Whether a dictionary could be a model.
    has_weights: bool,
    /// Tensors outside any dictionary that are training state.
    state: TruncatedList,
    /// Other tensors outside any dictionary.
    tensors: TruncatedList,
}

impl LeftOut {
    fn add_dictionaries(&mut self, path: &[&str], groups: &Groups<'_>) {
        self.has_weights |= groups.weights().next().is_some();
        for key in groups.dictionaries.keys() {
            self.dictionaries.add(|| join_keys(path, key));
        }
    }

    fn add_tensor(&mut self, name: &str, is_state: bool) {
        let list = if is_state { &mut self.state } else { &mut self.tensors };
        list.add(|| name.to_owned());
    }

    /// Adds the notes to what is shown: all below a path of keys.
    fn into_selected(self, mut selected: SelectedNames, path: &[&str]) -> SelectedNames {
        let shown = match path.is_empty() {
            true => String::new(),
            false => format!("shown: `{}`; ", path.join(".")),
        };
        if !self.dictionaries.is_empty() {
            let note = format!("{shown}not shown, choose with --root: {}", self.dictionaries);
            let notes = match self.has_weights {
                true => &mut selected.notes,
                false => &mut selected.obvious_choices,
            };
            notes.push(note);
        }
        for (list, what, notes) in [
            (self.state, " of training state", &mut selected.obvious_choices),
            (self.tensors, "", &mut selected.notes),
        ] {
            if !list.is_empty() {
                let noun = if list.len() == 1 { "tensor" } else { "tensors" };
                notes.push(format!("{shown}not shown: {} {noun}{what}: {list}", list.len()));
            }
        }
        selected
    }
}

/// The tensors and dictionaries under a path of keys.
struct Groups<'a> {
    /// Tensors outside any dictionary.
    single: Vec<usize>,
    dictionaries: BTreeMap<&'a str, DictionaryNames>,
}

/// The tensors of a dictionary.
#[derive(Default)]
struct DictionaryNames {
    names: Vec<usize>,
    /// Whether one of them is not an optimizer's.
    has_weights: bool,
}

impl<'a> Groups<'a> {
    fn new(
        names: &[FlatName<'a>],
        at: &[usize],
        depth: usize,
        optimizers: &OptimizerNames<'_>,
    ) -> Groups<'a> {
        let mut groups = Groups { single: Vec::new(), dictionaries: BTreeMap::new() };
        for &n in at {
            match names[n].dictionary_at(depth) {
                Some(key) => {
                    let dictionary = groups.dictionaries.entry(key).or_default();
                    dictionary.names.push(n);
                    dictionary.has_weights |= !optimizers.contain(names[n].name);
                }
                None => groups.single.push(n),
            }
        }
        groups
    }

    /// The keys of dictionaries that are not training state.
    fn weights(&self) -> impl Iterator<Item = &'a str> {
        let weights = self.dictionaries.iter();
        weights
            .filter(|(key, names)| names.has_weights && !is_training_dictionary(key))
            .map(|(key, _)| *key)
    }
}

/// Selects the tensors outside any dictionary that are not training state. Fails if several dictionaries could be the
/// model.
fn select_weights(
    names: &[FlatName<'_>],
    groups: &Groups<'_>,
    path: &[&str],
    optimizers: &OptimizerNames<'_>,
    mut left_out: LeftOut,
) -> Result<SelectedNames, TrainingError> {
    let keys =
        || TruncatedList::from_names(groups.dictionaries.keys().map(|key| join_keys(path, key)));
    if groups.weights().next().is_some() {
        return Err(TrainingError::SeveralRoots { keys: keys() });
    }
    let mut weights = Vec::new();
    for &n in &groups.single {
        let name = names[n].name;
        let is_certain = is_certain_state(name, optimizers);
        match is_certain || is_training_name(name) {
            true => left_out.add_tensor(name, is_certain),
            false => weights.push(n),
        }
    }
    if weights.is_empty() {
        let mut found = keys();
        if found.is_empty() {
            let first = groups.single.first().map(|&n| names[n].name);
            found = TruncatedList::from_names(first.and_then(|name| name.split('.').next()));
        }
        return Err(TrainingError::OnlyTrainingState { keys: found });
    }
    left_out.add_dictionaries(path, groups);
    Ok(left_out.into_selected(select_all(names, &weights, path), path))
}

fn join_keys(path: &[&str], key: &str) -> String {
    [path, &[key]].concat().join(".")
}

/// All of these names, without the keys of a path.
fn select_all(names: &[FlatName<'_>], at: &[usize], path: &[&str]) -> SelectedNames {
    let names = at.iter().map(|&n| (n, names[n].start_at(path.len()))).collect();
    let prefix = path.iter().map(|key| format!("{key}.")).collect();
    SelectedNames { names, prefix, ..SelectedNames::default() }
}

/// The tensors whose names begin with the user's key.
fn select_by_user<'a>(names: &[FlatName<'a>], key: &str) -> Result<SelectedNames, TrainingError> {
    let is_under = |(n, name): (usize, &FlatName<'_>)| {
        let rest = name.name.strip_prefix(key)?.strip_prefix('.')?;
        (!rest.is_empty()).then_some((n, key.len() + 1))
    };
    let selected: Vec<(usize, usize)> = names.iter().enumerate().filter_map(is_under).collect();
    if selected.is_empty() {
        let first_key = |name: &FlatName<'a>| {
            name.dictionary_at(0).or_else(|| name.name.split_once('.').map(|(first, _)| first))
        };
        let mut keys: Vec<&str> = names.iter().filter_map(first_key).collect();
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

    /// The names that are shown of tensors with these keys, and all notes.
    fn select_noted(
        all: &[&[&str]],
        others: &[&str],
        root_key: Option<&str>,
    ) -> Result<(Vec<String>, [Vec<String>; 2]), TrainingError> {
        let joined: Vec<String> = all.iter().map(|keys| keys.join(".")).collect();
        let ends = |keys: &&[&str]| {
            let ends = (1..=keys.len()).map(|n| keys[..n].join(".").len() as u32);
            ends.collect::<Vec<u32>>()
        };
        let ends: Vec<Vec<u32>> = all.iter().map(ends).collect();
        let names: Vec<FlatName<'_>> =
            joined.iter().zip(&ends).map(|(name, key_ends)| FlatName { name, key_ends }).collect();
        let others: Vec<String> = others.iter().map(|name| (*name).to_owned()).collect();
        let selected = select_root(&names, &others, root_key)?;
        let shown = selected.names.iter().map(|&(n, skip)| joined[n][skip..].to_owned());
        Ok((shown.collect(), [selected.obvious_choices, selected.notes]))
    }

    fn select(all: &[&[&str]], root_key: Option<&str>) -> Result<Vec<String>, TrainingError> {
        Ok(select_noted(all, &[], root_key)?.0)
    }

    #[test]
    fn no_tensor_is_left_out_without_its_name() {
        let (model, step): (&[&str], &[&str]) = (&["model", "w"], &["step"]);
        let (shown, [obvious, notes]) =
            select_noted(&[model, &["extra"], step], &[], None).unwrap();
        assert_eq!(shown, ["w"]);
        assert_eq!(obvious, ["shown: `model`; not shown: 1 tensor of training state: `step`"]);
        assert_eq!(notes, ["shown: `model`; not shown: 1 tensor: `extra`"]);
        // A module can have this name.
        let (shown, [_, notes]) = select_noted(&[&["w"], &["trainer.w"]], &[], None).unwrap();
        assert_eq!(
            (shown, notes),
            (vec!["w".into()], vec!["not shown: 1 tensor: `trainer.w`".into()])
        );
        // Two levels of dictionaries, each with others.
        let optimizer: &[&str] = &["optimizer", "x"];
        let inner: &[&str] = &["net", "ema", "w"];
        let all = [&["net", "model", "w"][..], inner, optimizer];
        let (_, [_, notes]) = select_noted(&all, &[], None).unwrap();
        let choices = "not shown, choose with --root: `optimizer`, `net.ema`";
        assert_eq!(notes, [format!("shown: `net.model`; {choices}")]);
    }

    #[test]
    fn the_state_of_an_optimizer_is_no_model_wherever_it_is() {
        let options = &["param_groups.w.lr"];
        for all in [
            &[&["state.w.exp_avg"][..], &["state.w.step"]][..],
            &[&["state", "w", "exp_avg"], &["state", "b", "exp_avg"]],
            &[&["state", "0", "exp_avg"]],
        ] {
            let error = select_noted(all, options, None).unwrap_err();
            assert!(matches!(error, TrainingError::OnlyTrainingState { .. }), "{error}");
            assert!(error.to_string().contains("`state`"), "{error}");
        }
        // Without options, `state` is a name as any other.
        assert_eq!(select(&[&["state.w"]], None).unwrap(), ["state.w"]);
        let lightning: &[&[&str]] =
            &[&["model.w"], &["adam.state.w.exp_avg"], &["adam.state.b.step"]];
        let (shown, [obvious, notes]) =
            select_noted(lightning, &["adam.param_groups.w.lr"], None).unwrap();
        assert_eq!((shown, notes), (vec!["model.w".into()], vec![]));
        assert!(obvious[0].contains("2 tensors of training state: `adam.state.w.exp_avg`"));
        let nested: &[&[&str]] = &[&["net", "w"], &["adam", "state", "w", "exp_avg"]];
        let (shown, _) = select_noted(nested, &["adam.param_groups"], None).unwrap();
        assert_eq!(shown, ["w"]);
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
            (
                &[&["a.weight"], &["lr_scheduler.last"], &["train_state"], &["scheduler.w"]],
                &["a.weight", "scheduler.w"],
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
