//! All commands and options. Parsing, `--help`, completions and man pages come from this table.

use std::path::PathBuf;

use clap::{Parser, Subcommand};

use crate::recipe::{self, CastRule, GlobRule, RenameRule, Transform};

use super::error::ErrorFormat;
use super::help_text;
#[cfg(feature = "mount")]
use super::option_values;
use super::store_args::StoreArgs;
use super::view_args::{ParseArgs, ViewArgs};

/// Shows every model checkpoint as one safe, contiguous .safetensors file, without converting it
#[derive(Debug, Parser)]
#[command(name = "ckptfs", version, after_help = help_text::CKPTFS)]
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
    Views(ViewsArgs),
    #[cfg(feature = "remote")]
    Fetch(FetchArgs),
    #[cfg(feature = "remote")]
    Cache(CacheArgs),
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

impl Command {
    /// The form in which an error of the command is printed.
    pub fn error_format(&self) -> ErrorFormat {
        ErrorFormat::new(match self {
            Command::Ls(args) => args.json,
            Command::Inspect(args) => args.json,
            Command::Export(args) => args.json,
            Command::Verify(args) => args.json,
            Command::Views(args) => args.json,
            #[cfg(feature = "remote")]
            Command::Fetch(args) => args.json,
            #[cfg(feature = "remote")]
            Command::Cache(args) => args.json,
            #[cfg(feature = "mount")]
            Command::Status(args) => args.json,
            #[cfg(feature = "mount")]
            Command::Doctor(args) => args.json,
            #[cfg(feature = "mount")]
            Command::Mount(_) | Command::Unmount(_) => false,
            Command::Completions(_) | Command::Man(_) => false,
        })
    }

    /// The options of object stores, if the command takes a source.
    pub fn store_args(&self) -> Option<&StoreArgs> {
        match self {
            Command::Ls(args) => Some(&args.store_args),
            Command::Inspect(args) => Some(&args.store_args),
            Command::Export(args) => Some(&args.store_args),
            Command::Verify(args) => Some(&args.store_args),
            Command::Views(args) => Some(&args.store_args),
            #[cfg(feature = "remote")]
            Command::Fetch(args) => Some(&args.store_args),
            #[cfg(feature = "remote")]
            Command::Cache(args) => Some(&args.store_args),
            #[cfg(feature = "mount")]
            Command::Mount(args) => Some(&args.store_args),
            #[cfg(feature = "mount")]
            Command::Doctor(args) => Some(&args.store_args),
            #[cfg(feature = "mount")]
            Command::Unmount(_) | Command::Status(_) => None,
            Command::Completions(_) | Command::Man(_) => None,
        }
    }
}

/// List what a mount would show, without mounting
#[derive(Debug, Parser)]
#[command(after_help = help_text::LS)]
pub struct LsArgs {
    /// Directories, checkpoints, or names of virtual files
    #[arg(value_name = "PATH", default_value = ".")]
    pub paths: Vec<PathBuf>,
    /// Print JSON, as docs/formats.md describes it
    #[arg(long)]
    pub json: bool,
    /// List subdirectories too, at every depth
    #[arg(short, long)]
    pub recursive: bool,
    #[command(flatten)]
    pub view_args: ViewArgs,
    #[command(flatten)]
    pub store_args: StoreArgs,
}

/// Describe a checkpoint: tensors, choices, omissions and refusals
#[derive(Debug, Parser)]
#[command(after_help = help_text::INSPECT)]
pub struct InspectArgs {
    /// Checkpoint files, or directories with one each
    #[arg(value_name = "PATH", required = true)]
    pub paths: Vec<PathBuf>,
    #[command(flatten)]
    pub parse_args: ParseArgs,
    /// Open each PATH as this recipe shows it
    #[arg(long, value_name = "FILE")]
    pub views: Option<PathBuf>,
    /// Print JSON, as docs/formats.md describes it
    #[arg(long)]
    pub json: bool,
    /// List every tensor with type and shape
    #[arg(long)]
    pub tensors: bool,
    #[command(flatten)]
    pub store_args: StoreArgs,
}

/// Write a checkpoint as a real .safetensors file
#[derive(Debug, Parser)]
#[command(after_help = help_text::EXPORT)]
pub struct ExportArgs {
    /// A checkpoint file, or a directory with one
    pub path: PathBuf,
    #[command(flatten)]
    pub parse_args: ParseArgs,
    /// Open PATH as this recipe shows it
    #[arg(long, value_name = "FILE")]
    pub views: Option<PathBuf>,
    #[command(flatten)]
    pub transform_args: TransformArgs,
    /// File or directory to write; - is standard output
    pub out: PathBuf,
    /// Replace OUT if it exists
    #[arg(long)]
    pub force: bool,
    /// Allow a name of another format, such as x.bin
    #[arg(long)]
    pub any_suffix: bool,
    /// Print JSON, as docs/formats.md describes it
    #[arg(long)]
    pub json: bool,
    #[command(flatten)]
    pub store_args: StoreArgs,
}

/// Steps with the tensors, as in a recipe.
#[derive(Clone, Debug, clap::Args)]
pub struct TransformArgs {
    /// Cast matching tensors; the last match counts (repeatable)
    #[arg(long, value_name = "GLOB=DTYPE", value_parser = recipe::cast_argument)]
    pub cast: Vec<CastRule>,
    /// Rename tensors, each rule once, in order (repeatable)
    #[arg(long, value_name = "REGEX=TO", value_parser = recipe::rename_argument)]
    pub rename: Vec<RenameRule>,
    /// Keep only tensors that match (repeatable)
    #[arg(long, value_name = "GLOB", value_parser = recipe::glob_argument)]
    pub only: Vec<GlobRule>,
    /// Leave out tensors that match (repeatable)
    #[arg(long, value_name = "GLOB", value_parser = recipe::glob_argument)]
    pub drop: Vec<GlobRule>,
}

impl TransformArgs {
    pub fn to_transform(&self) -> Transform {
        let TransformArgs { cast, rename, only, drop } = self.clone();
        Transform { cast, rename, only, drop, ..Transform::default() }
    }
}

/// Read every byte of a checkpoint, or compare it with another
#[derive(Debug, Parser)]
#[command(after_help = help_text::VERIFY)]
pub struct VerifyArgs {
    /// Checkpoint files, or directories with one each
    #[arg(value_name = "PATH", required = true)]
    pub paths: Vec<PathBuf>,
    #[command(flatten)]
    pub parse_args: ParseArgs,
    /// Open each PATH as this recipe shows it
    #[arg(long, value_name = "FILE")]
    pub views: Option<PathBuf>,
    /// Compare with this checkpoint, of any format
    #[arg(long, value_name = "OTHER")]
    pub against: Option<PathBuf>,
    /// Print JSON, as docs/formats.md describes it
    #[arg(long)]
    pub json: bool,
    #[command(flatten)]
    pub store_args: StoreArgs,
}

/// Check a recipe against its sources, and print what it shows
#[derive(Debug, Parser)]
#[command(after_help = help_text::VIEWS)]
pub struct ViewsArgs {
    /// What to do with the recipe
    pub action: ViewsAction,
    /// The recipe (see docs/views.md)
    pub file: PathBuf,
    /// Source of the recipe [default: its directory]
    pub source: Option<PathBuf>,
    #[command(flatten)]
    pub parse_args: ParseArgs,
    /// Print JSON, as docs/formats.md describes it
    #[arg(long)]
    pub json: bool,
    #[command(flatten)]
    pub store_args: StoreArgs,
}

/// An action on a recipe.
#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
pub enum ViewsAction {
    /// Check every file, and print what it holds
    Check,
}

/// Fetch checkpoints of a store into the cache on disk
#[cfg(feature = "remote")]
#[derive(Debug, Parser)]
#[command(after_help = help_text::FETCH)]
pub struct FetchArgs {
    /// Directories or checkpoints in stores
    #[arg(value_name = "URL", required = true)]
    pub urls: Vec<PathBuf>,
    #[command(flatten)]
    pub view_args: ViewArgs,
    /// Print JSON, as docs/formats.md describes it
    #[arg(long)]
    pub json: bool,
    #[command(flatten)]
    pub store_args: StoreArgs,
}

/// List, shrink or check the cache of object stores
#[cfg(feature = "remote")]
#[derive(Debug, Parser)]
#[command(after_help = help_text::CACHE)]
pub struct CacheArgs {
    /// What to do with the cache
    pub action: CacheAction,
    /// Only objects at or beneath these URLs
    #[arg(value_name = "URL")]
    pub urls: Vec<PathBuf>,
    /// Prune to this size, least recently used first [default: 0]
    #[arg(long, value_name = "SIZE", value_parser = crate::byte_size::parse_size)]
    pub to: Option<u64>,
    /// Print JSON, as docs/formats.md describes it
    #[arg(long)]
    pub json: bool,
    #[command(flatten)]
    pub store_args: StoreArgs,
}

/// An action on the cache.
#[cfg(feature = "remote")]
#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
pub enum CacheAction {
    /// List cached objects
    Ls,
    /// Remove objects, the least recently used first
    Prune,
    /// Compare all bytes with their checksums
    Verify,
}

/// Loads whose order of reads is recorded.
#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
pub enum RememberedLoads {
    /// Loads from object stores
    Stores,
    /// Loads from any source
    All,
    /// No loads at all
    None,
}

/// Mount checkpoints as .safetensors files that any program reads
#[cfg(feature = "mount")]
#[derive(Debug, Parser)]
#[command(args_override_self = true, after_help = help_text::MOUNT)]
pub struct MountArgs {
    /// A checkpoint file, or a directory of checkpoints
    pub source: PathBuf,
    /// An empty directory, or SOURCE itself
    pub mountpoint: PathBuf,
    #[command(flatten)]
    pub view_args: ViewArgs,
    /// Stay in the foreground, and log to standard error
    #[arg(short, long)]
    pub foreground: bool,
    /// Let other users use the mount
    #[arg(long)]
    pub allow_other: bool,
    /// Owner of every file; needs root [default: as SOURCE]
    #[arg(long, value_name = "N", value_parser = option_values::owner_parser())]
    pub uid: Option<u32>,
    /// Group of every file; needs root [default: as SOURCE]
    #[arg(long, value_name = "N", value_parser = option_values::owner_parser())]
    pub gid: Option<u32>,
    /// Memory for all caches together [default: 5% of what is usable, at most 1G]
    #[arg(long, value_name = "SIZE", value_parser = option_values::parse_memory)]
    pub memory: Option<u64>,
    /// Threads that take requests, 1 to 256 [default: 2]
    #[arg(long, value_name = "N", value_parser = option_values::threads_parser())]
    pub threads: Option<u16>,
    /// Maximum readahead per stream; 0 disables it [default: 32M; in stores 256M]
    #[arg(long, value_name = "SIZE", value_parser = option_values::parse_readahead)]
    pub readahead: Option<u64>,
    /// Serve unchanged files through the daemon too
    #[arg(long)]
    pub no_passthrough: bool,
    /// Loads that are prefetched in their last order
    #[arg(long, value_name = "WHICH", default_value = "stores")]
    pub remember: RememberedLoads,
    /// Mount over a directory that is not empty
    #[arg(long)]
    pub nonempty: bool,
    /// Log to this file [default: the journal, the syslog or a file]
    #[arg(long, value_name = "FILE")]
    pub log_file: Option<PathBuf>,
    /// Log more: -v events, -vv requests, -vvv everything
    #[arg(short, long, action = clap::ArgAction::Count)]
    pub verbose: u8,
    /// Serve Prometheus metrics here, such as 127.0.0.1:9100
    #[arg(long, value_name = "ADDR", value_parser = option_values::parse_address)]
    pub metrics: Option<std::net::SocketAddr>,
    /// Long options as one list: allow_other,memory=2G
    #[arg(short = 'o', value_name = "OPTION,...", action = clap::ArgAction::Append)]
    pub options: Vec<std::ffi::OsString>,
    #[command(flatten)]
    pub store_args: StoreArgs,
}

/// Unmount, and wait for the daemon to end
#[cfg(feature = "mount")]
#[derive(Debug, Parser)]
#[command(visible_alias = "umount", after_help = help_text::UNMOUNT)]
pub struct UnmountArgs {
    /// Mountpoints of mounts of ckptfs
    #[arg(value_name = "PATH", required = true)]
    pub paths: Vec<PathBuf>,
    /// Detach at once, even if in use
    #[arg(short, long)]
    pub lazy: bool,
}

/// List mounts and their statistics
#[cfg(feature = "mount")]
#[derive(Debug, Parser)]
#[command(after_help = help_text::STATUS)]
pub struct StatusArgs {
    /// Print JSON, as docs/formats.md describes it
    #[arg(long)]
    pub json: bool,
    /// Repeat every second, until Ctrl-C
    #[arg(long)]
    pub watch: bool,
}

/// Check this machine and a source, and say how to fix problems
#[cfg(feature = "mount")]
#[derive(Debug, Parser)]
#[command(after_help = help_text::DOCTOR)]
pub struct DoctorArgs {
    /// A file, directory or URL to check as a source
    pub path: Option<PathBuf>,
    /// Print JSON, as docs/formats.md describes it
    #[arg(long)]
    pub json: bool,
    #[command(flatten)]
    pub store_args: StoreArgs,
}

/// Print shell completions
#[derive(Debug, Parser)]
#[command(after_help = help_text::COMPLETIONS)]
pub struct CompletionsArgs {
    /// The shell to generate completions for
    pub shell: clap_complete::Shell,
}

/// Print the man page, or write all pages to a directory
#[derive(Debug, Parser)]
#[command(after_help = help_text::MAN)]
pub struct ManArgs {
    /// Write a page for each command here
    #[arg(long, value_name = "DIRECTORY")]
    pub dir: Option<PathBuf>,
}
