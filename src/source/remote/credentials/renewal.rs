//! Credentials of S3 that are renewed, because a mount lives for days.
//!
//! They are renewed before they expire, when the store calls them expired, and when their files change.

use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use async_trait::async_trait;
use chrono::{DateTime, TimeDelta, Utc};
use object_store::CredentialProvider;
use object_store::aws::AwsCredential;

use super::super::failure::CredentialError;
use super::aws_profile::{AwsFiles, FileStamp, aws_stamps};
use super::aws_source::{AwsSource, find_source};
use super::aws_token::fetch;
use super::token_service::{TemporaryCredential, TokenServices};
use crate::threads::lock;

/// How long before they expire credentials are renewed, unless they live for less than twice as long. A request that
/// begins with the old ones ends in time.
const RENEWAL_MARGIN: TimeDelta = TimeDelta::minutes(5);

/// Minimum use of credentials, however soon they expire: clocks differ.
const MIN_USE_INTERVAL: Duration = Duration::from_secs(1);

/// The time between two checks of the profile's files for a change.
const FILE_CHECK_INTERVAL: Duration = Duration::from_secs(1);

/// The pause after a renewal that failed while the old credentials are still valid.
const FAILED_RENEWAL_INTERVAL: Duration = Duration::from_secs(10);

/// How long after a renewal requests may still fail with the old credentials.
const RENEWAL_GRACE_INTERVAL: Duration = Duration::from_secs(2);

/// How soon a renewal that did not help is tried again.
const USELESS_RENEWAL_INTERVAL: Duration = Duration::from_secs(60);

/// Decides whether a denied request is worth another attempt. Otherwise a denied request could repeat for ever.
#[derive(Debug, Default)]
pub struct RenewalLimit {
    last: Option<Instant>,
    has_helped: bool,
}

impl RenewalLimit {
    /// Records that a request has succeeded.
    pub fn on_success(&mut self) {
        self.has_helped = true;
    }

    /// Whether a request that failed may have begun before the last renewal.
    pub fn is_in_grace(&self) -> bool {
        self.last.is_some_and(|last| last.elapsed() < RENEWAL_GRACE_INTERVAL)
    }

    /// Whether a renewal may help now.
    fn allows_renewal(&self) -> bool {
        self.has_helped || self.last.is_none_or(|last| last.elapsed() > USELESS_RENEWAL_INTERVAL)
    }

    /// Records a renewal.
    pub fn on_renewal(&mut self) {
        *self = RenewalLimit { last: Some(Instant::now()), has_helped: false };
    }
}

/// Credentials that are in use.
struct HeldCredential {
    credential: Arc<AwsCredential>,
    source: AwsSource,
    /// Both clocks count: one stops while the machine sleeps, the other can be set.
    renew_at: Option<(Instant, DateTime<Utc>)>,
    expires_at: Option<DateTime<Utc>>,
}

#[derive(Default)]
struct RenewalState {
    held: Option<HeldCredential>,
    stamps: [FileStamp; 2],
    checked_at: Option<Instant>,
}

/// Provides the credentials of a profile or of the environment.
pub struct RenewedCredentials {
    services: TokenServices,
    state: tokio::sync::Mutex<RenewalState>,
    is_stale: AtomicBool,
    limit: Mutex<RenewalLimit>,
}

impl std::fmt::Debug for RenewedCredentials {
    // Credentials are never shown.
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("RenewedCredentials").finish_non_exhaustive()
    }
}

/// The source that the environment and the files state now.
fn current_source() -> Result<Option<AwsSource>, CredentialError> {
    let files = AwsFiles::read();
    let profile = files.current_profile().map_err(missing_profile)?;
    find_source(&files, &profile)
}

/// The error of a profile that is in no file.
pub fn missing_profile(name: String) -> CredentialError {
    CredentialError {
        why: format!("there is no profile {name} in ~/.aws"),
        remedy: "set AWS_PROFILE to a profile that exists: aws configure list-profiles".to_owned(),
    }
}

impl RenewedCredentials {
    pub fn new(services: TokenServices) -> RenewedCredentials {
        let (state, is_stale, limit) = Default::default();
        RenewedCredentials { services, state, is_stale, limit }
    }

    /// Records that the store has accepted the credentials.
    pub fn on_success(&self) {
        let mut limit = lock(&self.limit);
        if !limit.has_helped {
            limit.on_success();
        }
    }

    /// Has the next request renew credentials that the store calls expired. Returns whether it may succeed.
    pub fn on_expired(&self) -> bool {
        let mut limit = lock(&self.limit);
        if limit.is_in_grace() {
            return true;
        }
        if !limit.allows_renewal() {
            return false;
        }
        limit.on_renewal();
        self.is_stale.store(true, Relaxed);
        true
    }

    async fn credential(&self) -> Result<Arc<AwsCredential>, object_store::Error> {
        let mut state = self.state.lock().await;
        let is_stale = self.is_stale.swap(false, Relaxed);
        let has_changed = state.is_source_changed();
        if let Some(held) = &state.held
            && !is_stale
            && !has_changed
            && !held.is_due()
        {
            return Ok(Arc::clone(&held.credential));
        }
        match self.renew(&mut state).await {
            Ok(credential) => Ok(credential),
            Err(error) => match &mut state.held {
                Some(held) if !is_stale && !held.is_expired() => {
                    tracing::warn!(why = %error, "credentials cannot be renewed yet");
                    let pause = FAILED_RENEWAL_INTERVAL;
                    held.renew_at = Some((Instant::now() + pause, Utc::now() + pause));
                    Ok(Arc::clone(&held.credential))
                }
                _ => Err(error),
            },
        }
    }

    async fn renew(
        &self,
        state: &mut RenewalState,
    ) -> Result<Arc<AwsCredential>, object_store::Error> {
        let store_error = |error: CredentialError| object_store::Error::Generic {
            store: "S3",
            source: Box::new(error),
        };
        let stamps = aws_stamps();
        let source = current_source().map_err(store_error)?.ok_or_else(|| {
            store_error(CredentialError {
                why: "the profile has no credentials any more".to_owned(),
                remedy: "log in again, or set AWS_PROFILE".to_owned(),
            })
        })?;
        let fetched = fetch(&source, &self.services).await;
        let TemporaryCredential { credential, expires_at } =
            fetched.map_err(|error| error.into_store_error())?;
        let credential = Arc::new(credential);
        tracing::debug!(expires = ?expires_at, "credentials were renewed");
        let renew_at = expires_at.map(renewal_time);
        state.stamps = stamps;
        state.held = Some(HeldCredential {
            credential: Arc::clone(&credential),
            source,
            renew_at,
            expires_at,
        });
        Ok(credential)
    }
}

/// When credentials that expire at a time are renewed.
fn renewal_time(expires_at: DateTime<Utc>) -> (Instant, DateTime<Utc>) {
    let now = Utc::now();
    let lifetime = expires_at - now;
    let wait = lifetime - RENEWAL_MARGIN.min(lifetime / 2);
    let wait = wait.to_std().unwrap_or_default().max(MIN_USE_INTERVAL);
    (Instant::now() + wait, now + wait)
}

impl HeldCredential {
    fn is_due(&self) -> bool {
        self.renew_at.is_some_and(|(instant, time)| Instant::now() >= instant || Utc::now() >= time)
    }

    fn is_expired(&self) -> bool {
        self.expires_at.is_some_and(|time| Utc::now() >= time)
    }
}

impl RenewalState {
    /// Whether the files state another source than that in use. A file that is just being written states none.
    fn is_source_changed(&mut self) -> bool {
        let Some(held) = &self.held else { return true };
        if self.checked_at.is_some_and(|at| at.elapsed() < FILE_CHECK_INTERVAL) {
            return false;
        }
        self.checked_at = Some(Instant::now());
        let stamps = aws_stamps();
        if stamps == self.stamps {
            return false;
        }
        match current_source() {
            Ok(Some(source)) => {
                let has_changed = source != held.source;
                self.stamps = stamps;
                has_changed
            }
            _ => false,
        }
    }
}

#[async_trait]
impl CredentialProvider for RenewedCredentials {
    type Credential = AwsCredential;

    async fn get_credential(&self) -> object_store::Result<Arc<AwsCredential>> {
        self.credential().await
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn credentials_are_renewed_before_they_expire() {
        let wait = |lifetime: TimeDelta| {
            let (instant, _) = renewal_time(Utc::now() + lifetime);
            (instant - Instant::now()).as_secs_f64().round()
        };
        assert_eq!(wait(TimeDelta::hours(1)), 55.0 * 60.0);
        assert_eq!(wait(TimeDelta::minutes(8)), 4.0 * 60.0);
        assert_eq!(wait(TimeDelta::seconds(-100)), 1.0);
    }

    #[test]
    fn a_renewal_that_does_not_help_is_not_repeated() {
        let mut limit = RenewalLimit::default();
        assert!(limit.allows_renewal() && !limit.is_in_grace());
        limit.on_renewal();
        assert!(limit.is_in_grace() && !limit.allows_renewal());
        limit.on_success();
        assert!(limit.allows_renewal());
        let before = Instant::now().checked_sub(USELESS_RENEWAL_INTERVAL * 2);
        limit = RenewalLimit { last: before, has_helped: false };
        assert!(limit.allows_renewal() && !limit.is_in_grace());
    }
}
