//! Options of remote sources: what the user allows, and how long reads wait.
//!
//! The command line or the program sets [`RemoteOverrides`] once for the process. The environment sets options that
//! these leave open; all others have defaults. An invalid value is refused by the name of its variable.

use std::ops::RangeInclusive;
use std::path::PathBuf;
use std::sync::Mutex;
use std::time::Duration;

use crate::byte_size::parse_size;
use crate::source::disk_cache::CacheOptions;
use crate::threads::lock;

use super::error::RemoteError;

/// Options of all remote sources of a process.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct RemoteOptions {
    /// Send requests without encryption, where the URL or the endpoint says so.
    pub allow_http: bool,
    /// Send requests without credentials, for public buckets.
    pub anonymous: bool,
    /// Ask the cloud's metadata server for credentials, if there are no others.
    pub instance_metadata: bool,
    /// The time after which a silent connection is replaced.
    pub stall_timeout: Duration,
    /// The time after which a read from a silent server fails.
    pub outage_timeout: Duration,
    /// The age at which the listing of a directory is requested again.
    pub poll_interval: Duration,
    /// Maximum requests of one store in flight; `None` if it adapts to the speed.
    pub connections: Option<u16>,
    /// The cache on disk.
    pub cache: CacheOptions,
    /// Send no request, and read only the cache on disk.
    pub offline: bool,
}

/// Options that the command line or the program sets. The environment decides those that are `None`.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct RemoteOverrides {
    /// Whether to send requests without encryption.
    pub allow_http: Option<bool>,
    /// Whether to send requests without credentials.
    pub anonymous: Option<bool>,
    /// Whether to ask the cloud's metadata server for credentials.
    pub instance_metadata: Option<bool>,
    /// [`RemoteOptions::stall_timeout`], in seconds
    pub stall_timeout: Option<u32>,
    /// [`RemoteOptions::outage_timeout`], in seconds
    pub outage_timeout: Option<u32>,
    /// [`RemoteOptions::poll_interval`], in seconds
    pub poll_interval: Option<u32>,
    /// Maximum requests of one store in flight.
    pub connections: Option<u16>,
    /// The folder of the cache on disk.
    pub cache_dir: Option<PathBuf>,
    /// Maximum bytes of the cache on disk.
    pub cache_size: Option<u64>,
    /// The percentage of its disk that the cache leaves free.
    pub cache_min_free: Option<u8>,
    /// Whether to bypass the cache on disk.
    pub no_cache: Option<bool>,
    /// Whether to send no request at all.
    pub offline: Option<bool>,
}

/// Default of the stall timeout: a loaded store can take some seconds for an answer.
const DEFAULT_STALL_SECONDS: u32 = 20;

/// Default of the outage timeout: a server that restarts is back sooner.
const DEFAULT_OUTAGE_SECONDS: u32 = 60;

/// Default of the poll interval: one request for each thousand names costs next to nothing this often.
const DEFAULT_POLL_SECONDS: u32 = 5;

/// Valid times in seconds: an outage of a day is an error.
pub const SECONDS_RANGE: RangeInclusive<u32> = 1..=86_400;

/// Valid numbers of connections: no program has shown a use for more, and each takes a descriptor.
pub const CONNECTIONS_RANGE: RangeInclusive<u16> = 1..=256;

/// Valid percentages of a disk. A disk that must stay wholly free could hold no block.
pub const PERCENT_RANGE: RangeInclusive<u8> = 0..=99;

/// The overrides of this process.
static OVERRIDES: Mutex<Option<RemoteOverrides>> = Mutex::new(None);

/// Sets the options of this process. Open sources keep theirs.
pub fn set_remote_options(overrides: RemoteOverrides) {
    *lock(&OVERRIDES) = Some(overrides);
}

impl RemoteOptions {
    /// Resolves the options of this process.
    pub fn current() -> Result<RemoteOptions, RemoteError> {
        let overrides = lock(&OVERRIDES).clone().unwrap_or_default();
        RemoteOptions::new(overrides, |name| {
            std::env::var_os(name).map(|value| value.to_string_lossy().into_owned())
        })
    }

    /// Resolves overrides above an environment.
    fn new(
        overrides: RemoteOverrides,
        variable: impl Fn(&str) -> Option<String>,
    ) -> Result<RemoteOptions, RemoteError> {
        let RemoteOverrides {
            allow_http,
            anonymous,
            instance_metadata,
            stall_timeout,
            outage_timeout,
            poll_interval,
            connections,
            cache_dir,
            cache_size,
            cache_min_free,
            no_cache,
            offline,
        } = overrides;
        let environment = Environment { variable };
        let seconds = |argument, name, default| {
            let seconds = environment.number(argument, name, SECONDS_RANGE)?;
            Ok::<_, RemoteError>(Duration::from_secs(seconds.unwrap_or(default).into()))
        };
        Ok(RemoteOptions {
            allow_http: environment.switch(allow_http, &["CKPTFS_ALLOW_HTTP", "AWS_ALLOW_HTTP"])?,
            anonymous: environment
                .switch(anonymous, &["CKPTFS_ANONYMOUS", "AWS_SKIP_SIGNATURE"])?,
            instance_metadata: environment
                .switch(instance_metadata, &["CKPTFS_INSTANCE_METADATA"])?,
            stall_timeout: seconds(stall_timeout, "CKPTFS_STALL_TIMEOUT", DEFAULT_STALL_SECONDS)?,
            outage_timeout: seconds(
                outage_timeout,
                "CKPTFS_OUTAGE_TIMEOUT",
                DEFAULT_OUTAGE_SECONDS,
            )?,
            poll_interval: seconds(poll_interval, "CKPTFS_POLL_INTERVAL", DEFAULT_POLL_SECONDS)?,
            connections: environment.number(
                connections,
                "CKPTFS_CONNECTIONS",
                CONNECTIONS_RANGE,
            )?,
            cache: match environment.switch(no_cache, &["CKPTFS_NO_CACHE"])? {
                true => CacheOptions::disabled(),
                false => CacheOptions::new(
                    cache_dir.or_else(|| environment.value("CKPTFS_CACHE_DIR").map(PathBuf::from)),
                    environment.size(cache_size, "CKPTFS_CACHE_SIZE")?,
                    environment.number(cache_min_free, "CKPTFS_CACHE_MIN_FREE", PERCENT_RANGE)?,
                ),
            },
            offline: environment.switch(offline, &["CKPTFS_OFFLINE"])?,
        })
    }
}

/// Variables that set options without an override.
struct Environment<V> {
    variable: V,
}

impl<V: Fn(&str) -> Option<String>> Environment<V> {
    /// The value of a variable. An empty one counts as unset.
    fn value(&self, name: &str) -> Option<String> {
        (self.variable)(name).filter(|value| !value.is_empty())
    }

    /// An option that is on or off, by the first variable that is set.
    fn switch(&self, argument: Option<bool>, names: &[&'static str]) -> Result<bool, RemoteError> {
        if let Some(argument) = argument {
            return Ok(argument);
        }
        let mut set = names.iter().filter_map(|&name| Some((name, self.value(name)?)));
        let Some((name, value)) = set.next() else { return Ok(false) };
        match &*value.to_ascii_lowercase() {
            "1" | "true" | "yes" | "on" => Ok(true),
            "0" | "false" | "no" | "off" => Ok(false),
            _ => Err(RemoteError::Setting { name, value, expected: "1 or 0".to_owned() }),
        }
    }

    /// A number of bytes, such as `200G`.
    fn size(&self, argument: Option<u64>, name: &'static str) -> Result<Option<u64>, RemoteError> {
        let (None, Some(value)) = (argument, self.value(name)) else { return Ok(argument) };
        match parse_size(&value) {
            Ok(size) => Ok(Some(size)),
            Err(_) => {
                let expected = "a size, such as 200G".to_owned();
                Err(RemoteError::Setting { name, value, expected })
            }
        }
    }

    /// A number in a range.
    fn number<N>(
        &self,
        argument: Option<N>,
        name: &'static str,
        range: RangeInclusive<N>,
    ) -> Result<Option<N>, RemoteError>
    where
        N: std::str::FromStr + PartialOrd + std::fmt::Display,
    {
        let (None, Some(value)) = (&argument, self.value(name)) else { return Ok(argument) };
        match value.trim().parse() {
            Ok(number) if range.contains(&number) => Ok(Some(number)),
            _ => {
                let expected = format!("a whole number from {} to {}", range.start(), range.end());
                Err(RemoteError::Setting { name, value, expected })
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn options(
        overrides: RemoteOverrides,
        variables: &[(&str, &str)],
    ) -> Result<RemoteOptions, RemoteError> {
        RemoteOptions::new(overrides, |name| {
            let found = variables.iter().find(|(variable, _)| *variable == name);
            found.map(|(_, value)| (*value).to_owned())
        })
    }

    #[test]
    fn what_is_stated_counts_before_the_environment() {
        let none = RemoteOverrides::default;
        let defaults = options(none(), &[("CKPTFS_STALL_TIMEOUT", "")]).unwrap();
        assert_eq!((defaults.allow_http, defaults.connections), (false, None));
        assert_eq!(defaults.stall_timeout, Duration::from_secs(20));
        let variables = [
            ("AWS_ALLOW_HTTP", "true"),
            ("CKPTFS_ANONYMOUS", "off"),
            ("AWS_SKIP_SIGNATURE", "true"),
            ("CKPTFS_STALL_TIMEOUT", "7"),
            ("CKPTFS_CONNECTIONS", "9"),
        ];
        let found = options(none(), &variables).unwrap();
        assert_eq!((found.allow_http, found.anonymous, found.connections), (true, false, Some(9)));
        assert_eq!(found.stall_timeout, Duration::from_secs(7));
        let argument = RemoteOverrides {
            allow_http: Some(false),
            stall_timeout: Some(3),
            connections: Some(2),
            ..none()
        };
        let found = options(argument, &variables).unwrap();
        assert_eq!((found.allow_http, found.connections), (false, Some(2)));
        assert_eq!(found.stall_timeout, Duration::from_secs(3));
    }

    #[test]
    fn a_variable_that_means_nothing_is_refused_by_its_name() {
        for (name, value) in [
            ("CKPTFS_ALLOW_HTTP", "maybe"),
            ("AWS_ALLOW_HTTP", "2"),
            ("CKPTFS_ANONYMOUS", "-"),
            ("CKPTFS_INSTANCE_METADATA", "yes please"),
            ("CKPTFS_STALL_TIMEOUT", "abc"),
            ("CKPTFS_STALL_TIMEOUT", "0"),
            ("CKPTFS_OUTAGE_TIMEOUT", "-5"),
            ("CKPTFS_OUTAGE_TIMEOUT", "1e9"),
            ("CKPTFS_POLL_INTERVAL", "86401"),
            ("CKPTFS_CONNECTIONS", "0"),
            ("CKPTFS_CONNECTIONS", "257"),
            ("CKPTFS_CACHE_SIZE", "much"),
            ("CKPTFS_CACHE_MIN_FREE", "100"),
            ("CKPTFS_NO_CACHE", "never"),
            ("CKPTFS_OFFLINE", "2"),
        ] {
            let error = options(RemoteOverrides::default(), &[(name, value)]).unwrap_err();
            assert!(error.to_string().starts_with(&format!("{name} is {value:?}")), "{error}");
        }
    }
}
