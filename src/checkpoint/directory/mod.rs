//! The checkpoints in a directory, found by the names of its files.
//!
//! `shard_name` parses names, `discover` groups files into [`Candidate`]s, and `default_choice` picks the candidate
//! that the directory itself stands for. `folder_format` tells folders of training that are not read. What a mount then shows of them is decided in the view.

mod candidate;
mod default_choice;
mod discover;
mod folder_format;
mod shard_name;

pub use candidate::{Candidate, CandidateFiles, LoaderName, NumberedSetError};
pub use default_choice::{DefaultChoice, choose_default};
pub use discover::{
    NestedCheckpoint, candidates_by_name, find_candidates, find_nested, find_unread_file,
    is_training_file, sole_index, training_pattern,
};
pub use folder_format::{FolderFormat, FormatFolder, is_dcp_safetensors};
pub use shard_name::{
    CHECKPOINT_EXTENSIONS, is_complete_set, lone_shard_note, numbered_shards,
    unsharded_name_of_index,
};
