//! A mount and its cache: attaching, reading, ending.

#![cfg(feature = "mount")]
#![allow(clippy::unwrap_used)] // Also in functions beside the tests: a failed one fails the test.

#[path = "../common/mod.rs"]
mod common;

mod blocking_reads_first;
mod cache_serves_any_range;
mod commands_accept_mount_paths;
mod daemonizes;
mod errors_are_explained;
mod mount_errors_explain;
mod mounts_read_only;
mod panics_are_survived;
mod rejects_invalid_options;
mod removed_source_is_reported;
mod sharded_model;
mod signals;
mod source_changes_show;
mod sources_that_fail;
mod stores_show_at_next_open;
mod unmounts_cleanly;
