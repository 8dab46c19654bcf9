//! Which entry of a training checkpoint is the state dict of its model.
//!
//! In: a dictionary's entries. Out: the entry, and why; nothing where it is not plain. Names decide first, as
//! trainers write them and loaders look for them, then what lies beside.

use super::census::Census;
use super::pickle::{Arena, Id};

/// Keys of a state dict whatever lies beside it, in this order.
const KEYS: [&str; 5] = ["state_dict", "model", "module", "model_state_dict", "model_state"];

/// Keys of a state dict where nothing beside it could be another part of the model, in this order. Of weights
/// that are there twice, averaged and not, loaders of `params` take the averaged ones, others do not.
const LESSER_KEYS: [&str; 15] = [
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

/// How a word begins in the key of what training keeps for itself.
const TRAINING_PREFIXES: [&str; 2] = ["optim", "sched"];

/// Such a word, whole.
const TRAINING_WORDS: [&str; 2] = ["opt", "scaler"];

/// Such a word, where the value is no dictionary: that could be a part of the model.
const TRAINING_VALUES: [&str; 9] =
    ["rng", "loss", "losses", "acc", "accuracy", "metrics", "epoch", "step", "lr"];

/// Why an entry is taken.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Reason {
    UsualKey,
    OnlyEntry,
    BesideTraining,
}

impl Reason {
    pub fn words(self) -> &'static str {
        match self {
            Reason::UsualKey => "the usual key",
            Reason::OnlyEntry => "the only entry",
            Reason::BesideTraining => "the only weights beside what training keeps",
        }
    }
}

/// An entry that is a dictionary with tensors, by its key.
type Branch<'a> = (&'a str, Id);

/// The entry that is the state dict.
pub fn state_dict<'a>(
    arena: &'a Arena,
    census: &Census,
    entries: &'a [(Id, Id)],
) -> Option<(Branch<'a>, Reason)> {
    let branch = |&(key, value): &(Id, Id)| {
        let is_branch = arena.entries(value).is_some() && census.has_tensors(value);
        arena.text(key).filter(|_| is_branch).map(|key| (key, value))
    };
    // In one pass: a dictionary may have millions of entries.
    let named = |keys: &[&str]| {
        let ranked = entries.iter().filter_map(|entry| {
            let key = arena.text(entry.0)?;
            Some((keys.iter().position(|&wanted| wanted == key)?, branch(entry)?))
        });
        ranked.min_by_key(|&(rank, _)| rank).map(|(_, branch)| branch)
    };
    if let Some(branch) = named(&KEYS) {
        return Some((branch, Reason::UsualKey));
    }
    if let [entry] = entries {
        return Some((branch(entry)?, Reason::OnlyEntry));
    }
    let key_of = |key| arena.text(key).unwrap_or_default();
    let is_usual = |key: &str| KEYS.contains(&key) || LESSER_KEYS.contains(&key);
    let is_training = |key, value| {
        let is_dictionary = arena.entries(value).is_some();
        census.is_optimizer(value) || is_of_training(key_of(key), is_dictionary)
    };
    // An object under such a key is the model itself.
    let is_model = |&&(key, value): &&(Id, Id)| match is_usual(key_of(key)) {
        true => !census.is_plain(value),
        false => census.has_weights(value) && !is_training(key, value),
    };
    let mut models = entries.iter().filter(is_model);
    let are_usual = models.clone().all(|entry| {
        let (key, _) = *entry;
        is_usual(key_of(key)) && branch(entry).is_some()
    });
    if are_usual && let Some(branch) = named(&LESSER_KEYS) {
        return Some((branch, Reason::UsualKey));
    }
    let only = models.next().filter(|_| models.next().is_none())?;
    let has_optimizer = entries
        .iter()
        .any(|&(key, value)| arena.entries(value).is_some() && is_training(key, value));
    let branch = branch(only).filter(|_| has_optimizer)?;
    Some((branch, Reason::BesideTraining))
}

/// Whether a key is that of an optimizer's state, of a scheduler, or of a loss and the like.
fn is_of_training(key: &str, is_dictionary: bool) -> bool {
    let mut words = key.split(|c: char| !c.is_ascii_alphanumeric()).map(str::to_ascii_lowercase);
    words.any(|word| {
        TRAINING_PREFIXES.iter().any(|prefix| word.starts_with(prefix))
            || TRAINING_WORDS.contains(&&*word)
            || !is_dictionary && TRAINING_VALUES.contains(&&*word)
    })
}
