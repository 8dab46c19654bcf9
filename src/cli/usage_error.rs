//! Errors of the argument parser, in the form of all other errors of a command.

use std::ffi::OsString;
use std::path::Path;

use clap::error::ErrorKind;

use crate::shell_word::{shell_text, shell_word};

use super::error::{CommandError, EXIT_OK, EXIT_USAGE, ErrorFormat};

/// Prints the outcome of a command line that was not parsed: help, a version or an error. Returns the exit code.
pub fn report(error: &clap::Error, words: &[OsString], table: &clap::Command) -> u8 {
    match error.kind() {
        ErrorKind::DisplayHelp | ErrorKind::DisplayVersion => {
            // A reader that has gone has seen enough.
            let _ = error.print();
            EXIT_OK
        }
        ErrorKind::DisplayHelpOnMissingArgumentOrSubcommand => {
            let _ = error.print();
            EXIT_USAGE
        }
        kind => {
            let may_be_path =
                matches!(kind, ErrorKind::UnknownArgument | ErrorKind::MissingRequiredArgument);
            let path_error = match kind {
                ErrorKind::InvalidSubcommand => lone_path_error(words),
                _ => may_be_path.then(|| dashed_file_error(words)).flatten(),
            };
            let error =
                path_error.unwrap_or_else(|| command_error(error, &command_name(words, table)));
            error.print(ErrorFormat::from_words(words));
            EXIT_USAGE
        }
    }
}

/// The error of a command line with a file whose name begins with a dash, which the parser takes for an option.
fn dashed_file_error(words: &[OsString]) -> Option<CommandError> {
    let end = words.iter().position(|word| word == "--").unwrap_or(words.len());
    let is_dashed_file = |word: &OsString| {
        word.as_encoded_bytes().starts_with(b"-") && Path::new(word).symlink_metadata().is_ok()
    };
    let file = words[..end].iter().skip(1).find(|word| is_dashed_file(word))?;
    let mut command = "ckptfs".to_owned();
    for (n, word) in words.iter().enumerate().skip(1) {
        command.push(' ');
        command += &match n < end && is_dashed_file(word) {
            // With the dot of the current directory before it.
            true => shell_word(Path::new(word)),
            false => shell_text(&word.to_string_lossy()),
        };
    }
    let message =
        format!("{}: begins with a dash, and was taken for an option", Path::new(file).display());
    Some(CommandError::new(EXIT_USAGE, message, format!("type it as a path: {command}")))
}

/// The error of a command line that has a path where the command should be.
fn lone_path_error(words: &[OsString]) -> Option<CommandError> {
    let mut others = words.iter().skip(1).filter(|word| !word.as_encoded_bytes().starts_with(b"-"));
    let path = Path::new(others.next()?);
    path.symlink_metadata().ok()?;
    let message = format!("{}: is a path, and a command must come first", path.display());
    let word = shell_word(path);
    let remedy = format!(
        "describe it: ckptfs inspect {word}; or see what a mount would show: ckptfs ls {word}; ckptfs --help lists all commands"
    );
    Some(CommandError::new(EXIT_USAGE, message, remedy))
}

/// The command that the words name, as a user types it.
fn command_name(words: &[OsString], table: &clap::Command) -> String {
    let name = table.get_bin_name().unwrap_or("ckptfs");
    let mut words = words.iter().skip(1).filter_map(|word| word.to_str());
    match words.find_map(|word| table.find_subcommand(word)) {
        // `help` has no help of its own.
        Some(command) if command.get_name() != "help" => format!("{name} {}", command.get_name()),
        _ => name.to_owned(),
    }
}

/// The parser's error without its decoration: what is wrong; and its tip, or the usage of the command.
fn command_error(error: &clap::Error, command: &str) -> CommandError {
    let text = error.render().to_string();
    let text = text.strip_prefix("error: ").unwrap_or(&text);
    let (message, rest) = text.split_once("\n\n").unwrap_or((text, ""));
    let message = message.lines().map(str::trim).collect::<Vec<_>>().join(" ");
    let lines = rest.lines().map(str::trim);
    let mut advice: Vec<&str> =
        lines.clone().filter_map(|line| line.strip_prefix("tip: ")).collect();
    if advice.is_empty() && error.kind() == ErrorKind::MissingRequiredArgument {
        advice.extend(lines.filter_map(|line| line.strip_prefix("Usage: ")));
    }
    let help = format!("{command} --help explains all options");
    advice.push(&help);
    CommandError::new(EXIT_USAGE, message.trim(), advice.join("; "))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cli::args::CommandLine;
    use clap::{CommandFactory, Parser};

    fn error_of(words: &[&str]) -> CommandError {
        let error = CommandLine::try_parse_from(words).unwrap_err();
        let words: Vec<OsString> = words.iter().map(OsString::from).collect();
        let mut table = CommandLine::command();
        // This adds the command `help`.
        table.build();
        command_error(&error, &command_name(&words, &table))
    }

    #[test]
    fn the_message_is_one_line_and_the_remedy_names_the_command() {
        for (words, message, remedy) in [
            (
                &["ckptfs", "inspect"][..],
                "the following required arguments were not provided: <PATH>...",
                "ckptfs inspect <PATH>...; ckptfs inspect --help explains all options",
            ),
            (
                &["ckptfs", "export", "--forse", "a", "b"],
                "unexpected argument '--forse' found",
                "a similar argument exists: '--force'; ckptfs export --help explains all options",
            ),
            (
                &["ckptfs", "completions", "ash"],
                "invalid value 'ash' for '<SHELL>' [possible values: bash, elvish, fish, powershell, zsh]",
                "a similar value exists: 'bash'; ckptfs completions --help explains all options",
            ),
            (
                &["ckptfs", "help", "--help"],
                "unrecognized subcommand '--help'",
                "ckptfs --help explains all options",
            ),
            (
                &["ckptfs", "exprt"],
                "unrecognized subcommand 'exprt'",
                "a similar subcommand exists: 'export'; ckptfs --help explains all options",
            ),
        ] {
            let error = error_of(words);
            assert_eq!((&*error.message, &*error.remedy), (message, remedy), "{words:?}");
        }
    }
}
