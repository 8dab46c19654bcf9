//! Finds the entry of a training checkpoint that is the state dict of its model.
//!
//! Keys that trainers write and loaders look for decide first, then the other entries.

use crate::checkpoint::torch::interpret::{PickleValue, interpret};
use crate::checkpoint::torch::pickle::{Arena, NodeId};

use super::reachability::Reachability;

/// Keys of a state dict, whatever the other entries are, in order of preference.
const STRONG_KEYS: [&str; 5] = ["state_dict", "model", "module", "model_state_dict", "model_state"];

/// Keys of a state dict if no other entry could be a part of the model, in order of preference. Beside other weights,
/// loaders of `params` take the averaged weights; other loaders do not.
const WEAK_KEYS: [&str; 15] = [
    "net",
    "network",
    "net_state_dict",
    "network_state_dict",
    "model_weights",
    "weights",
    "weight",
    "params_ema",
    "params-ema",
    "params",
    "state_dict_ema",
    "model_ema",
    "ema_state_dict",
    "ema_model",
    "ema",
];

/// Word prefixes in keys of training state.
const TRAINING_PREFIXES: [&str; 2] = ["optim", "sched"];

/// Whole words in keys of training state.
const TRAINING_WORDS: [&str; 2] = ["opt", "scaler"];

/// Whole words in keys of training state, unless the value is a dictionary, which could be part of the model.
const TRAINING_VALUE_WORDS: [&str; 9] =
    ["rng", "loss", "losses", "acc", "accuracy", "metrics", "epoch", "step", "lr"];

/// Why an entry is the state dict.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum SelectReason {
    UsualKey,
    OnlyEntry,
    BesideTraining,
}

impl SelectReason {
    pub fn text(self) -> &'static str {
        match self {
            SelectReason::UsualKey => "the usual key",
            SelectReason::OnlyEntry => "the only entry",
            SelectReason::BesideTraining => "the only weights beside the training state",
        }
    }
}

/// An entry that is a dictionary with tensors: its key and value.
type Branch<'a> = (&'a str, NodeId);

/// Finds the state dict and the reason; `None` if no entry plainly is one.
pub fn find_state_dict<'a>(
    arena: &'a Arena,
    reachability: &Reachability,
    entries: &'a [(NodeId, NodeId)],
) -> Option<(Branch<'a>, SelectReason)> {
    let branch = |&(key, value): &(NodeId, NodeId)| {
        let is_branch = arena.entries(value).is_some() && reachability.has_tensors(value);
        arena.text(key).filter(|_| is_branch).map(|key| (key, value))
    };
    // In one pass: a dictionary may have millions of entries.
    let find_by_key = |keys: &[&str]| {
        let ranked = entries.iter().filter_map(|entry| {
            let key = arena.text(entry.0)?;
            Some((keys.iter().position(|&strong| strong == key)?, branch(entry)?))
        });
        ranked.min_by_key(|&(rank, _)| rank).map(|(_, branch)| branch)
    };
    if let Some(branch) = find_by_key(&STRONG_KEYS) {
        return Some((branch, SelectReason::UsualKey));
    }
    if let [entry] = entries {
        return Some((branch(entry)?, SelectReason::OnlyEntry));
    }
    let key_of = |key| arena.text(key).unwrap_or_default();
    let is_usual = |key: &str| STRONG_KEYS.contains(&key) || WEAK_KEYS.contains(&key);
    let is_training = |key, value| is_training_entry(arena, reachability, key, value);
    // An object under such a key is the model itself.
    let is_model = |&&(key, value): &&(NodeId, NodeId)| match is_usual(key_of(key)) {
        true => !reachability.is_plain(value),
        false => reachability.has_weights(value) && !is_training(key, value),
    };
    let mut models = entries.iter().filter(is_model);
    let are_usual = models.clone().all(|entry| {
        let (key, _) = *entry;
        is_usual(key_of(key)) && branch(entry).is_some()
    });
    if are_usual && let Some(branch) = find_by_key(&WEAK_KEYS) {
        return Some((branch, SelectReason::UsualKey));
    }
    let only = models.next().filter(|_| models.next().is_none())?;
    let has_optimizer = entries
        .iter()
        .any(|&(key, value)| arena.entries(value).is_some() && is_training(key, value));
    let branch = branch(only).filter(|_| has_optimizer)?;
    Some((branch, SelectReason::BesideTraining))
}

/// The deepest dictionary that is searched for a model that is an object: trainers nest it once or twice.
const MAX_MODEL_DEPTH: usize = 4;

/// The model itself, where a dictionary has it as an object under a usual key: the keys that lead to it, and its class.
/// Nothing beside it may take its place. In a checkpoint without any tensor it may lie deeper.
pub fn model_object(
    arena: &Arena,
    reachability: &Reachability,
    id: NodeId,
) -> Option<(Vec<String>, String)> {
    let depth = if reachability.has_tensors(id) { 1 } else { MAX_MODEL_DEPTH };
    find_model_object(arena, id, depth)
}

fn find_model_object(arena: &Arena, id: NodeId, depth: usize) -> Option<(Vec<String>, String)> {
    let depth = depth.checked_sub(1)?;
    let entries = arena.entries(id)?;
    let is_usual = |key: &str| STRONG_KEYS.contains(&key) || WEAK_KEYS.contains(&key);
    let own = entries.iter().find_map(|&(key, value)| {
        let key = arena.text(key).filter(|key| is_usual(key))?;
        match interpret(arena, value) {
            PickleValue::Object(class) => Some((vec![key.to_owned()], class)),
            _ => None,
        }
    });
    own.or_else(|| {
        entries.iter().take(MAX_SEARCHED_ENTRY_COUNT).find_map(|&(key, value)| {
            let key = arena.text(key)?;
            let (mut keys, class) = find_model_object(arena, value, depth)?;
            keys.insert(0, key.to_owned());
            Some((keys, class))
        })
    })
}

/// Maximum number of entries whose values are searched: what trainers write around a model has fewer.
const MAX_SEARCHED_ENTRY_COUNT: usize = 64;

/// Whether an entry is training state: by its value, or by its key.
pub fn is_training_entry(
    arena: &Arena,
    reachability: &Reachability,
    key: NodeId,
    value: NodeId,
) -> bool {
    let is_dictionary = arena.entries(value).is_some();
    let key = arena.text(key).unwrap_or_default();
    reachability.is_optimizer(value) || is_training_key(key, is_dictionary)
}

/// Whether a key is that of an optimizer's state, of a scheduler, or of a loss and the like.
pub fn is_training_key(key: &str, is_dictionary: bool) -> bool {
    let mut words = key.split(|c: char| !c.is_ascii_alphanumeric()).map(str::to_ascii_lowercase);
    words.any(|word| {
        TRAINING_PREFIXES.iter().any(|prefix| word.starts_with(prefix))
            || TRAINING_WORDS.contains(&&*word)
            || !is_dictionary && TRAINING_VALUE_WORDS.contains(&&*word)
    })
}
