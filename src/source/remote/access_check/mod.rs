//! Tries step by step whether a URL can be read, for `ckptfs doctor`.
//!
//! Each step has a finding. The first that fails ends the check, because later steps need it. No finding has a credential.

mod address;
mod credential_origin;
mod object;
mod server;

use std::path::Path;

use crate::source::url::SourceUrl;

use super::error::RemoteError;
use super::failure::StoreFailure;
use super::options::RemoteOptions;
use super::runtime::block_on;
use super::store::RemoteStore;
use address::ServerAddress;

/// The finding of one step.
#[derive(Debug)]
pub struct AccessStep {
    /// The name of the step, in a word or two.
    pub what: &'static str,
    /// The finding, and what it means.
    pub says: String,
    /// The outcome, with a remedy if it is a failure or a limit.
    pub outcome: StepOutcome,
}

/// Whether a step works.
#[derive(Debug, PartialEq, Eq)]
pub enum StepOutcome {
    /// The step succeeded.
    Works,
    /// The step succeeded with a limit; has a remedy.
    Limited(String),
    /// The step failed; has a remedy.
    Fails(String),
}

impl AccessStep {
    fn works(what: &'static str, says: impl Into<String>) -> AccessStep {
        AccessStep { what, says: says.into(), outcome: StepOutcome::Works }
    }

    fn limited(what: &'static str, says: impl Into<String>, remedy: &str) -> AccessStep {
        AccessStep { what, says: says.into(), outcome: StepOutcome::Limited(remedy.to_owned()) }
    }

    fn fails(what: &'static str, says: impl Into<String>, remedy: &str) -> AccessStep {
        AccessStep { what, says: says.into(), outcome: StepOutcome::Fails(remedy.to_owned()) }
    }

    fn error(what: &'static str, error: &RemoteError) -> AccessStep {
        AccessStep::fails(what, error.to_string(), &error.remedy())
    }

    /// The step of a request that failed.
    fn failure(what: &'static str, failure: StoreFailure) -> AccessStep {
        match failure {
            StoreFailure::Permanent(error @ RemoteError::OtherRegion { .. }) => {
                AccessStep::error("region", &error)
            }
            StoreFailure::Permanent(error) => AccessStep::error(what, &error),
            StoreFailure::Missing => {
                AccessStep::fails(what, "nothing has this name", "check the bucket and the path")
            }
            StoreFailure::Changed => AccessStep::fails(
                what,
                "it changed meanwhile",
                "wait until the program that writes it is done, then try again",
            ),
            StoreFailure::Transient { message, .. } => {
                AccessStep::fails(what, message, "try again")
            }
        }
    }
}

/// The steps so far, the last of which may have failed.
type Steps = Vec<AccessStep>;

/// Tries whether a URL can be read. `None` if the path is no URL.
pub fn check_access(typed: &Path) -> Option<Vec<AccessStep>> {
    const URL: &str = "URL";
    let url = match SourceUrl::parse(typed)? {
        Ok(url) => url,
        Err(error) => {
            return Some(vec![AccessStep::fails(URL, error.to_string(), error.remedy())]);
        }
    };
    let mut steps = vec![AccessStep::works(URL, format!("{url}: {}", describe(&url)))];
    if let Err(failed) = check_store(&url, &mut steps) {
        steps.push(failed);
    }
    Some(steps)
}

fn describe(url: &SourceUrl) -> String {
    use crate::source::url::StoreKind;
    let (host, key) = (&url.host, &url.key);
    let place = match url.kind {
        StoreKind::S3 => format!("the bucket {host} of S3"),
        StoreKind::Gcs => format!("the bucket {host} of Google Cloud Storage"),
        StoreKind::Azure => format!("the container {host} of Azure"),
        StoreKind::Http => format!("the web server {host}"),
    };
    match key.is_empty() {
        true => place,
        false => format!("{key} in {place}"),
    }
}

/// Tries everything behind the URL itself. The error is the step that failed.
fn check_store(url: &SourceUrl, steps: &mut Steps) -> Result<(), AccessStep> {
    let options = RemoteOptions::current().map_err(|e| AccessStep::error("settings", &e))?;
    if options.offline {
        return Err(AccessStep::error("settings", &RemoteError::Offline));
    }
    let address = ServerAddress::of(url).map_err(|e| AccessStep::error("address", &e))?;
    let runs = block_on(async {
        server::check_server(&address, &options, steps).await?;
        // Credentials are of no use to a server that cannot be reached.
        let store = RemoteStore::open(url).map_err(|e| AccessStep::error("credentials", &e))?;
        let origin = credential_origin::describe_origin(url.kind, &options);
        steps.push(AccessStep::works("credentials", origin));
        object::check_objects(&store, url, &address, steps).await
    });
    runs.map_err(|error| AccessStep::error("network", &error))?
}
