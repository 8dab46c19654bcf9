//! Opens the virtual file of a checkpoint for a command.

use std::path::Path;
use std::sync::Arc;

use crate::checkpoint::ParseOptions;
use crate::shell_word::shell_word;
use crate::view;
use crate::virtual_file::{VirtualFile, VirtualFileReader};

use super::error::CommandError;
use super::output::print_note;

/// Entries that are left out and have a note of their own.
const MAX_LISTED_ENTRIES: usize = 10;

/// Opens a virtual file, and prints notes about where it differs from its source.
pub fn open_reader(path: &Path, options: &ParseOptions) -> Result<VirtualFileReader, CommandError> {
    let checkpoint = view::open(path, options)?;
    let left_out = checkpoint.refused.iter().map(|entry| format!("left out: {entry}"));
    let mut notes: Vec<String> = checkpoint.notes.clone();
    notes.extend(left_out.take(MAX_LISTED_ENTRIES));
    if let Some(more) = checkpoint.refused.len().checked_sub(MAX_LISTED_ENTRIES)
        && more > 0
    {
        let path = shell_word(path);
        notes.push(format!(
            "left out: {more} more; ckptfs inspect --allow-partial {path} lists them"
        ));
    }
    let reader = VirtualFileReader::open(&Arc::new(VirtualFile::new(checkpoint)?))?;
    notes.iter().for_each(|text| print_note(text));
    Ok(reader)
}
