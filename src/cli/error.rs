//! The error of a command: its exit code, its message and its remedy, printed as text or as JSON.

use std::ffi::OsString;
use std::io::{self, Write};

use crate::checkpoint::CheckpointError;
use crate::export::ExportError;
#[cfg(feature = "remote")]
use crate::fetch::FetchError;
#[cfg(feature = "mount")]
use crate::mount::MountError;
use crate::recipe::RecipeError;
use crate::view::ViewError;
use crate::virtual_file::VirtualFileError;

use super::terminal_text::one_line;

/// The failure of a command. The daemon of a mount sends it to the process that started it.
#[derive(Clone, Debug, serde::Serialize)]
#[cfg_attr(feature = "mount", derive(serde::Deserialize))]
pub struct CommandError {
    pub code: u8,
    /// Empty if the output has reported the failure already.
    pub message: String,
    /// What the message is about, such as files or tensors: a line for each.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub details: Vec<String>,
    pub remedy: String,
}

pub const EXIT_OK: u8 = 0;
pub const EXIT_FAILED: u8 = 1;
pub const EXIT_USAGE: u8 = 2;
pub const EXIT_REFUSED: u8 = 3;

/// The form in which errors are printed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ErrorFormat {
    Text,
    /// One line of JSON for each error, for programs that read the output as JSON.
    Json,
}

impl ErrorFormat {
    /// The format for a command with or without `--json`.
    pub fn new(is_json: bool) -> ErrorFormat {
        if is_json { ErrorFormat::Json } else { ErrorFormat::Text }
    }

    /// The format that the words of a command line ask for. They need not be valid.
    pub fn from_words(words: &[OsString]) -> ErrorFormat {
        let mut options = words.iter().take_while(|word| *word != "--");
        ErrorFormat::new(options.any(|word| word == "--json"))
    }
}

impl CommandError {
    pub fn new(code: u8, message: impl ToString, remedy: impl ToString) -> Self {
        let (message, remedy) = (message.to_string(), remedy.to_string());
        CommandError { code, message, details: Vec::new(), remedy }
    }

    /// A failure that the output has reported.
    pub fn already_reported(code: u8) -> Self {
        CommandError::new(code, "", "")
    }

    /// The message and its details, for a place where they stand in one line.
    pub fn whole_message(&self) -> String {
        [std::slice::from_ref(&self.message), &self.details].concat().join(" ")
    }

    /// Prints it to standard error. If that fails too, nothing is left to do.
    pub fn print(&self, format: ErrorFormat) {
        if format == ErrorFormat::Json {
            if !self.message.is_empty() {
                let _ = writeln!(io::stderr(), "{}", serde_json::json!({ "error": self }));
            }
            return;
        }
        if !self.message.is_empty() {
            let _ = writeln!(io::stderr(), "ckptfs: {}", one_line(&self.message));
        }
        for line in &self.details {
            let _ = writeln!(io::stderr(), "    {}", one_line(line));
        }
        if !self.remedy.is_empty() {
            let _ = writeln!(io::stderr(), "  what to do: {}", one_line(&self.remedy));
        }
    }
}

impl From<io::Error> for CommandError {
    fn from(error: io::Error) -> Self {
        let message = format!("cannot write the output: {error}");
        let remedy = "free space on the device that standard output is written to, and check that you may write there";
        CommandError::new(EXIT_FAILED, message, remedy)
    }
}

fn refusal_exit_code(is_refusal: bool) -> u8 {
    if is_refusal { EXIT_REFUSED } else { EXIT_FAILED }
}

impl From<CheckpointError> for CommandError {
    fn from(error: CheckpointError) -> Self {
        match &error {
            CheckpointError::SeveralCheckpoints { path, names, .. } => {
                let message = format!("{}: several checkpoints in this directory:", path.display());
                let details = list_details(names, |name| path.join(name).display().to_string());
                CommandError { details, ..CommandError::new(EXIT_USAGE, message, error.remedy()) }
            }
            CheckpointError::RefusedEntries { path, refused, tensor_count } => {
                let rest = if *tensor_count == 0 { ", and nothing else" } else { "" };
                let path = path.display();
                let message = format!("{path}: has entries that cannot be shown{rest}:");
                let details = list_details(refused, ToString::to_string);
                CommandError { details, ..CommandError::new(EXIT_REFUSED, message, error.remedy()) }
            }
            _ => CommandError::new(refusal_exit_code(error.is_refusal()), &error, error.remedy()),
        }
    }
}

/// The most files or tensors that a message lists.
const MAX_DETAILS_COUNT: usize = 10;

/// A line for each of the first items, and one for the rest.
fn list_details<T>(items: &[T], line: impl Fn(&T) -> String) -> Vec<String> {
    let mut lines: Vec<String> = items.iter().take(MAX_DETAILS_COUNT).map(line).collect();
    if items.len() > MAX_DETAILS_COUNT {
        lines.push(format!("and {} more", items.len() - MAX_DETAILS_COUNT));
    }
    lines
}

impl From<RecipeError> for CommandError {
    fn from(error: RecipeError) -> Self {
        let code = if matches!(error, RecipeError::Io { .. }) { EXIT_FAILED } else { EXIT_REFUSED };
        CommandError::new(code, &error, error.remedy())
    }
}

impl From<VirtualFileError> for CommandError {
    fn from(error: VirtualFileError) -> Self {
        match error {
            VirtualFileError::Refused(error) => CommandError::from(*error),
            error => {
                CommandError::new(refusal_exit_code(error.is_refusal()), &error, error.remedy())
            }
        }
    }
}

impl From<ViewError> for CommandError {
    fn from(error: ViewError) -> Self {
        CommandError::new(refusal_exit_code(error.is_refusal()), &error, error.remedy())
    }
}

impl From<ExportError> for CommandError {
    fn from(error: ExportError) -> Self {
        match error {
            ExportError::VirtualFile(error) => CommandError::from(error),
            error @ ExportError::OtherSuffix { .. } => {
                CommandError::new(EXIT_USAGE, &error, error.remedy())
            }
            error => CommandError::new(EXIT_FAILED, &error, error.remedy()),
        }
    }
}

#[cfg(feature = "remote")]
impl From<FetchError> for CommandError {
    fn from(error: FetchError) -> Self {
        match error {
            FetchError::View(error) => CommandError::from(error),
            FetchError::VirtualFile(error) => CommandError::from(error),
            error => CommandError::new(EXIT_FAILED, &error, error.remedy()),
        }
    }
}

#[cfg(feature = "mount")]
impl From<MountError> for CommandError {
    fn from(error: MountError) -> Self {
        match error {
            MountError::View(error) => CommandError::from(error),
            MountError::NoCheckpoint(error) => CommandError::from(error),
            error => CommandError::new(EXIT_FAILED, &error, error.remedy()),
        }
    }
}
