//! The command line: output, exit codes, exported files.

#![allow(clippy::unwrap_used)] // Also in functions beside the tests: a failed one fails the test.

#[path = "../common/mod.rs"]
mod common;

mod commands;
mod documents_name_real_tests;
mod export_is_whole_or_nothing;
mod ls_reports_everything;
mod output_failures;
mod several_paths;
