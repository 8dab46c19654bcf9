//! Options of remote sources: what the user allows, and how long reads wait.
//!
//! The command line or the program sets [`RemoteOverrides`] for the process. They take precedence over variables of the
//! environment, and these over defaults. A variable with an invalid value is refused by its name.

use std::ops::RangeInclusive;
use std::path::PathBuf;
use std::time::Duration;

use crate::byte_size::parse_size;
use crate::source::disk_cache::CacheOptions;

use super::error::RemoteError;
use super::overrides::{
    CONNECTIONS_RANGE, PERCENT_RANGE, RemoteOverrides, SECONDS_RANGE, remote_overrides,
};

/// Options of all remote sources of a process.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct RemoteOptions {
    /// Allow addresses without encryption.
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

/// The default stall timeout: a loaded store can take some seconds for an answer.
const DEFAULT_STALL_SECONDS: u32 = 20;

/// The default outage timeout: a server that restarts is back sooner.
const DEFAULT_OUTAGE_SECONDS: u32 = 60;

/// The default poll interval: one request for each thousand names costs next to nothing this often.
const DEFAULT_POLL_SECONDS: u32 = 5;

impl RemoteOptions {
    /// Resolves the options of this process.
    pub fn current() -> Result<RemoteOptions, RemoteError> {
        RemoteOptions::new(remote_overrides(), |name| {
            std::env::var_os(name).map(|value| value.to_string_lossy().into_owned())
        })
    }

    /// Resolves overrides, then variables, then defaults.
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
        let outage_timeout =
            seconds(outage_timeout, "CKPTFS_OUTAGE_TIMEOUT", DEFAULT_OUTAGE_SECONDS)?;
        let stall_timeout = seconds(stall_timeout, "CKPTFS_STALL_TIMEOUT", DEFAULT_STALL_SECONDS)?;
        Ok(RemoteOptions {
            allow_http: environment.switch(allow_http, &["CKPTFS_ALLOW_HTTP", "AWS_ALLOW_HTTP"])?,
            anonymous: environment
                .switch(anonymous, &["CKPTFS_ANONYMOUS", "AWS_SKIP_SIGNATURE"])?,
            instance_metadata: environment
                .switch(instance_metadata, &["CKPTFS_INSTANCE_METADATA"])?,
            // Within the outage timeout, a silent connection is replaced at least once.
            stall_timeout: stall_timeout.min(outage_timeout / 2),
            outage_timeout,
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

/// The variables of the environment.
struct Environment<V> {
    variable: V,
}

impl<V: Fn(&str) -> Option<String>> Environment<V> {
    /// The value of a variable. An empty one counts as unset.
    fn value(&self, name: &str) -> Option<String> {
        (self.variable)(name).filter(|value| !value.is_empty())
    }

    /// A switch: the argument, else the first variable that is set.
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

    /// A size, such as `200G`: the argument, else the variable.
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

    /// A number: the argument, else the variable, which must be in the range.
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
        let found = options(none(), &[("CKPTFS_OUTAGE_TIMEOUT", "5")]).unwrap();
        assert_eq!(found.stall_timeout, Duration::from_millis(2500));
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
