//! What the numbers given to `mount` may be: outside of that is usage, told with the limit.

use clap::builder::RangedI64ValueParser;

use crate::mount::{MAX_THREADS, MIN_MEMORY_BYTES, MIN_READAHEAD_BYTES, machine_memory};

use crate::cli::sizes;

/// The value of `--memory`. More than there is would have the system kill the daemon.
pub fn parse_memory(text: &str) -> Result<u64, String> {
    sizes::parse_size_within(text, MIN_MEMORY_BYTES, machine_memory())
}

/// The value of `--readahead`. What is read ahead is held in memory, so it is no more than there is.
pub fn parse_readahead(text: &str) -> Result<u64, String> {
    match sizes::parse_size(text)? {
        0 => Ok(0),
        _ => sizes::parse_size_within(text, MIN_READAHEAD_BYTES, machine_memory())
            .map_err(|limit| format!("{limit}, or 0 for not at all")),
    }
}

/// The value of `--threads`.
pub fn threads_parser() -> RangedI64ValueParser<u16> {
    clap::value_parser!(u16).range(1..=i64::from(MAX_THREADS))
}

/// The values of `--uid` and `--gid`. The last number of all stands for nobody in the system's calls.
pub fn owner_parser() -> RangedI64ValueParser<u32> {
    clap::value_parser!(u32).range(0..i64::from(u32::MAX))
}
