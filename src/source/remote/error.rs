//! Errors of stores, each with a remedy.

use std::borrow::Cow;
use std::time::Duration;

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
    /// The server's certificate is not accepted.
    #[error("the encrypted connection is refused: {why}")]
    Encryption {
        /// Why it is not accepted.
        why: String,
    },
    /// A file of certificates cannot be used.
    #[error("{name} names {path}, which cannot be used: {why}")]
    CertificateFile {
        /// The variable of the environment.
        name: &'static str,
        /// The file that it names.
        path: std::path::PathBuf,
        /// What is wrong with it.
        why: String,
    },
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
    /// A redirect to a scheme other than http and https.
    #[error(
        "the server redirects to {target}, which is neither http:// nor https:// and is not followed"
    )]
    RedirectScheme {
        /// The scheme, and the host if there is one.
        target: String,
    },
    /// The object has no version that could be compared.
    #[error(
        "the server states neither an ETag nor Last-Modified, so a change could not be noticed"
    )]
    NoVersion,
    /// The server does not serve parts of objects.
    #[error("the server does not answer ranges of bytes")]
    NoRanges,
    /// The server sends an object in another encoding than it is stored in.
    #[error(
        "the server sends it compressed or changed (Content-Encoding: {encoding}), so its ranges are not those of the file"
    )]
    Encoded {
        /// The encoding that the server states.
        encoding: String,
    },
    /// An object whose size is missing, or is one that no file can have.
    #[error("the server states no valid size of it: a size is a number below 2^63")]
    ImpossibleSize,
    /// The server lists no directories.
    #[error("this server lists no directories")]
    NoListing,
    /// A listing that is too long.
    #[error("its listing is too long: more than 100,000 names, or 32 MiB")]
    TooManyNames,
    /// An answer that is no part of an object, and too long.
    #[error("the server's answer is longer than {} MiB", .limit >> 20)]
    AnswerTooLong {
        /// Maximum bytes of such an answer.
        limit: usize,
    },
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
        /// Whether the server has answered before.
        has_answered: bool,
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
    /// A signal asked the command to stop.
    #[error("a signal stopped it")]
    Stopped,
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
            RemoteError::Encryption { .. } => {
                "set AWS_CA_BUNDLE to a file with the certificates of your authority, in PEM; check this machine's clock"
            }
            RemoteError::CertificateFile { .. } => {
                "set the variable to a file with the certificates of your authority, in PEM, or unset it"
            }
            RemoteError::OtherRegion { region } => {
                return format!("set AWS_REGION={}", shell_text(region)).into();
            }
            RemoteError::Redirect { .. } => {
                "give the URL that it redirects to, if you trust that host"
            }
            RemoteError::RedirectScheme { .. } => "check the URL, and the server",
            RemoteError::NoVersion => "download it, and give the path of the file on disk",
            RemoteError::NoRanges => "download it, and give the path of the file on disk",
            RemoteError::Encoded { .. } => {
                "store it without compression; or download it, and give the path of the file on disk"
            }
            RemoteError::ImpossibleSize => "upload it again, or check the server",
            RemoteError::NoListing => "give the URL of a file, or of the index of its shards",
            RemoteError::TooManyNames | RemoteError::AnswerTooLong { .. } => {
                "give a directory further down, or the URL of a file"
            }
            RemoteError::Offline => {
                "run ckptfs fetch URL while there is a network, or leave out --offline"
            }
            RemoteError::Outage { has_answered: false, .. } => {
                "check the URL, the endpoint and the network: nothing has answered there yet"
            }
            RemoteError::Outage { .. } => {
                "check the network and the server; to wait longer: --outage-timeout SECONDS (CKPTFS_OUTAGE_TIMEOUT)"
            }
            RemoteError::Other { .. } => {
                "check the URL, and the region or the endpoint of the store"
            }
            RemoteError::Stopped => "run it again",
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
        matches!(
            self,
            RemoteError::NoVersion
                | RemoteError::NoRanges
                | RemoteError::Encoded { .. }
                | RemoteError::ImpossibleSize
        )
    }
}
