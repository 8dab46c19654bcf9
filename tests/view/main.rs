//! The view of a directory: names, links, and changes in the source.

#![allow(clippy::unwrap_used)] // Also in functions beside the tests: a failed one fails the test.

#[path = "../common/mod.rs"]
mod common;

mod arbitrary_names;
mod index_matches_view;
mod shows_a_single_checkpoint;
mod shows_changes;
mod shows_what_loaders_need;
mod symlinks_stay_inside;
