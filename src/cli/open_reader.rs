//! Opens the virtual file of a checkpoint for a command.

use std::path::Path;
use std::sync::Arc;

use crate::checkpoint::{Checkpoint, ParseOptions};
use crate::recipe::{Recipe, Transform};
use crate::shell_word::shell_word;
use crate::view;
use crate::virtual_file::{VirtualFile, VirtualFileReader};

use super::error::{CommandError, EXIT_REFUSED};

/// Entries that are left out and have a note of their own.
const MAX_LISTED_ENTRIES: usize = 10;

/// A checkpoint whose virtual file can be read.
pub struct CheckpointReader {
    pub reader: VirtualFileReader,
    /// The name that a mount of its directory gives the virtual file.
    pub name: String,
    /// Where the virtual file differs from its source, in words. Choices that need no note are left out.
    pub notes: Vec<String>,
}

/// Opens a checkpoint: the one at a path, or that which a recipe shows there.
pub fn open_checkpoint(
    path: &Path,
    options: &ParseOptions,
    views: Option<&Path>,
) -> Result<Checkpoint, CommandError> {
    match views {
        None => Ok(view::open(path, options)?),
        Some(recipe) => Ok(view::open_shown(path, &Recipe::read(recipe)?, options)?),
    }
}

/// Opens a checkpoint, and its virtual file.
pub fn open_reader(
    path: &Path,
    options: &ParseOptions,
    views: Option<&Path>,
    transform: &Transform,
) -> Result<CheckpointReader, CommandError> {
    let checkpoint = open_checkpoint(path, options, views)?;
    let checkpoint = transform.apply(checkpoint, Vec::new()).map_err(|error| {
        let message = format!("{}: {error}", path.display());
        CommandError::new(EXIT_REFUSED, message, error.remedy())
    })?;
    let name = view::virtual_file_name(&checkpoint.path);
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
    Ok(CheckpointReader { reader, name, notes })
}
