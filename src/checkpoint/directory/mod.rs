//! The checkpoints in a directory, found by the names of its files.
//!
//! `shard_name` parses names, `discover` groups files into [`Candidate`]s, and `default_choice` picks the candidate
//! that the directory itself stands for. `training_folder` finds the files of many ranks.
//! The view decides what a mount then shows of them.

mod candidate;
mod default_choice;
mod discover;
mod nested_training;
mod numbered_name;
mod shard_name;
mod training_folder;
mod universal_folder;
mod version_chain;

pub use candidate::{BaseVersion, Candidate, CandidateFiles, LoaderName, NumberedSetError};
pub use default_choice::{DefaultChoice, choose_default};
pub use discover::{
    candidates_among, candidates_by_name, find_candidates, find_nested, find_unread_file,
    is_training_file, sole_index, training_pattern,
};
pub use nested_training::{LATEST_NAME, find_whole_states, missing_tag};
pub use numbered_name::{split_digits, split_rank, world_size};
pub use shard_name::{
    CHECKPOINT_EXTENSIONS, DcpShardName, is_complete_set, lone_shard_note, numbered_shards,
    unsharded_name_of_index,
};
pub use training_folder::{MODEL_NAME, TrainingFolder, TrainingFormat, is_zero_optimizer};
pub use universal_folder::{is_universal_part, parameter_of_path};
pub use version_chain::{
    MAX_CHAIN_DELTAS, VersionPlace, parse_version_name, read_index, version_name,
};
