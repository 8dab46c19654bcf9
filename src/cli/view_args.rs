//! Options that select what a view shows, shared by several commands.

use std::path::PathBuf;

use crate::checkpoint::ParseOptions;
#[cfg(feature = "mount")]
use crate::shell_word::{shell_text, shell_word};
use crate::source;
use crate::view::{KeepRules, RecipeSource, ViewOptions};

use super::error::{CommandError, EXIT_USAGE};

/// What a view shows, and how its checkpoints are parsed.
#[derive(Debug, clap::Args)]
pub struct ViewArgs {
    /// Show original files beside their virtual files
    #[arg(long)]
    pub show_originals: bool,
    /// Show matching files as they are (repeatable)
    #[arg(long, value_name = "GLOB")]
    pub keep: Vec<String>,
    /// Also show a recipe's files; auto is the source's .ckptfs.toml
    #[arg(long, value_name = "FILE")]
    pub views: Option<PathBuf>,
    #[command(flatten)]
    pub parse_args: ParseArgs,
}

impl ViewArgs {
    pub fn to_options(&self) -> Result<ViewOptions, CommandError> {
        let ViewArgs { show_originals, keep, views, parse_args } = self;
        let keep = KeepRules::new(keep).map_err(|e| {
            CommandError::new(EXIT_USAGE, e, "write it as a shell does: optimizer*")
        })?;
        let recipe = views.as_deref().map(RecipeSource::from_option).transpose()?;
        let parse = parse_args.to_options();
        Ok(ViewOptions { parse, show_originals: *show_originals, keep, recipe })
    }

    /// The same options, quoted for a shell.
    #[cfg(feature = "mount")]
    pub fn to_shell_options(&self) -> Vec<String> {
        let ViewArgs { show_originals, keep, views, parse_args } = self;
        let ParseArgs { root, allow_partial, follow_symlinks, ranks, delta_base } = parse_args;
        let mut options = Vec::new();
        let flags = [
            (*show_originals, "--show-originals"),
            (*allow_partial, "--allow-partial"),
            (*follow_symlinks, "--follow-symlinks"),
        ];
        options
            .extend(flags.iter().filter(|(is_set, _)| *is_set).map(|(_, flag)| (*flag).to_owned()));
        options.extend(keep.iter().map(|glob| format!("--keep={}", shell_text(glob))));
        options.extend(root.iter().map(|key| format!("--root={}", shell_text(key))));
        options.extend(ranks.iter().map(|count| format!("--ranks {count}")));
        options.extend(delta_base.iter().map(|path| format!("--delta-base {}", shell_word(path))));
        options.extend(views.iter().map(|option| {
            // The Python package passes the recipe itself.
            let is_json = RecipeSource::is_json(option);
            format!("--views {}", if is_json { "RECIPE".to_owned() } else { shell_word(option) })
        }));
        options
    }
}

/// How checkpoints are parsed.
#[derive(Debug, clap::Args)]
pub struct ParseArgs {
    /// Select this state dict, such as state_dict_ema
    #[arg(long, value_name = "KEY")]
    pub root: Option<String>,
    /// Leave out what cannot be shown, instead of refusing
    #[arg(long)]
    pub allow_partial: bool,
    /// Follow links and index entries out of the directory
    #[arg(long)]
    pub follow_symlinks: bool,
    /// Refuse per-rank files unless they are of N ranks
    #[arg(long, value_name = "N")]
    pub ranks: Option<u32>,
    /// Base of a trainer's first delta
    #[arg(long, value_name = "PATH")]
    pub delta_base: Option<PathBuf>,
}

impl ParseArgs {
    pub fn to_options(&self) -> ParseOptions {
        let ParseArgs { root, allow_partial, follow_symlinks, ranks, delta_base } = self;
        ParseOptions {
            root_key: root.clone(),
            allow_partial: *allow_partial,
            follow_symlinks: *follow_symlinks,
            ranks: *ranks,
            delta_base: delta_base.as_deref().map(source::absolute_path),
        }
    }
}

#[cfg(all(test, feature = "mount"))]
mod tests {
    use clap::Parser;

    use super::*;

    #[derive(Debug, Parser)]
    struct TestArgs {
        #[command(flatten)]
        view_args: ViewArgs,
    }

    fn repeated(options: &[&str]) -> Vec<String> {
        let command_line = ["ckptfs"].iter().chain(options);
        TestArgs::try_parse_from(command_line).expect("known options").view_args.to_shell_options()
    }

    #[test]
    fn every_option_is_repeated() {
        let options = [
            "--show-originals",
            "--allow-partial",
            "--follow-symlinks",
            "--keep=-a*",
            "--keep=b",
            "--root=-ema",
            "--ranks 4",
            "--delta-base base",
            "--views v.toml",
        ];
        let arguments: Vec<&str> = options.iter().flat_map(|option| option.split(' ')).collect();
        let quoted = options.map(|option| option.replace("-a*", "'-a*'"));
        assert_eq!(repeated(&arguments), quoted);
        assert_eq!(repeated(&[]), [""; 0]);
    }

    #[test]
    fn a_recipe_that_has_no_path_has_a_placeholder() {
        assert_eq!(repeated(&["--views", "{\"file\": []}"]), ["--views RECIPE"]);
    }
}
