//! Opens the virtual file of a checkpoint for a command.

use std::path::Path;
use std::sync::Arc;

use crate::checkpoint::ParseOptions;
use crate::view;
use crate::virtual_file::{VirtualFile, VirtualFileReader};

use super::error::CommandError;
use super::output::print_note;

/// Opens a virtual file, and prints notes about where it differs from its source.
pub fn open_reader(path: &Path, options: &ParseOptions) -> Result<VirtualFileReader, CommandError> {
    let checkpoint = view::open(path, options)?;
    let left_out = checkpoint.refused.iter().map(|entry| format!("left out: {entry}"));
    let notes: Vec<String> = checkpoint.notes.iter().cloned().chain(left_out).collect();
    let reader = VirtualFileReader::open(&Arc::new(VirtualFile::new(checkpoint)?))?;
    notes.iter().for_each(|text| print_note(text));
    Ok(reader)
}
