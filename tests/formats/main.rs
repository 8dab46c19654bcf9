//! Checkpoint formats: which bytes are read, and which are rejected.

#![allow(clippy::unwrap_used)] // Also in functions beside the tests: a failed one fails the test.

#[path = "../common/mod.rs"]
mod common;

mod blocks_path_escape;
mod parse_never_panics;
mod reads_any_range;
mod rejects_ambiguity;
mod rejects_bad_archives;
mod rejects_bad_indexes;
mod rejects_bad_legacy_files;
mod rejects_bad_pickles;
mod rejects_bad_safetensors;
mod rejects_inconsistent_zip;
mod rejects_non_files;
