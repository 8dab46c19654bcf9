//! Authorization of a store's requests, and the reaction to a denial.

use std::sync::{Arc, Mutex};

use super::super::error::RemoteError;
use super::super::failure::StoreFailure;
use super::super::secret_query::SecretQuery;
use super::renewal::{RenewalLimit, RenewedCredentials};
use crate::threads::lock;

/// Credentials and query string that can be renewed. Credentials that clients find by themselves are not in it.
#[derive(Debug, Default)]
pub struct Authorization {
    pub credentials: Option<Arc<RenewedCredentials>>,
    pub query: Option<Arc<SecretQuery>>,
    query_limit: Mutex<RenewalLimit>,
}

impl Authorization {
    /// Authorization by the query string of a URL, if there is one.
    pub fn with_query(query: Option<SecretQuery>) -> Authorization {
        Authorization { query: query.map(Arc::new), ..Authorization::default() }
    }

    /// Records that a request has succeeded.
    pub fn on_success(&self) {
        if let Some(credentials) = &self.credentials {
            credentials.on_success();
        }
    }

    /// The failure of a request without its secrets. It is transient if what authorizes the next one is new.
    pub fn on_failure(&self, failure: StoreFailure) -> StoreFailure {
        if let Some(query) = &self.query {
            return self.on_query_failure(query, failure);
        }
        match (failure, &self.credentials) {
            (StoreFailure::Permanent(RemoteError::Expired { message }), Some(credentials)) => {
                match credentials.on_expired() {
                    true => StoreFailure::transient(format!("the credentials expired: {message}")),
                    false => StoreFailure::Permanent(RemoteError::Expired { message }),
                }
            }
            (failure, _) => failure,
        }
    }

    fn on_query_failure(&self, query: &SecretQuery, failure: StoreFailure) -> StoreFailure {
        match failure {
            StoreFailure::Permanent(
                RemoteError::Denied { message } | RemoteError::Expired { message },
            ) => {
                // Redacts by the query that was sent, before another is read.
                let message = query.redact(&message);
                let mut limit = lock(&self.query_limit);
                match query.refresh() {
                    Ok(true) => limit.on_renewal(),
                    Ok(false) if limit.is_in_grace() => {}
                    Ok(false) => {
                        let origin = query.source().clone();
                        let error = RemoteError::QueryDenied { origin, message };
                        return StoreFailure::Permanent(error);
                    }
                    Err(error) => return StoreFailure::Permanent(error),
                }
                StoreFailure::transient("the query string was denied, and read again")
            }
            StoreFailure::Permanent(RemoteError::Other { message }) => {
                let message = query.redact(&message);
                StoreFailure::Permanent(RemoteError::Other { message })
            }
            StoreFailure::Transient { message, retry_after } => {
                StoreFailure::Transient { message: query.redact(&message), retry_after }
            }
            failure => failure,
        }
    }
}
