//! The one table of commands and options: parsing, `--help`, completions and man pages come from it.

use std::path::PathBuf;

use clap::{Parser, Subcommand};

#[cfg(feature = "mount")]
use super::commands::mount::option_bounds;

/// Shows every model checkpoint as one safe, contiguous .safetensors file, without converting it
///
/// Reads .safetensors (single and sharded) and what torch.save wrote (.pt .pth .bin .ckpt, single and
/// sharded). No pickle is ever executed.
///
/// Exit codes: 0 done, 1 failed, 2 usage, 3 refused checkpoint.
#[derive(Debug, Parser)]
#[command(name = "ckptfs", version)]
pub struct CommandLine {
    #[command(subcommand)]
    pub command: Command,
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

/// Show what a mount of a directory would show, without mounting it
///
/// Each name, what it is and what it is made of; what is hidden, left as it is or refused, and why.
#[derive(Debug, Parser)]
pub struct LsArgs {
    /// A directory, or a single checkpoint, also by the name of its virtual file
    pub path: PathBuf,
    /// Print JSON (documented in docs/formats.md)
    #[arg(long)]
    pub json: bool,
    /// List the directories in it as well
    #[arg(short, long)]
    pub recursive: bool,
    #[command(flatten)]
    pub view_args: ViewArgs,
}

/// What a view shows, and how checkpoints are read for it.
#[derive(Debug, clap::Args)]
pub struct ViewArgs {
    /// Keep the originals visible beside their virtual files
    #[arg(long)]
    pub show_originals: bool,
    /// Never turn what matches this pattern into a virtual file (may be repeated)
    #[arg(long, value_name = "GLOB")]
    pub keep: Vec<String>,
    #[command(flatten)]
    pub parse_args: ParseArgs,
}

/// Tell what a checkpoint holds, what was chosen, left out or refused, and why
#[derive(Debug, Parser)]
pub struct InspectArgs {
    #[command(flatten)]
    pub source: SourceArgs,
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
/// With --against, compares by name, type, shape and values, whatever the two formats are, and exits
/// with 1 if they differ.
#[derive(Debug, Parser)]
pub struct VerifyArgs {
    #[command(flatten)]
    pub source: SourceArgs,
    /// The checkpoint to compare with
    #[arg(long, value_name = "OTHER")]
    pub against: Option<PathBuf>,
}

/// Which checkpoint, and how to read it.
#[derive(Debug, clap::Args)]
pub struct SourceArgs {
    /// A checkpoint file, or a directory that holds one
    pub path: PathBuf,
    #[command(flatten)]
    pub parse_args: ParseArgs,
}

/// How checkpoints are read.
#[derive(Debug, clap::Args)]
pub struct ParseArgs {
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

/// Show checkpoints as .safetensors files that any program reads
///
/// Returns when the mount answers, and leaves a daemon behind (but for --foreground) that ends when
/// the mount is unmounted.
///
/// The daemon logs to --log-file; without one its log goes nowhere. In the foreground it is on standard
/// error.
///
/// Programs find what a file is made of in its extended attributes user.ckptfs.source, .layout and
/// .identity, and the numbers of the mount in user.ckptfs.stats of its root (docs/formats.md).
#[cfg(feature = "mount")]
#[derive(Debug, Parser)]
#[command(args_override_self = true)]
pub struct MountArgs {
    /// A checkpoint file, or a directory of checkpoints and other files
    pub source: PathBuf,
    /// Where to show it: an empty directory, or SOURCE itself
    pub mountpoint: PathBuf,
    #[command(flatten)]
    pub view_args: ViewArgs,
    /// Stay in the foreground, and log to standard error
    #[arg(short, long)]
    pub foreground: bool,
    /// Let other users use the mount
    #[arg(long)]
    pub allow_other: bool,
    /// Show this user (a number) as the owner of every file; needs root
    #[arg(long, value_name = "N", value_parser = option_bounds::owner_parser())]
    pub uid: Option<u32>,
    /// Show this group (a number) for every file; needs root
    #[arg(long, value_name = "N", value_parser = option_bounds::owner_parser())]
    pub gid: Option<u32>,
    /// What all caches together may hold, such as 512M or 2G; 16M at the least, and no more than the machine has
    #[arg(long, value_name = "SIZE", value_parser = option_bounds::parse_memory)]
    pub memory: Option<u64>,
    /// Threads that answer the system, 1 to 256
    #[arg(long, value_name = "N", value_parser = option_bounds::threads_parser())]
    pub threads: Option<u16>,
    /// How far a reader is read ahead of at the most, such as 64M; 0 for not at all, else 1M at the least
    #[arg(long, value_name = "SIZE", value_parser = option_bounds::parse_readahead)]
    pub readahead: Option<u64>,
    /// Serve every byte by the daemon, also of files shown as they are
    #[arg(long)]
    pub no_passthrough: bool,
    /// Keep no note of the order in which virtual files are loaded, and follow none. By default it is kept in
    /// $XDG_CACHE_HOME/ckptfs/orders (~/.cache/ckptfs/orders), a few kB for each layout of a model, and the
    /// next cold load is read ahead by it
    #[arg(long)]
    pub no_remember: bool,
    /// Mount over a directory that is not empty, hiding what is in it
    #[arg(long)]
    pub nonempty: bool,
    /// Log to this file; without it a daemon logs nowhere
    #[arg(long, value_name = "FILE")]
    pub log_file: Option<PathBuf>,
    /// Log more: once what happens, twice every request, thrice everything
    #[arg(short, long, action = clap::ArgAction::Count)]
    pub verbose: u8,
    /// Serve numbers for Prometheus at http://ADDR/metrics; ADDR is local, such as 127.0.0.1:9100
    #[arg(long, value_name = "ADDR", value_parser = super::commands::mount::metrics::parse_address)]
    pub metrics: Option<std::net::SocketAddr>,
    /// Options as mount(8) and fstab give them: any long option above, such as allow_other,memory=2G.
    /// What else fstab lines have (defaults, ro, nofail, _netdev, x-...) is ignored; so is the rw that
    /// mount(8) gives by itself, for the mount is always read-only
    #[arg(short = 'o', value_name = "OPTION,...", action = clap::ArgAction::Append)]
    pub options: Vec<std::ffi::OsString>,
}

/// Take a mount away, and wait for its daemon to end
///
/// Takes away dead mounts too, whose daemon was killed.
#[cfg(feature = "mount")]
#[derive(Debug, Parser)]
#[command(visible_alias = "umount")]
pub struct UnmountArgs {
    /// The directory it is mounted at
    pub path: PathBuf,
    /// Detach at once, used or not: its readers may go on, and its daemon ends with the last of them
    #[arg(short, long)]
    pub lazy: bool,
}

/// Tell which mounts there are and what they do
#[cfg(feature = "mount")]
#[derive(Debug, Parser)]
pub struct StatusArgs {
    /// Print JSON (documented in docs/formats.md)
    #[arg(long)]
    pub json: bool,
    /// Tell it again every second, until Ctrl-C
    #[arg(long)]
    pub watch: bool,
}

/// Tell what this machine can and cannot do for mounts, and what to do about it
///
/// Exits with 1 if mounting cannot work.
#[cfg(feature = "mount")]
#[derive(Debug, Parser)]
pub struct DoctorArgs {
    /// Look at this file or directory too, as a source
    pub path: Option<PathBuf>,
    /// Print JSON
    #[arg(long)]
    pub json: bool,
}

/// Print shell completions
#[derive(Debug, Parser)]
pub struct CompletionsArgs {
    /// The shell to print them for
    pub shell: clap_complete::Shell,
}

/// Print the man page, or write all of them to a directory
#[derive(Debug, Parser)]
pub struct ManArgs {
    /// Write ckptfs.1 and a page for each command here
    #[arg(long, value_name = "DIRECTORY")]
    pub dir: Option<PathBuf>,
}
