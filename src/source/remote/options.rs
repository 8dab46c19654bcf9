//! What the user allows of remote sources, and how long they are waited for: stated by the environment.

use std::time::Duration;

/// How remote sources are reached.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct RemoteOptions {
    /// Send requests without encryption, where the URL or the endpoint says so.
    pub allow_http: bool,
    /// Send requests without credentials, for public buckets.
    pub anonymous: bool,
    /// Ask the cloud's metadata server for credentials, if there are no others.
    pub instance_metadata: bool,
    /// How long a connection may give nothing, before another takes its place.
    pub stall_timeout: Duration,
    /// How long a read waits for a server that does not answer, before it fails.
    pub outage_timeout: Duration,
}

/// The default of the longest stall: a loaded store can take some seconds for an answer.
const DEFAULT_STALL_TIMEOUT: Duration = Duration::from_secs(20);

/// The default of the longest outage: a server that restarts is back sooner.
const DEFAULT_OUTAGE_TIMEOUT: Duration = Duration::from_secs(60);

impl RemoteOptions {
    /// The options that the environment states.
    pub fn from_environment() -> RemoteOptions {
        let is_set = |names: &[&str]| {
            let value = names.iter().find_map(|name| std::env::var(name).ok());
            value.is_some_and(|value| matches!(&*value.to_ascii_lowercase(), "1" | "true" | "yes"))
        };
        let seconds = |name, default| {
            let text = std::env::var(name).ok();
            text.and_then(|text| text.parse().ok()).map_or(default, Duration::from_secs)
        };
        RemoteOptions {
            allow_http: is_set(&["CKPTFS_ALLOW_HTTP", "AWS_ALLOW_HTTP"]),
            anonymous: is_set(&["CKPTFS_ANONYMOUS", "AWS_SKIP_SIGNATURE"]),
            instance_metadata: is_set(&["CKPTFS_INSTANCE_METADATA"]),
            stall_timeout: seconds("CKPTFS_STALL_TIMEOUT", DEFAULT_STALL_TIMEOUT),
            outage_timeout: seconds("CKPTFS_OUTAGE_TIMEOUT", DEFAULT_OUTAGE_TIMEOUT),
        }
    }
}
