//! From arguments to an opened image, with what goes wrong put into words and exit codes.

use std::path::Path;
use std::sync::Arc;

use crate::checkpoint::{self, Checkpoint, Options};
use crate::image::{self, Image, Reader};

use super::args::Source;
use super::{FAILED, Failure, REFUSED, USAGE};

impl Source {
    pub fn options(&self) -> Options {
        Options {
            root_key: self.root.clone(),
            allow_partial: self.allow_partial,
            follow_symlinks: self.follow_symlinks,
        }
    }
}

pub fn checkpoint(path: &Path, options: &Options) -> Result<Checkpoint, Failure> {
    checkpoint::open(path, options).map_err(Failure::from)
}

pub fn reader(path: &Path, options: &Options) -> Result<Reader, Failure> {
    let image = Image::new(checkpoint(path, options)?)?;
    Ok(Arc::new(image).open()?)
}

fn code(is_refusal: bool) -> u8 {
    if is_refusal { REFUSED } else { FAILED }
}

impl From<checkpoint::Error> for Failure {
    fn from(error: checkpoint::Error) -> Self {
        match &error {
            checkpoint::Error::Several { path, names } => {
                let mut message = error.to_string();
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
