//! Options of object stores, for each command that takes a source.

/// Options of object stores; empty in a build without them.
#[derive(Debug, clap::Args)]
#[command(next_help_heading = "Object stores")]
pub struct StoreArgs {
    /// Allow addresses without encryption
    #[cfg(feature = "remote")]
    #[arg(long)]
    pub allow_http: bool,
    /// Send no credentials, for public buckets
    #[cfg(feature = "remote")]
    #[arg(long)]
    pub anonymous: bool,
    /// Ask the cloud's metadata server for credentials
    #[cfg(feature = "remote")]
    #[arg(long)]
    pub instance_metadata: bool,
    /// Replace connections silent for this long [default: 20]
    #[cfg(feature = "remote")]
    #[arg(long, value_name = "SECONDS", value_parser = parse::seconds())]
    pub stall_timeout: Option<u32>,
    /// Fail reads if a server is silent this long [default: 60]
    #[cfg(feature = "remote")]
    #[arg(long, value_name = "SECONDS", value_parser = parse::seconds())]
    pub outage_timeout: Option<u32>,
    /// List directories again after this time [default: 5]
    #[cfg(feature = "remote")]
    #[arg(long, value_name = "SECONDS", value_parser = parse::seconds())]
    pub poll_interval: Option<u32>,
    /// Limit concurrent requests of a store, 1 to 256
    #[cfg(feature = "remote")]
    #[arg(long, value_name = "N", value_parser = parse::connections())]
    pub connections: Option<u16>,
    /// Keep fetched bytes in this folder
    #[cfg(feature = "remote")]
    #[arg(long, value_name = "DIR")]
    pub cache_dir: Option<std::path::PathBuf>,
    /// Limit the cache on disk [default: a fifth of the disk]
    #[cfg(feature = "remote")]
    #[arg(long, value_name = "SIZE", value_parser = crate::byte_size::parse_size)]
    pub cache_size: Option<u64>,
    /// Leave this share of the disk free [default: 5]
    #[cfg(feature = "remote")]
    #[arg(long, value_name = "PERCENT", value_parser = parse::percent())]
    pub cache_min_free: Option<u8>,
    /// Neither read nor fill the cache on disk
    #[cfg(feature = "remote")]
    #[arg(long)]
    pub no_cache: bool,
    /// Send no request, and read only the cache on disk
    #[cfg(feature = "remote")]
    #[arg(long, conflicts_with = "no_cache")]
    pub offline: bool,
}

impl StoreArgs {
    /// Sets the options of this process.
    #[cfg(feature = "remote")]
    pub fn apply(&self) {
        let StoreArgs {
            allow_http,
            anonymous,
            instance_metadata,
            stall_timeout,
            outage_timeout,
            poll_interval,
            connections,
            ref cache_dir,
            cache_size,
            cache_min_free,
            no_cache,
            offline,
        } = *self;
        // The environment decides a switch that is not given.
        let switch = |is_on: bool| is_on.then_some(true);
        crate::source::set_remote_options(crate::source::RemoteOverrides {
            allow_http: switch(allow_http),
            anonymous: switch(anonymous),
            instance_metadata: switch(instance_metadata),
            stall_timeout,
            outage_timeout,
            poll_interval,
            connections,
            cache_dir: cache_dir.clone(),
            cache_size,
            cache_min_free,
            no_cache: switch(no_cache),
            offline: switch(offline),
        });
    }

    /// A build without stores refuses their URLs.
    #[cfg(not(feature = "remote"))]
    pub fn apply(&self) {}
}

#[cfg(feature = "remote")]
mod parse {
    use clap::builder::RangedI64ValueParser;

    use crate::source::{CONNECTIONS_RANGE, PERCENT_RANGE, SECONDS_RANGE};

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
