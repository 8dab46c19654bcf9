//! Errors of stores, each with a remedy.

use std::borrow::Cow;
use std::time::Duration;

use http::StatusCode;
use object_store::client::{HttpError, HttpErrorKind};

use crate::shell_word::{shell_text, shell_word};
use crate::source::url::QuerySource;

/// A failure of a store, a server or the way to it. No message has a credential.
#[derive(Debug, thiserror::Error)]
pub enum RemoteError {
    /// The URL itself is refused.
    #[error(transparent)]
    Url(#[from] crate::source::UrlError),
    /// A variable of the environment means nothing.
    #[error("{name} is {value:?}, and must be {expected}")]
    Setting {
        /// The name of the variable.
        name: &'static str,
        /// The value that it has.
        value: String,
        /// The values that it can have.
        expected: String,
    },
    /// There are no credentials.
    #[error("no credentials for {store} were found")]
    NoCredentials {
        /// The name of the store's kind.
        store: &'static str,
    },
    /// The credentials that were found cannot be used.
    #[error("the credentials cannot be used: {why}")]
    BadCredentials {
        /// What is wrong with them.
        why: String,
        /// What the user can do about it.
        remedy: String,
    },
    /// The store says that the credentials have expired, and there are no others.
    #[error("the credentials have expired, or are no longer valid{}", detail(.message))]
    Expired {
        /// The reason that the store states.
        message: String,
    },
    /// The query string of a URL cannot be used.
    #[error("the query string of the URL, from {source}: {why}", source = .origin)]
    BadQuery {
        /// The place that it is read from.
        origin: QuerySource,
        /// What is wrong with it.
        why: String,
    },
    /// The server denies a request with the query string of a URL.
    #[error("the server denies the query string of {source}: it has expired, or belongs to another object{}", detail(.message), source = .origin)]
    QueryDenied {
        /// The place that it was read from.
        origin: QuerySource,
        /// The reason that the server states.
        message: String,
    },
    /// The store denies this request.
    #[error("the store denies it{}", detail(.message))]
    Denied {
        /// The reason that the store states.
        message: String,
    },
    /// The address has no encryption, and the user has not allowed that.
    #[error("the address is http://, which is not encrypted")]
    PlainHttp,
    /// The bucket is in another region.
    #[error("the bucket is in the region {region}")]
    OtherRegion {
        /// The region that the server states.
        region: String,
    },
    /// A redirect that is not followed.
    #[error("the server redirects to {host}, {why}")]
    Redirect {
        /// The host that it redirects to.
        host: String,
        /// Why it is not followed.
        why: &'static str,
    },
    /// The object has no version that could be compared.
    #[error(
        "the server states neither an ETag nor Last-Modified, so a change could not be noticed"
    )]
    NoVersion,
    /// The server does not serve parts of objects.
    #[error("the server does not answer ranges of bytes")]
    NoRanges,
    /// The server lists no directories.
    #[error("this server lists no directories")]
    NoListing,
    /// A listing that is too long.
    #[error("its listing is too long: more than 100,000 names, or 32 MiB")]
    TooManyNames,
    /// No request may be sent, and the cache on disk has not all that is needed.
    #[error("the cache on disk lacks some of it, and --offline sends no request")]
    Offline,
    /// The server was silent for longer than the outage timeout.
    #[error("the server gave nothing for {} s; the last attempt: {last}", .waited.as_secs())]
    Outage {
        /// The time since the last byte.
        waited: Duration,
        /// How the last attempt failed.
        last: String,
    },
    /// The store has refused for another reason.
    #[error("{message}")]
    Other {
        /// The reason, in the client's words.
        message: String,
    },
    /// The threads for sockets cannot be started.
    #[error("cannot start the network: {0}")]
    Runtime(std::io::Error),
}

fn detail(message: &str) -> String {
    if message.is_empty() { String::new() } else { format!(": {message}") }
}

impl RemoteError {
    /// What the user can do about it.
    pub fn remedy(&self) -> Cow<'_, str> {
        Cow::Borrowed(match self {
            RemoteError::BadCredentials { remedy, .. } => remedy,
            RemoteError::BadQuery { origin: QuerySource::File(path), .. } => {
                return format!(
                    "write the presigned URL, or what follows its `?`, to {}",
                    shell_word(path)
                )
                .into();
            }
            RemoteError::QueryDenied { origin: QuerySource::File(path), .. } => {
                return format!(
                    "presign the URL again, and write it to {}: it is read again",
                    shell_word(path)
                )
                .into();
            }
            RemoteError::BadQuery { origin: QuerySource::Stdin, .. } => {
                "give the presigned URL, or what follows its `?`, on standard input"
            }
            RemoteError::QueryDenied { origin: QuerySource::Stdin, .. } => {
                "presign the URL again; from a file (?@FILE) it would be read again"
            }
            RemoteError::Expired { .. } => {
                "log in again, or set other credentials in the environment"
            }
            RemoteError::Url(error) => error.remedy(),
            RemoteError::Setting { .. } => "set the variable to such a value, or unset it",
            RemoteError::NoCredentials { store: "S3" } => {
                "set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or AWS_PROFILE; for a public bucket --anonymous (CKPTFS_ANONYMOUS=1); on a machine of the cloud --instance-metadata (CKPTFS_INSTANCE_METADATA=1)"
            }
            RemoteError::NoCredentials { store: "Azure" } => {
                "set AZURE_STORAGE_ACCOUNT_NAME and AZURE_STORAGE_ACCOUNT_KEY or AZURE_STORAGE_SAS_TOKEN; for a public container --anonymous (CKPTFS_ANONYMOUS=1); on a machine of the cloud --instance-metadata (CKPTFS_INSTANCE_METADATA=1)"
            }
            RemoteError::NoCredentials { .. } => {
                "run gcloud auth application-default login, or set GOOGLE_APPLICATION_CREDENTIALS; for a public bucket --anonymous (CKPTFS_ANONYMOUS=1); on a machine of the cloud --instance-metadata (CKPTFS_INSTANCE_METADATA=1)"
            }
            RemoteError::Denied { .. } => {
                "check that these credentials may read it, and the region or the endpoint of the store"
            }
            RemoteError::PlainHttp => {
                "use https://, or allow it: --allow-http (CKPTFS_ALLOW_HTTP=1)"
            }
            RemoteError::OtherRegion { region } => {
                return format!("set AWS_REGION={}", shell_text(region)).into();
            }
            RemoteError::Redirect { .. } => {
                "give the URL that it redirects to, if you trust that host"
            }
            RemoteError::NoVersion => "download it, and give the path of the file on disk",
            RemoteError::NoRanges => "download it, and give the path of the file on disk",
            RemoteError::NoListing => "give the URL of a file, or of the index of its shards",
            RemoteError::TooManyNames => "give a directory further down",
            RemoteError::Offline => {
                "run ckptfs fetch URL while there is a network, or leave out --offline"
            }
            RemoteError::Outage { .. } => {
                "check the network and the server; to wait longer: --outage-timeout SECONDS (CKPTFS_OUTAGE_TIMEOUT)"
            }
            RemoteError::Other { .. } => {
                "check the URL, and the region or the endpoint of the store"
            }
            RemoteError::Runtime(_) => {
                "raise the limits on threads and open files (ulimit -u, ulimit -n)"
            }
        })
    }

    /// Whether the server gave nothing for too long.
    pub fn is_outage(&self) -> bool {
        matches!(self, RemoteError::Outage { .. })
    }

    /// Whether the object or the user's request is at fault, rather than the network.
    pub fn is_refusal(&self) -> bool {
        matches!(self, RemoteError::NoVersion | RemoteError::NoRanges)
    }
}

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
    /// A failure of which the same request may succeed later.
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

/// The reason that a request has no answer that its store can use.
#[derive(Debug, thiserror::Error)]
pub enum TransportError {
    /// The server is overloaded, or failed.
    #[error("HTTP {status}")]
    Busy { status: StatusCode, retry_after: Option<Duration> },
    /// The connection failed or broke.
    #[error("{0}")]
    Connection(String),
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
    /// A name that is one of a directory: the server redirects to it with a slash.
    #[error("it is a directory, which this server does not list")]
    NoListing,
    /// The bucket is in another region.
    #[error("the bucket is in the region {0}")]
    OtherRegion(String),
}

impl TransportError {
    /// The failure that the reader handles.
    pub fn to_failure(&self) -> StoreFailure {
        match self {
            TransportError::Busy { status, retry_after } => StoreFailure::Transient {
                message: format!("HTTP {status}"),
                retry_after: *retry_after,
            },
            TransportError::Connection(message) => StoreFailure::transient(message),
            TransportError::NoListing => StoreFailure::Permanent(RemoteError::NoListing),
            TransportError::PlainHttp => StoreFailure::Permanent(RemoteError::PlainHttp),
            TransportError::Redirect { host, why } => {
                let host = host.clone();
                StoreFailure::Permanent(RemoteError::Redirect { host, why })
            }
            TransportError::OtherRegion(region) => {
                StoreFailure::Permanent(RemoteError::OtherRegion { region: region.clone() })
            }
            TransportError::Metadata => {
                StoreFailure::Permanent(RemoteError::Other { message: self.to_string() })
            }
        }
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
                if says_expired(&error) {
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

/// The longest text of the client that a message has.
const MAX_DETAIL_CHARS: usize = 200;

/// The longest code of a store, such as `InvalidAccessKeyId`.
const MAX_CODE_BYTES: usize = 40;

/// An error on one line. Of an answer, only its status and its code: servers repeat what they were sent, credentials
/// and query strings among it.
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
