//! Tests that the options, their documents and their examples agree.

#![allow(clippy::unwrap_used)] // A failed one fails the test.

use std::collections::BTreeSet;
use std::fs;
use std::path::{Path, PathBuf};

use super::args::CommandLine;
use super::python_commands::python_command_table;
use clap::{Arg, Command, CommandFactory};

fn repository() -> &'static Path {
    Path::new(env!("CARGO_MANIFEST_DIR"))
}

/// All commands, with those of the Python package.
fn commands() -> Vec<Command> {
    let mut table = CommandLine::command().subcommands(python_command_table());
    table.build();
    table.get_subcommands().filter(|command| command.get_name() != "help").cloned().collect()
}

/// The options and arguments of a command that are ours, and not the parser's.
fn own_arguments(command: &Command) -> impl Iterator<Item = &Arg> {
    command.get_arguments().filter(|arg| !["help", "version"].contains(&arg.get_id().as_str()))
}

/// The long options of a command, with their dashes.
fn long_options(command: &Command) -> BTreeSet<String> {
    own_arguments(command).filter_map(Arg::get_long).map(|long| format!("--{long}")).collect()
}

/// README.md and the pages of `docs`.
fn pages() -> Vec<(PathBuf, String)> {
    let listed = fs::read_dir(repository().join("docs")).unwrap();
    let pages = listed.map(|entry| entry.unwrap().path());
    let pages = pages.filter(|path| path.extension().is_some_and(|suffix| suffix == "md"));
    let pages = pages.chain([repository().join("README.md")]);
    pages.map(|path| (path.clone(), fs::read_to_string(path).unwrap())).collect()
}

/// The long options in a text.
fn options_in(text: &str) -> BTreeSet<String> {
    let is_part = |c: char| c.is_ascii_lowercase() || c == '-';
    let words = text.split(|c: char| !is_part(c) && !c.is_ascii_alphanumeric() && c != '_');
    let options = words.filter(|word| word.starts_with("--") && word.len() > 3);
    options.filter(|word| word.chars().all(is_part)).map(str::to_owned).collect()
}

#[test]
fn every_option_has_a_short_help_and_every_command_has_examples() {
    for command in commands() {
        let name = command.get_name();
        for arg in own_arguments(&command) {
            let help = arg.get_help().map(ToString::to_string).unwrap_or_default();
            let words =
                help.split(" [default").next().unwrap_or_default().split_whitespace().count();
            assert!((4..=10).contains(&words), "{name} {}: {words} words: {help}", arg.get_id());
            assert!(arg.get_long_help().is_none(), "{name} {}", arg.get_id());
        }
        let about = command.get_about().map(ToString::to_string).unwrap_or_default();
        assert!((3..=12).contains(&about.split_whitespace().count()), "{name}: {about}");
        let after = command.get_after_help().map(ToString::to_string).unwrap_or_default();
        let examples = after.split_once("Examples:\n").map(|(_, examples)| examples);
        let is_example = |line: &str| line.starts_with("  ckptfs ");
        assert!(examples.is_some_and(|text| text.lines().any(is_example)), "{name}: {after}");
    }
}

#[test]
fn every_example_is_a_valid_command_line() {
    let mut table = CommandLine::command().subcommands(python_command_table());
    table.build();
    let helps: Vec<String> = [&table]
        .into_iter()
        .chain(&commands())
        .filter_map(|command| Some(command.get_after_help()?.to_string()))
        .collect();
    let examples: Vec<&str> = helps
        .iter()
        .flat_map(|help| help.lines())
        .filter(|line| line.starts_with("  ckptfs "))
        .collect();
    assert!(examples.len() > 25, "{examples:?}");
    for example in examples {
        let command =
            ["#", " | ", " > "].iter().fold(example, |rest, end| rest.split(end).next().unwrap());
        let words = command.split_whitespace().map(|word| word.trim_matches('\''));
        let parsed = table.clone().try_get_matches_from(words);
        let is_valid =
            parsed.as_ref().err().is_none_or(|e| e.kind() == clap::error::ErrorKind::DisplayHelp);
        assert!(is_valid, "{example}: {}", parsed.unwrap_err());
    }
}

#[test]
fn every_option_is_documented() {
    let documented = options_in(&pages().into_iter().map(|(_, text)| text).collect::<String>());
    for command in commands() {
        let missing: Vec<_> = long_options(&command).difference(&documented).cloned().collect();
        assert!(missing.is_empty(), "{}: no page has {missing:?}", command.get_name());
    }
}

/// A document's command line, or the first cell of a table's row, names only options that there are.
#[test]
fn every_documented_option_exists() {
    let all: BTreeSet<String> = commands().iter().flat_map(long_options).collect();
    let mut checked = 0;
    for (page, text) in pages() {
        for line in text.lines() {
            let page = page.display();
            if let Some(cell) = line.strip_prefix("| `-").and_then(|rest| rest.split(" | ").next())
            {
                let unknown: Vec<_> =
                    options_in(&format!("-{cell}")).difference(&all).cloned().collect();
                assert!(unknown.is_empty(), "{page}: no command has {unknown:?}: {line}");
                checked += 1;
            }
            for (at, _) in line.match_indices("ckptfs ") {
                // To the end of the command: of code in a sentence, of a comment, of a pipe.
                let rest = line[at..].split(['`', '#', '|', ';', ')']).next().unwrap_or_default();
                let mut words = rest.split_whitespace().skip(1);
                let command = words.next().unwrap_or_default();
                let table = commands();
                let is_named = |one: &&Command| {
                    one.get_name() == command || one.get_all_aliases().any(|alias| alias == command)
                };
                let Some(command) = table.iter().find(is_named) else { continue };
                // What follows belongs to the program that it runs.
                if command.get_name() == "run" {
                    continue;
                }
                let unknown: Vec<_> = options_in(rest)
                    .into_iter()
                    .filter(|option| option != "--help" && !long_options(command).contains(option))
                    .collect();
                assert!(
                    unknown.is_empty(),
                    "{page}: ckptfs {} has no {unknown:?}: {line}",
                    command.get_name()
                );
                checked += 1;
            }
        }
    }
    assert!(checked > 20, "{checked}");
}

#[test]
fn options_of_mount_are_arguments_of_python() {
    let table = commands();
    let mount = table.iter().find(|command| command.get_name() == "mount").unwrap();
    // A mount of Python is always in the background, and returns its notes.
    let options: BTreeSet<String> = long_options(mount)
        .iter()
        .map(|long| long.trim_start_matches('-').replace('-', "_"))
        .filter(|name| !["foreground", "quiet"].contains(&name.as_str()))
        .collect();
    for file in ["python/ckptfs/mounting.py", "python/ckptfs/__init__.pyi"] {
        let text = fs::read_to_string(repository().join(file)).unwrap();
        let signature = text.split_once("\ndef mount(").unwrap().1.split_once("*,").unwrap().1;
        // No default has a parenthesis in it but the empty tuple.
        let signature = signature.replace("()", "[]");
        let signature = signature.split_once(')').unwrap().0;
        let name = |argument: &str| {
            argument.split([':', '=']).next().unwrap_or_default().trim().to_owned()
        };
        let arguments: BTreeSet<String> =
            signature.split(',').map(name).filter(|name| !name.is_empty()).collect();
        assert_eq!(arguments, options, "{file}");
    }
}
