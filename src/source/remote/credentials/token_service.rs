//! The services that give temporary credentials: their addresses, their requests, and what they refuse.

use std::path::Path;

use chrono::{DateTime, NaiveDateTime, Utc};
use http_body_util::BodyExt;
use object_store::aws::AwsCredential;
use object_store::client::{HttpClient, HttpRequest};
use reqwest::Url;

use super::super::failure::{CredentialError, TransportError};
use super::super::transport::Connector;
use super::non_empty;

/// The largest file with a token.
const MAX_TOKEN_BYTES: u64 = 64 << 10;

/// The services that give temporary credentials.
#[derive(Clone, Debug)]
pub struct TokenServices {
    pub client: HttpClient,
    /// Asks services of this machine.
    pub connector: Connector,
    /// The region of the store, whose token service is asked.
    pub region: String,
    /// The endpoint for all services that the profile states.
    pub endpoint: Option<String>,
}

/// Credentials, and the time at which they expire.
#[derive(Debug)]
pub struct TemporaryCredential {
    pub credential: AwsCredential,
    /// `None` if it is unknown.
    pub expires_at: Option<DateTime<Utc>>,
}

/// The reason that a source gave no credentials.
#[derive(Debug)]
pub enum TokenError {
    /// It will fail again.
    Refused(CredentialError),
    /// It may succeed later.
    Transport(object_store::client::HttpError),
}

impl From<CredentialError> for TokenError {
    fn from(error: CredentialError) -> TokenError {
        TokenError::Refused(error)
    }
}

/// A refusal with a remedy.
pub fn refused(why: impl Into<String>, remedy: impl Into<String>) -> TokenError {
    TokenError::Refused(CredentialError { why: why.into(), remedy: remedy.into() })
}

impl TokenServices {
    /// The endpoint of a service: its own variable, the variable for all, the profile's endpoint, or the cloud's.
    pub fn endpoint(&self, service: &str, default_endpoint: String) -> String {
        non_empty(&format!("AWS_ENDPOINT_URL_{service}"))
            .or_else(|| non_empty("AWS_ENDPOINT_URL"))
            .or_else(|| self.endpoint.clone())
            .unwrap_or(default_endpoint)
    }

    /// Sends a request, and returns the status and the text of its answer.
    pub async fn send(
        &self,
        request: HttpRequest,
    ) -> Result<(http::StatusCode, String), TokenError> {
        let answer = self.client.execute(request).await.map_err(TokenError::Transport)?;
        let (parts, body) = answer.into_parts();
        let body = body.collect().await.map_err(TokenError::Transport)?.to_bytes();
        Ok((parts.status, String::from_utf8_lossy(&body).into_owned()))
    }
}

/// Reads a file with a token.
pub fn read_token(path: &Path) -> std::io::Result<String> {
    if std::fs::metadata(path)?.len() > MAX_TOKEN_BYTES {
        return Err(std::io::Error::other("it is too long for a token"));
    }
    std::fs::read_to_string(path)
}

/// The refusal of an endpoint that is no address.
pub fn bad_endpoint(endpoint: &str) -> TokenError {
    // It may have a password.
    let endpoint = if endpoint.contains(['@', '?']) { "the endpoint" } else { endpoint };
    refused(
        format!("{endpoint} is no address of a service"),
        "check AWS_ENDPOINT_URL_STS, AWS_ENDPOINT_URL_SSO, AWS_ENDPOINT_URL_SSO_OIDC and AWS_ENDPOINT_URL",
    )
}

/// The refusal of an answer, which is not shown: it may have credentials.
pub fn bad_answer(service: &str, endpoint: &str) -> TokenError {
    refused(
        format!("{service} at {endpoint} answers without credentials"),
        "check that this is its address: AWS_ENDPOINT_URL_STS, AWS_ENDPOINT_URL_SSO, AWS_ENDPOINT_URL_SSO_OIDC, AWS_ENDPOINT_URL",
    )
}

/// The URL of a path at an endpoint.
pub fn parse_endpoint(endpoint: &str, path: &str) -> Result<Url, TokenError> {
    let url = Url::parse(endpoint).ok().filter(Url::has_host);
    let mut url = url.ok_or_else(|| bad_endpoint(endpoint))?;
    if !url.username().is_empty() || url.password().is_some() {
        return Err(refused(
            "the endpoint of a service has a user name or a password",
            "take it out of AWS_ENDPOINT_URL",
        ));
    }
    url.set_path(&format!("{}{path}", url.path().trim_end_matches('/')));
    Ok(url)
}

/// Parses a time as AWS's services and CLI write it.
pub fn parse_time(text: &str) -> Option<DateTime<Utc>> {
    let rfc = DateTime::parse_from_rfc3339(text).map(|time| time.to_utc()).ok();
    // Older versions of the AWS CLI write this form.
    let old = || NaiveDateTime::parse_from_str(text, "%Y-%m-%dT%H:%M:%SUTC").ok();
    rfc.or_else(|| Some(old()?.and_utc()))
}

impl TokenError {
    /// The error as the store's client passes it on.
    pub fn into_store_error(self) -> object_store::Error {
        let source: Box<dyn std::error::Error + Send + Sync> = match self {
            TokenError::Refused(error) => Box::new(error),
            TokenError::Transport(error) => Box::new(error),
        };
        object_store::Error::Generic { store: "S3", source }
    }
}

/// A failure that is tried again.
impl From<TransportError> for TokenError {
    fn from(error: TransportError) -> TokenError {
        TokenError::Transport(error.into())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_time_is_written_in_either_form() {
        for text in ["2030-01-02T03:04:05Z", "2030-01-02T03:04:05UTC", "2030-01-02T04:04:05+01:00"]
        {
            assert_eq!(parse_time(text).unwrap().timestamp(), 1_893_553_445, "{text}");
        }
        assert!(parse_time("soon").is_none());
    }

    #[test]
    fn an_endpoint_is_an_address_without_a_password() {
        let url = |text: &str| parse_endpoint(text, "/a").map(|url| url.to_string());
        assert_eq!(url("http://127.0.0.1:9/x/").unwrap(), "http://127.0.0.1:9/x/a");
        for text in ["", "minio", "https://me:pw@host"] {
            assert!(url(text).is_err(), "{text}");
        }
    }
}
