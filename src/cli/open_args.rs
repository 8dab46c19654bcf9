//! From arguments to an opened virtual file, with what goes wrong put into words and exit codes.

use std::path::Path;
use std::sync::Arc;

use crate::checkpoint::{self, ParseOptions};
use crate::virtual_file::{self, VirtualFile, VirtualFileReader};

use crate::view::{self, KeepRules};

use super::args::{ParseArgs, ViewArgs};
use super::{CommandError, EXIT_FAILED, EXIT_REFUSED, EXIT_USAGE, print_note};

impl ParseArgs {
    pub fn options(&self) -> ParseOptions {
        ParseOptions {
            root_key: self.root.clone(),
            allow_partial: self.allow_partial,
            follow_symlinks: self.follow_symlinks,
        }
    }
}

impl ViewArgs {
    pub fn options(&self) -> Result<view::ViewOptions, CommandError> {
        let keep = KeepRules::new(&self.keep).map_err(|e| {
            CommandError::new(EXIT_USAGE, e, "write it as a shell does: optimizer*")
        })?;
        Ok(view::ViewOptions {
            parse: self.parse_args.options(),
            show_originals: self.show_originals,
            keep,
            cache_bytes: 0,
        })
    }
}

/// Opens a virtual file, and says on stderr what is not as it stands in the source.
pub fn open_reader(path: &Path, options: &ParseOptions) -> Result<VirtualFileReader, CommandError> {
    let checkpoint = view::open(path, options)?;
    let told = checkpoint.notes.iter().cloned();
    let left_out = checkpoint.refused.iter().map(|entry| format!("left out: {entry}"));
    let notes: Vec<String> = told.chain(left_out).collect();
    let reader = Arc::new(VirtualFile::new(checkpoint)?).open()?;
    notes.iter().for_each(|text| print_note(text));
    Ok(reader)
}

fn refusal_exit_code(is_refusal: bool) -> u8 {
    if is_refusal { EXIT_REFUSED } else { EXIT_FAILED }
}

impl From<checkpoint::CheckpointError> for CommandError {
    fn from(error: checkpoint::CheckpointError) -> Self {
        match &error {
            checkpoint::CheckpointError::SeveralCheckpoints { path, names } => {
                let path_shown = path.display();
                let mut message = format!("{path_shown}: several checkpoints in this directory:");
                for name in names {
                    message += &format!("\n    {}", path.join(name).display());
                }
                CommandError::new(EXIT_USAGE, message, error.remedy())
            }
            checkpoint::CheckpointError::RefusedEntries { path, refused } => {
                let mut message = format!("{}: cannot be shown as it is:", path.display());
                for entry in refused.iter().take(MAX_LISTED_REFUSALS) {
                    message += &format!("\n    {entry}");
                }
                if refused.len() > MAX_LISTED_REFUSALS {
                    message += &format!("\n    and {} more", refused.len() - MAX_LISTED_REFUSALS);
                }
                let first = refused.first().map(|entry| entry.fault.remedy());
                CommandError::new(EXIT_REFUSED, message, first.unwrap_or(error.remedy()))
            }
            _ => CommandError::new(refusal_exit_code(error.is_refusal()), &error, error.remedy()),
        }
    }
}

/// Refused entries listed before the rest is a number.
const MAX_LISTED_REFUSALS: usize = 10;

impl From<virtual_file::VirtualFileError> for CommandError {
    fn from(error: virtual_file::VirtualFileError) -> Self {
        match error {
            virtual_file::VirtualFileError::Refused(error) => CommandError::from(*error),
            error => {
                CommandError::new(refusal_exit_code(error.is_refusal()), &error, error.remedy())
            }
        }
    }
}

impl From<view::ViewError> for CommandError {
    fn from(error: view::ViewError) -> Self {
        CommandError::new(refusal_exit_code(error.is_refusal()), &error, error.remedy())
    }
}
