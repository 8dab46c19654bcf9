//! Failures of requests, sorted by the reaction that they need.

use std::time::Duration;

use http::StatusCode;
use object_store::client::{HttpError, HttpErrorKind};

use super::error::RemoteError;

/// The failure of a request, by the reaction that it needs.
#[derive(Debug)]
pub enum StoreFailure {
    /// No object has that name.
    Missing,
    /// The object has another version now.
    Changed,
    /// It will fail again.
    Permanent(RemoteError),
    /// It may succeed later.
    Transient {
        /// The failure in words.
        message: String,
        /// The time that the server asks to wait.
        retry_after: Option<Duration>,
    },
}

impl StoreFailure {
    /// A failure after which the same request may succeed.
    pub fn transient(message: impl Into<String>) -> StoreFailure {
        StoreFailure::Transient { message: message.into(), retry_after: None }
    }
}

/// The reason that a request has no credentials.
#[derive(Clone, Debug, thiserror::Error)]
#[error("{why}")]
pub struct CredentialError {
    /// What is wrong. It has no secret.
    pub why: String,
    /// What the user can do about it.
    pub remedy: String,
}

impl From<CredentialError> for RemoteError {
    fn from(CredentialError { why, remedy }: CredentialError) -> RemoteError {
        RemoteError::BadCredentials { why, remedy }
    }
}

/// The reason that a request has no usable answer.
#[derive(Debug, thiserror::Error)]
pub enum TransportError {
    /// The server is overloaded, or failed.
    #[error("HTTP {status}")]
    Busy { status: StatusCode, retry_after: Option<Duration> },
    /// The connection failed or broke.
    #[error("{0}")]
    Connection(String),
    /// The server's certificate is not accepted.
    #[error("{0}")]
    Encryption(String),
    /// The address is not encrypted.
    #[error("the address is not encrypted")]
    PlainHttp,
    /// A metadata server, which the user has not allowed.
    #[error(
        "no metadata server is asked; --instance-metadata (CKPTFS_INSTANCE_METADATA=1) allows it"
    )]
    Metadata,
    /// A redirect that is not followed.
    #[error("a redirect to {host} is not followed")]
    Redirect { host: String, why: &'static str },
    /// A redirect to a scheme other than http and https.
    #[error("a redirect to {0} is not followed")]
    RedirectScheme(String),
    /// An answer in another encoding than the object is stored in.
    #[error("the answer has the Content-Encoding {0}")]
    Encoded(String),
    /// An object of a size that no file has.
    #[error("an impossible size")]
    ImpossibleSize,
    /// An answer that is no part of an object, and longer than this many bytes.
    #[error("the answer is longer than {0} bytes")]
    TooLong(usize),
    /// The name of a directory: the server redirects to it with a slash.
    #[error("it is a directory, which this server does not list")]
    NoListing,
    /// The bucket is in another region.
    #[error("the bucket is in the region {0}")]
    OtherRegion(String),
}

impl TransportError {
    /// The error of a request that another host redirected to this one.
    pub fn after_redirect_to(self, host: &str) -> TransportError {
        match self {
            TransportError::Connection(message) => {
                TransportError::Connection(format!("{host}, to which it redirects: {message}"))
            }
            other => other,
        }
    }

    /// The failure that the reader handles.
    pub fn to_failure(&self) -> StoreFailure {
        StoreFailure::Permanent(match self {
            TransportError::Busy { status, retry_after } => {
                let message = format!("HTTP {status}");
                return StoreFailure::Transient { message, retry_after: *retry_after };
            }
            TransportError::Connection(message) => return StoreFailure::transient(message),
            TransportError::NoListing => RemoteError::NoListing,
            TransportError::Encryption(why) => RemoteError::Encryption { why: why.clone() },
            TransportError::PlainHttp => RemoteError::PlainHttp,
            TransportError::Redirect { host, why } => {
                RemoteError::Redirect { host: host.clone(), why }
            }
            TransportError::RedirectScheme(target) => {
                RemoteError::RedirectScheme { target: target.clone() }
            }
            TransportError::Encoded(encoding) => {
                RemoteError::Encoded { encoding: encoding.clone() }
            }
            TransportError::ImpossibleSize => RemoteError::ImpossibleSize,
            TransportError::TooLong(limit) => RemoteError::AnswerTooLong { limit: *limit },
            TransportError::OtherRegion(region) => {
                RemoteError::OtherRegion { region: region.clone() }
            }
            TransportError::Metadata => RemoteError::Other { message: self.to_string() },
        })
    }
}

impl From<TransportError> for HttpError {
    fn from(error: TransportError) -> HttpError {
        // The store's client must not retry by itself: reads are resumed where they broke.
        HttpError::new(HttpErrorKind::Unknown, error)
    }
}

impl From<object_store::Error> for StoreFailure {
    fn from(error: object_store::Error) -> StoreFailure {
        if let Some(error) = find_source::<TransportError>(&error) {
            return error.to_failure();
        }
        if let Some(CredentialError { why, remedy }) = find_source::<CredentialError>(&error) {
            let (why, remedy) = (why.clone(), remedy.clone());
            return StoreFailure::Permanent(RemoteError::BadCredentials { why, remedy });
        }
        match error {
            object_store::Error::NotFound { .. } => StoreFailure::Missing,
            object_store::Error::Precondition { .. } | object_store::Error::NotModified { .. } => {
                StoreFailure::Changed
            }
            object_store::Error::PermissionDenied { source, .. }
            | object_store::Error::Unauthenticated { source, .. } => {
                let message = describe(&*source);
                StoreFailure::Permanent(match says_expired(&*source) {
                    true => RemoteError::Expired { message },
                    false => RemoteError::Denied { message },
                })
            }
            object_store::Error::NotSupported { .. } => {
                StoreFailure::Permanent(RemoteError::NoRanges)
            }
            error => {
                let message = describe(&error);
                if says_expired(&error) || is_login_refused(&error) {
                    return StoreFailure::Permanent(RemoteError::Expired { message });
                }
                // For listings, only the client's words have the status.
                let is_denied =
                    DENIED_STATUSES.iter().any(|words| error.to_string().contains(words));
                StoreFailure::Permanent(match error.to_string().contains("non-partial response") {
                    true => RemoteError::NoRanges,
                    false if is_denied => RemoteError::Denied { message },
                    false => RemoteError::Other { message },
                })
            }
        }
    }
}

/// Words of the client for a failed request for a token.
const TOKEN_REQUEST: &str = "Error performing token request";

/// The codes of OAuth for a login or a key that is not, or no longer, valid.
const LOGIN_REFUSALS: [&str; 3] = ["invalid_grant", "invalid_client", "unauthorized_client"];

/// Whether the service for tokens refuses a login. That of a machine without an identity fails by other codes.
fn is_login_refused(error: &object_store::Error) -> bool {
    let text = error.to_string();
    text.contains(TOKEN_REQUEST) && LOGIN_REFUSALS.iter().any(|code| text.contains(code))
}

/// Words of the client for a denial.
const DENIED_STATUSES: [&str; 2] = ["status code: 401", "status code: 403"];

/// The codes by which S3 and servers of its protocol say that credentials have expired, or were replaced.
const EXPIRY_CODES: [&str; 5] = [
    "ExpiredToken",
    "ExpiredTokenException",
    "TokenRefreshRequired",
    "InvalidToken",
    "InvalidAccessKeyId",
];

/// Whether an answer says that other credentials are needed.
fn says_expired(error: &dyn std::error::Error) -> bool {
    let text = error.to_string();
    answer_code(&text).is_some_and(|code| EXPIRY_CODES.contains(&code))
}

/// Whether a request got no answer at all.
pub fn is_unanswered(error: &object_store::Error) -> bool {
    let found = find_source::<TransportError>(error);
    found.is_some_and(|found| matches!(found, TransportError::Connection(_)))
}

/// Whether a store asks for fewer requests: S3's SlowDown is 503.
pub fn asks_for_less(error: &object_store::Error) -> bool {
    let found = find_source::<TransportError>(error);
    found.is_some_and(|found| {
        let TransportError::Busy { status, .. } = found else { return false };
        matches!(*status, StatusCode::TOO_MANY_REQUESTS | StatusCode::SERVICE_UNAVAILABLE)
    })
}

/// The first error of a type among an error and its sources.
fn find_source<'a, E: std::error::Error + 'static>(
    error: &'a (dyn std::error::Error + 'static),
) -> Option<&'a E> {
    let mut next = Some(error);
    while let Some(error) = next {
        if let Some(found) = error.downcast_ref::<E>() {
            return Some(found);
        }
        next = error.source();
    }
    None
}

/// The longest text of the client that a message shows.
const MAX_DETAIL_CHARS: usize = 200;

/// The longest code of a store, such as `InvalidAccessKeyId`.
const MAX_CODE_BYTES: usize = 40;

/// Formats an error on one line. An answer is reduced to its status and code: servers repeat what they were sent, such
/// as credentials and query strings.
fn describe(error: &dyn std::error::Error) -> String {
    let text = error.to_string();
    if let Some((_, answer)) = text.split_once("status code: ") {
        let status: String = answer.chars().take_while(char::is_ascii_digit).take(3).collect();
        let code = answer_code(answer).map(|code| format!(" {code}")).unwrap_or_default();
        return format!("HTTP {status}{code}");
    }
    // The client's own words come before those of an answer, and before a query string.
    let own = text.split(['<', '{', '"', '?']).next().unwrap_or_default();
    let words: Vec<&str> = own.split_whitespace().collect();
    words.join(" ").chars().filter(|c| !c.is_control()).take(MAX_DETAIL_CHARS).collect()
}

/// The code in an answer of S3 and servers of its protocol.
pub fn answer_code(answer: &str) -> Option<&str> {
    let (_, rest) = answer.split_once("<Code>")?;
    let (code, _) = rest.split_once("</Code>")?;
    let is_code = code.len() <= MAX_CODE_BYTES && code.bytes().all(|b| b.is_ascii_alphabetic());
    is_code.then_some(code)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_busy_server_has_answered_and_a_broken_connection_has_not() {
        let error = |source: TransportError| object_store::Error::Generic {
            store: "S3",
            source: Box::new(HttpError::from(source)),
        };
        let status = StatusCode::SERVICE_UNAVAILABLE;
        assert!(!is_unanswered(&error(TransportError::Busy { status, retry_after: None })));
        assert!(is_unanswered(&error(TransportError::Connection("refused".to_owned()))));
    }

    #[test]
    fn nothing_that_a_server_repeats_is_shown() {
        let shown = |text: &str| describe(&std::io::Error::other(text.to_owned()));
        for (text, expected) in [
            (
                "Error performing GET http://h/k?X-Amz-Signature=SECRET in 1ms - Server returned non-2xx status code: 403 Forbidden: {\"e\":\"/k?X-Amz-Signature=SECRET\"}",
                "HTTP 403",
            ),
            (
                "Server returned non-2xx status code: 400 Bad Request: <Error><Code>InvalidToken</Code><Message>bad token SECRET</Message></Error>",
                "HTTP 400 InvalidToken",
            ),
            ("status code: 400: <Code>SECRET1</Code>", "HTTP 400"),
            (
                "Error performing GET http://h/k?a=SECRET - broken",
                "Error performing GET http://h/k",
            ),
            ("Got invalid list response: <a>SECRET</a>", "Got invalid list response:"),
            ("Requested 0..5, got 1..6", "Requested 0..5, got 1..6"),
        ] {
            assert_eq!(shown(text), expected);
        }
    }
}
