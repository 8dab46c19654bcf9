//! Options of stores that the command line or the program sets, above the environment.
//!
//! Each is declared here alone: the command line parses these fields, and their comments are its help.

use std::ops::RangeInclusive;
use std::path::PathBuf;
use std::sync::Mutex;

use crate::threads::lock_holding_forks;

/// Valid times in seconds: an outage of a day is an error.
pub const SECONDS_RANGE: RangeInclusive<u32> = 1..=86_400;

/// Valid numbers of connections: no program has shown a use for more, and each takes a descriptor.
pub const CONNECTIONS_RANGE: RangeInclusive<u16> = 1..=256;

/// Valid percentages of a disk. A disk that must stay wholly free could hold no block.
pub const PERCENT_RANGE: RangeInclusive<u8> = 0..=99;

/// A switch that the command line can set, but not clear.
pub type Switch = Option<bool>;

/// Options that the command line or the program sets. The environment decides those that are `None`.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
#[cfg_attr(feature = "cli", derive(clap::Args))]
pub struct RemoteOverrides {
    /// Allow addresses without encryption
    #[cfg_attr(feature = "cli", arg(long, action = parse::SWITCH, value_parser = parse::switch()))]
    pub allow_http: Switch,
    /// Send no credentials, for public buckets
    #[cfg_attr(feature = "cli", arg(long, action = parse::SWITCH, value_parser = parse::switch()))]
    pub anonymous: Switch,
    /// Ask the cloud's metadata server for credentials
    #[cfg_attr(feature = "cli", arg(long, action = parse::SWITCH, value_parser = parse::switch()))]
    pub instance_metadata: Switch,
    /// Replace connections silent for this long [default: 20]
    #[cfg_attr(feature = "cli", arg(long, value_name = "SECONDS", value_parser = parse::seconds()))]
    pub stall_timeout: Option<u32>,
    /// Fail reads if a server is silent this long [default: 60]
    #[cfg_attr(feature = "cli", arg(long, value_name = "SECONDS", value_parser = parse::seconds()))]
    pub outage_timeout: Option<u32>,
    /// List directories again after this time [default: 5]
    #[cfg_attr(feature = "cli", arg(long, value_name = "SECONDS", value_parser = parse::seconds()))]
    pub poll_interval: Option<u32>,
    /// Limit concurrent requests of a store, 1 to 256
    #[cfg_attr(feature = "cli", arg(long, value_name = "N", value_parser = parse::connections()))]
    pub connections: Option<u16>,
    /// Keep fetched bytes in this folder
    #[cfg_attr(feature = "cli", arg(long, value_name = "DIR"))]
    pub cache_dir: Option<PathBuf>,
    /// Limit the cache on disk [default: a fifth of the disk]
    #[cfg_attr(feature = "cli", arg(long, value_name = "SIZE", value_parser = parse::size))]
    pub cache_size: Option<u64>,
    /// Leave this share of the disk free [default: 5]
    #[cfg_attr(feature = "cli", arg(long, value_name = "PERCENT", value_parser = parse::percent()))]
    pub cache_min_free: Option<u8>,
    /// Neither read nor fill the cache on disk
    #[cfg_attr(feature = "cli", arg(long, action = parse::SWITCH, value_parser = parse::switch()))]
    pub no_cache: Switch,
    /// Send no request, and read only the cache on disk
    #[cfg_attr(feature = "cli", arg(long, action = parse::SWITCH, value_parser = parse::switch()))]
    #[cfg_attr(feature = "cli", arg(conflicts_with = "no_cache"))]
    pub offline: Switch,
}

/// The overrides of this process.
static OVERRIDES: Mutex<Option<RemoteOverrides>> = Mutex::new(None);

/// Sets the options of this process. Open sources keep theirs.
pub fn set_remote_options(overrides: RemoteOverrides) {
    *lock_holding_forks(&OVERRIDES) = Some(overrides);
}

/// The overrides of this process.
pub fn remote_overrides() -> RemoteOverrides {
    lock_holding_forks(&OVERRIDES).clone().unwrap_or_default()
}

/// Parsers of the values on a command line.
#[cfg(feature = "cli")]
mod parse {
    use clap::ArgAction;
    use clap::builder::{BoolValueParser, RangedI64ValueParser, TypedValueParser};

    use super::{CONNECTIONS_RANGE, PERCENT_RANGE, SECONDS_RANGE, Switch};

    pub use crate::byte_size::parse_size as size;

    pub const SWITCH: ArgAction = ArgAction::SetTrue;

    /// A switch that is not given is left to the environment.
    pub fn switch() -> impl TypedValueParser<Value = Switch> {
        BoolValueParser::new().map(|is_on| is_on.then_some(true))
    }

    pub fn seconds() -> RangedI64ValueParser<u32> {
        let (least, most) = SECONDS_RANGE.into_inner();
        clap::value_parser!(u32).range(i64::from(least)..=i64::from(most))
    }

    pub fn percent() -> RangedI64ValueParser<u8> {
        let (least, most) = PERCENT_RANGE.into_inner();
        clap::value_parser!(u8).range(i64::from(least)..=i64::from(most))
    }

    pub fn connections() -> RangedI64ValueParser<u16> {
        let (least, most) = CONNECTIONS_RANGE.into_inner();
        clap::value_parser!(u16).range(i64::from(least)..=i64::from(most))
    }
}
