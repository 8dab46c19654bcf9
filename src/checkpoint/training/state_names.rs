//! Recognises training state by its names.

use crate::checkpoint::torch::is_training_key;

use super::optimizer_names::OptimizerNames;

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

/// Those of them that could be the name of a model's module: if its tensors are left out, a note says so.
const AMBIGUOUS_KEYS: [&str; 4] = ["dataloader", "trainer", "loops", "callbacks"];

/// The prefix of names in one of Megatron's several optimizers.
const CHAINED_OPTIMIZER_PREFIX: &str = "chained_";

/// Whether a dictionary is training state, by its key.
pub fn is_training_dictionary(key: &str) -> bool {
    is_training_key(key, true) || TRAINING_KEYS.contains(&key)
}

/// Whether a tensor outside any dictionary is training state, by its name: Megatron joins all keys into one.
pub fn is_training_name(name: &str) -> bool {
    let mut parts = name.split('.');
    let first = parts.next().unwrap_or_default();
    let is_state = |part: &str| {
        matches!(part, "optimizer" | "opt_param_scheduler" | "lr_scheduler")
            || TRAINING_KEYS.contains(&part)
    };
    let is_chained =
        first.starts_with(CHAINED_OPTIMIZER_PREFIX) && parts.next().is_some_and(is_state);
    // The name of a whole tensor of the model has a dot in it, unless no model has it.
    let is_whole_name = matches!(first, "train_state" | "rng_state" | "lr_scheduler");
    is_state(first) && (is_whole_name || name.len() > first.len()) || is_chained
}

/// Whether a tensor outside any dictionary is training state without doubt.
pub fn is_certain_state(name: &str, optimizers: &OptimizerNames<'_>) -> bool {
    let first = name.split('.').next().unwrap_or_default();
    is_training_name(name) && !AMBIGUOUS_KEYS.contains(&first) || optimizers.contain(name)
}
