//! From arguments to an opened image, with what goes wrong put into words and exit codes.

use std::path::Path;
use std::sync::Arc;

use crate::checkpoint::{self, Options};
use crate::image::{self, Image, Reader};

use crate::view::{self, Keep};

use super::args::{Reading, Shows};
use super::{FAILED, Failure, REFUSED, USAGE, note};

impl Reading {
    pub fn options(&self) -> Options {
        Options {
            root_key: self.root.clone(),
            allow_partial: self.allow_partial,
            follow_symlinks: self.follow_symlinks,
        }
    }
}

impl Shows {
    pub fn options(&self) -> Result<view::Options, Failure> {
        let keep = Keep::new(&self.keep)
            .map_err(|e| Failure::new(USAGE, e, "write it as a shell does: optimizer*"))?;
        Ok(view::Options {
            checkpoint: self.reading.options(),
            show_originals: self.show_originals,
            keep,
            memory: 0,
        })
    }
}

/// Opens an image, and says on stderr what is not as it stands in the source.
pub fn reader(path: &Path, options: &Options) -> Result<Reader, Failure> {
    let checkpoint = view::open(path, options)?;
    let told = checkpoint.notes.iter().cloned();
    let left_out = checkpoint.refused.iter().map(|entry| format!("left out: {entry}"));
    let notes: Vec<String> = told.chain(left_out).collect();
    let reader = Arc::new(Image::new(checkpoint)?).open()?;
    notes.iter().for_each(|text| note(text));
    Ok(reader)
}

fn code(is_refusal: bool) -> u8 {
    if is_refusal { REFUSED } else { FAILED }
}

impl From<checkpoint::Error> for Failure {
    fn from(error: checkpoint::Error) -> Self {
        match &error {
            checkpoint::Error::Several { path, names } => {
                let path_shown = path.display();
                let mut message = format!("{path_shown}: several checkpoints in this directory:");
                for name in names {
                    message += &format!("\n    {}", path.join(name).display());
                }
                Failure::new(USAGE, message, error.remedy())
            }
            checkpoint::Error::Refused { path, refused } => {
                let mut message = format!("{}: cannot be shown as it is:", path.display());
                for entry in refused.iter().take(LISTED) {
                    message += &format!("\n    {entry}");
                }
                if refused.len() > LISTED {
                    message += &format!("\n    and {} more", refused.len() - LISTED);
                }
                let first = refused.first().map(|entry| entry.fault.remedy());
                Failure::new(REFUSED, message, first.unwrap_or(error.remedy()))
            }
            _ => Failure::new(code(error.is_refusal()), &error, error.remedy()),
        }
    }
}

/// Refused entries listed before the rest is a number.
const LISTED: usize = 10;

impl From<image::Error> for Failure {
    fn from(error: image::Error) -> Self {
        match error {
            image::Error::Refused(error) => Failure::from(*error),
            error => Failure::new(code(error.is_refusal()), &error, error.remedy()),
        }
    }
}

impl From<view::Error> for Failure {
    fn from(error: view::Error) -> Self {
        Failure::new(code(error.is_refusal()), &error, error.remedy())
    }
}
