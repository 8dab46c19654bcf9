//! All commands and options. Parsing, `--help`, completions and man pages come from this table.

use std::path::PathBuf;

use clap::{Parser, Subcommand};

use crate::checkpoint::ParseOptions;
use crate::view::{KeepRules, ViewOptions};

use super::error::{CommandError, EXIT_USAGE};
#[cfg(feature = "mount")]
use super::option_values;

/// Shows every model checkpoint as one safe, contiguous .safetensors file, without converting it
///
/// Reads .safetensors files (single and sharded) and files of torch.save (.pt .pth .bin .ckpt, single and
/// sharded). Never executes a pickle.
///
/// Exit codes: 0 done, 1 failed, 2 usage, 3 refused checkpoint.
#[derive(Debug, Parser)]
#[command(name = "ckptfs", version)]
pub struct CommandLine {
    #[command(subcommand)]
    pub command: Command,
    /// Print no notes and no progress
    #[arg(short, long, global = true)]
    pub quiet: bool,
}

#[derive(Debug, Subcommand)]
pub enum Command {
    Ls(LsArgs),
    Inspect(InspectArgs),
    Export(ExportArgs),
    Verify(VerifyArgs),
    #[cfg(feature = "mount")]
    Mount(MountArgs),
    #[cfg(feature = "mount")]
    Unmount(UnmountArgs),
    #[cfg(feature = "mount")]
    Status(StatusArgs),
    #[cfg(feature = "mount")]
    Doctor(DoctorArgs),
    Completions(CompletionsArgs),
    Man(ManArgs),
}

/// List what a mount would show, without mounting
///
/// Reports each name, its kind and its source files, and why a name is hidden, shown as it is or refused.
#[derive(Debug, Parser)]
pub struct LsArgs {
    /// A directory, a checkpoint, or the name of its virtual file
    pub path: PathBuf,
    /// Print JSON (docs/formats.md)
    #[arg(long)]
    pub json: bool,
    /// List subdirectories too
    #[arg(short, long)]
    pub recursive: bool,
    #[command(flatten)]
    pub view_args: ViewArgs,
}

/// What a view shows, and how its checkpoints are parsed.
#[derive(Debug, clap::Args)]
pub struct ViewArgs {
    /// Show original files beside their virtual files
    #[arg(long)]
    pub show_originals: bool,
    /// Show files that match GLOB as they are (repeatable)
    #[arg(long, value_name = "GLOB")]
    pub keep: Vec<String>,
    #[command(flatten)]
    pub parse_args: ParseArgs,
}

impl ViewArgs {
    pub fn to_options(&self) -> Result<ViewOptions, CommandError> {
        let ViewArgs { show_originals, keep, parse_args } = self;
        let keep = KeepRules::new(keep).map_err(|e| {
            CommandError::new(EXIT_USAGE, e, "write it as a shell does: optimizer*")
        })?;
        Ok(ViewOptions { parse: parse_args.to_options(), show_originals: *show_originals, keep })
    }
}

/// Describe a checkpoint: tensors, choices, omissions and refusals
#[derive(Debug, Parser)]
pub struct InspectArgs {
    #[command(flatten)]
    pub source: SourceArgs,
    /// Print JSON (docs/formats.md)
    #[arg(long)]
    pub json: bool,
    /// List every tensor
    #[arg(long)]
    pub tensors: bool,
}

/// Write a checkpoint as a real .safetensors file
///
/// The file appears under its name once it is complete and on disk.
#[derive(Debug, Parser)]
pub struct ExportArgs {
    #[command(flatten)]
    pub source: SourceArgs,
    /// The file to write
    pub out: PathBuf,
    /// Replace OUT if it exists
    #[arg(long)]
    pub force: bool,
}

/// Read every byte of a checkpoint, or compare it with another
///
/// With --against, compares names, types, shapes and values across formats. Exits with 1 if they differ.
#[derive(Debug, Parser)]
pub struct VerifyArgs {
    #[command(flatten)]
    pub source: SourceArgs,
    /// The checkpoint to compare with
    #[arg(long, value_name = "OTHER")]
    pub against: Option<PathBuf>,
}

/// A checkpoint, and how to parse it.
#[derive(Debug, clap::Args)]
pub struct SourceArgs {
    /// A checkpoint file, or a directory with one
    pub path: PathBuf,
    #[command(flatten)]
    pub parse_args: ParseArgs,
}

/// How checkpoints are parsed.
#[derive(Debug, clap::Args)]
pub struct ParseArgs {
    /// Select this state dict of a torch checkpoint (a dotted path, such as state_dict_ema)
    #[arg(long, value_name = "KEY")]
    pub root: Option<String>,
    /// Leave out what cannot be shown instead of refusing the checkpoint
    #[arg(long)]
    pub allow_partial: bool,
    /// Follow links and index entries out of the directory
    #[arg(long)]
    pub follow_symlinks: bool,
}

impl ParseArgs {
    pub fn to_options(&self) -> ParseOptions {
        let ParseArgs { root, allow_partial, follow_symlinks } = self;
        ParseOptions {
            root_key: root.clone(),
            allow_partial: *allow_partial,
            follow_symlinks: *follow_symlinks,
        }
    }
}

/// Mount checkpoints as .safetensors files that any program reads
///
/// Returns when the mount answers. A daemon serves the mount until it is unmounted; with --foreground, this
/// process does.
///
/// The daemon logs to --log-file; without it to the journal or the syslog, else to a file of at most 1 MiB in
/// $XDG_STATE_HOME/ckptfs (~/.local/state/ckptfs). `ckptfs status` says where. In the foreground, the log goes to
/// standard error.
///
/// The extended attributes user.ckptfs.source, .layout and .identity of a file tell where its bytes lie. The
/// root's attribute user.ckptfs.stats has the statistics of the mount (docs/formats.md).
#[cfg(feature = "mount")]
#[derive(Debug, Parser)]
#[command(args_override_self = true)]
pub struct MountArgs {
    /// A checkpoint file, or a directory of checkpoints and other files
    pub source: PathBuf,
    /// Where to mount: an empty directory, or SOURCE itself
    pub mountpoint: PathBuf,
    #[command(flatten)]
    pub view_args: ViewArgs,
    /// Stay in the foreground, and log to standard error
    #[arg(short, long)]
    pub foreground: bool,
    /// Let other users use the mount
    #[arg(long)]
    pub allow_other: bool,
    /// Owner of every file, as a number; needs root
    #[arg(long, value_name = "N", value_parser = option_values::owner_parser())]
    pub uid: Option<u32>,
    /// Group of every file, as a number; needs root
    #[arg(long, value_name = "N", value_parser = option_values::owner_parser())]
    pub gid: Option<u32>,
    /// Memory for all caches together, such as 512M or 2G; at least 16M, at most the machine's
    #[arg(long, value_name = "SIZE", value_parser = option_values::parse_memory)]
    pub memory: Option<u64>,
    /// Threads that take requests from the kernel, 1 to 256
    #[arg(long, value_name = "N", value_parser = option_values::threads_parser())]
    pub threads: Option<u16>,
    /// Maximum readahead per stream, such as 64M, at least 1M; 0 disables it
    #[arg(long, value_name = "SIZE", value_parser = option_values::parse_readahead)]
    pub readahead: Option<u64>,
    /// Serve unchanged files through the daemon too
    #[arg(long)]
    pub no_passthrough: bool,
    /// Do not record or replay access order. By default, $XDG_CACHE_HOME/ckptfs/orders
    /// (~/.cache/ckptfs/orders) keeps a few kB for each layout of a model, which speed up its next cold load
    #[arg(long)]
    pub no_remember: bool,
    /// Mount over a directory that is not empty
    #[arg(long)]
    pub nonempty: bool,
    /// Log to this file [default: the journal, the syslog or a file]
    #[arg(long, value_name = "FILE")]
    pub log_file: Option<PathBuf>,
    /// Log more: -v events, -vv requests, -vvv everything
    #[arg(short, long, action = clap::ArgAction::Count)]
    pub verbose: u8,
    /// Serve Prometheus metrics at http://ADDR/metrics; ADDR is local, such as 127.0.0.1:9100
    #[arg(long, value_name = "ADDR", value_parser = option_values::parse_address)]
    pub metrics: Option<std::net::SocketAddr>,
    /// Options as in mount(8) and fstab: any long option above, such as allow_other,memory=2G. Other fstab
    /// options (defaults, ro, nofail, _netdev, x-...) are ignored, and so is the rw that mount(8) adds by
    /// itself: the mount is always read-only
    #[arg(short = 'o', value_name = "OPTION,...", action = clap::ArgAction::Append)]
    pub options: Vec<std::ffi::OsString>,
}

/// Unmount, and wait for the daemon to end
///
/// Also removes dead mounts, whose daemon was killed.
#[cfg(feature = "mount")]
#[derive(Debug, Parser)]
#[command(visible_alias = "umount")]
pub struct UnmountArgs {
    /// The mountpoint of the mount
    pub path: PathBuf,
    /// Detach at once, even if in use; the daemon ends with the last reader
    #[arg(short, long)]
    pub lazy: bool,
}

/// List mounts and their statistics
#[cfg(feature = "mount")]
#[derive(Debug, Parser)]
pub struct StatusArgs {
    /// Print JSON (docs/formats.md)
    #[arg(long)]
    pub json: bool,
    /// Repeat every second, until Ctrl-C
    #[arg(long)]
    pub watch: bool,
}

/// Check this machine's support for mounts, and say how to fix problems
///
/// Exits with 1 if mounting cannot work.
#[cfg(feature = "mount")]
#[derive(Debug, Parser)]
pub struct DoctorArgs {
    /// Check this file or directory too, as a source
    pub path: Option<PathBuf>,
    /// Print the checks as JSON
    #[arg(long)]
    pub json: bool,
}

/// Print shell completions
#[derive(Debug, Parser)]
pub struct CompletionsArgs {
    /// The shell to generate completions for
    pub shell: clap_complete::Shell,
}

/// Print the man page, or write all pages to a directory
#[derive(Debug, Parser)]
pub struct ManArgs {
    /// Write ckptfs.1 and a page for each command here
    #[arg(long, value_name = "DIRECTORY")]
    pub dir: Option<PathBuf>,
}
