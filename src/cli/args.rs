//! The one table of commands and options: parsing, `--help`, completions and man pages come from it.

use std::path::PathBuf;

use clap::{Parser, Subcommand};

/// Shows every model checkpoint as one safe, contiguous .safetensors file, without converting it
///
/// Reads .safetensors (single and sharded) and what torch.save wrote (.pt .pth .bin .ckpt, single and
/// sharded). No pickle is ever executed.
///
/// Exit codes: 0 done, 1 failed, 2 usage, 3 refused checkpoint.
#[derive(Debug, Parser)]
#[command(name = "ckptfs", version)]
pub struct Args {
    #[command(subcommand)]
    pub command: Command,
}

#[derive(Debug, Subcommand)]
pub enum Command {
    Inspect(Inspect),
    Export(Export),
    Verify(Verify),
    Completions(Completions),
    Man(Man),
}

/// Tell what a checkpoint holds, what was chosen, left out or refused, and why
#[derive(Debug, Parser)]
pub struct Inspect {
    #[command(flatten)]
    pub source: Source,
    /// Print JSON (documented in docs/formats.md)
    #[arg(long)]
    pub json: bool,
    /// List every tensor
    #[arg(long)]
    pub tensors: bool,
}

/// Write a checkpoint as a real .safetensors file
///
/// The file appears under its name only when it is complete and on the disk.
#[derive(Debug, Parser)]
pub struct Export {
    #[command(flatten)]
    pub source: Source,
    /// The file to write
    pub out: PathBuf,
    /// Replace OUT if it exists
    #[arg(long)]
    pub force: bool,
}

/// Read every byte of a checkpoint, or compare it with another
///
/// With --against, compares by name, type, shape and values, whatever the two formats are, and exits
/// with 1 if they differ.
#[derive(Debug, Parser)]
pub struct Verify {
    #[command(flatten)]
    pub source: Source,
    /// The checkpoint to compare with
    #[arg(long, value_name = "OTHER")]
    pub against: Option<PathBuf>,
}

/// Which checkpoint, and how to read it.
#[derive(Debug, clap::Args)]
pub struct Source {
    /// A checkpoint file, or a directory that holds one
    pub path: PathBuf,
    /// Show this dictionary of a torch checkpoint (a dotted path, such as state_dict_ema)
    #[arg(long, value_name = "KEY")]
    pub root: Option<String>,
    /// Leave out what cannot be shown instead of refusing the checkpoint
    #[arg(long)]
    pub allow_partial: bool,
    /// Let links and index entries lead out of the directory
    #[arg(long)]
    pub follow_symlinks: bool,
}

/// Print shell completions
#[derive(Debug, Parser)]
pub struct Completions {
    /// The shell to print them for
    pub shell: clap_complete::Shell,
}

/// Print the man page, or write all of them to a directory
#[derive(Debug, Parser)]
pub struct Man {
    /// Write ckptfs.1 and a page for each command here
    #[arg(long, value_name = "DIRECTORY")]
    pub dir: Option<PathBuf>,
}
