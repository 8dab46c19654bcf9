//! URLs of sources: which paths are URLs, and the parts that a store needs of one.
//!
//! A URL is passed as a path. Joining and taking the parent work on it as on a path.

use std::fmt;
use std::path::{Path, PathBuf};

use percent_encoding::{AsciiSet, CONTROLS, percent_decode_str, utf8_percent_encode};

/// The kind of store that a URL names.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum StoreKind {
    /// Amazon S3, or a server that speaks its protocol.
    S3,
    /// Google Cloud Storage.
    Gcs,
    /// Azure Blob Storage.
    Azure,
    /// Any web server.
    Http,
}

/// The schemes of each kind, the usual one first.
const SCHEMES: [(&str, StoreKind); 6] = [
    ("s3", StoreKind::S3),
    ("gs", StoreKind::Gcs),
    ("az", StoreKind::Azure),
    ("https", StoreKind::Http),
    ("http", StoreKind::Http),
    ("s3a", StoreKind::S3),
];

/// Characters of names that have another meaning in the URL of a web server.
const ENCODED_CHARACTERS: AsciiSet = CONTROLS.add(b' ').add(b'%').add(b'?').add(b'#');

/// The two addresses of the Hugging Face hub, as they stand in URLs. Its pages are no files.
pub const HUB_HOSTS: [&str; 2] = ["huggingface.co", "hf.co"];

/// A URL that names a directory or an object in a store.
#[derive(Clone, PartialEq, Eq, Hash)]
pub struct SourceUrl {
    /// The kind of the store.
    pub kind: StoreKind,
    /// The scheme: of a web server, whether it is encrypted.
    pub scheme: &'static str,
    /// The bucket, the container, or the host with its port.
    pub host: String,
    /// The key: path segments with one slash between them, none at its ends. Of a web server, without percent-encoding.
    pub key: String,
}

/// Why a URL names no source.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum UrlError {
    /// A user name or a password before the host.
    #[error("a URL with a user name or a password is refused: it would show in lists and logs")]
    UserInfo,
    /// A query string, such as that of a presigned URL.
    #[error("a URL with a query string is refused: it may be a secret")]
    Query,
    /// No bucket or host.
    #[error("the URL names no bucket and no host")]
    NoHost,
    /// Bytes that are no text.
    #[error("the URL is not UTF-8")]
    NotText,
    /// A name that no file can have.
    #[error("the URL has an empty name between two slashes")]
    EmptySegment,
    /// A slash within a name, which no path can have.
    #[error("the URL has an encoded slash (%2F) in a name")]
    EncodedSlash,
    /// A segment that leads elsewhere.
    #[error("the URL has a segment `.` or `..`")]
    DotSegment,
}

impl UrlError {
    /// What the user can do about it.
    pub fn remedy(self) -> &'static str {
        match self {
            UrlError::UserInfo => {
                "leave the credentials out, and give them by the environment (docs/remote.md)"
            }
            UrlError::Query => {
                "leave out what follows the `?`, and give credentials by the environment (docs/remote.md)"
            }
            UrlError::NoHost => {
                "give s3://BUCKET/PATH, gs://BUCKET/PATH, az://CONTAINER/PATH or https://HOST/PATH"
            }
            UrlError::NotText
            | UrlError::DotSegment
            | UrlError::EmptySegment
            | UrlError::EncodedSlash => "check the URL",
        }
    }
}

/// The scheme of a path that is a URL of a store, and the rest after its slashes.
fn split_scheme(path: &Path) -> Option<(&'static str, StoreKind, &[u8])> {
    let bytes = path.as_os_str().as_encoded_bytes();
    SCHEMES.iter().find_map(|&(scheme, kind)| {
        let (start, rest) = bytes.split_at_checked(scheme.len())?;
        let rest = start.eq_ignore_ascii_case(scheme.as_bytes()).then_some(rest)?;
        // Python's paths have one slash where a URL has two.
        let rest = rest.strip_prefix(b":/")?;
        let rest = rest.strip_prefix(b"/").unwrap_or(rest);
        let host = rest.split(|&byte| byte == b'/').next().unwrap_or_default();
        // A page of the hub is refused by name, unless it has a secret.
        let is_hub = HUB_HOSTS.iter().any(|hub| hub.as_bytes() == host);
        let may_be_secret = rest.iter().any(|&byte| matches!(byte, b'?' | b'#'));
        (!is_hub || may_be_secret).then_some((scheme, kind, rest))
    })
}

/// Whether a path is a URL of a store that can be read.
pub fn is_source_url(path: &Path) -> bool {
    split_scheme(path).is_some()
}

impl SourceUrl {
    /// Parses a path; `None` if it is not a URL of a store.
    pub fn parse(path: &Path) -> Option<Result<SourceUrl, UrlError>> {
        let (scheme, kind, rest) = split_scheme(path)?;
        Some(SourceUrl::parse_rest(scheme, kind, rest))
    }

    fn parse_rest(
        scheme: &'static str,
        kind: StoreKind,
        rest: &[u8],
    ) -> Result<SourceUrl, UrlError> {
        let rest = std::str::from_utf8(rest).map_err(|_| UrlError::NotText)?;
        let host = &rest[..rest.find(['/', '?', '#']).unwrap_or(rest.len())];
        if host.contains('@') {
            return Err(UrlError::UserInfo);
        }
        if rest.contains(['?', '#']) {
            return Err(UrlError::Query);
        }
        if host.is_empty() {
            return Err(UrlError::NoHost);
        }
        let encoded = rest[host.len()..].trim_matches('/');
        let key = match kind {
            StoreKind::Http => {
                percent_decode_str(encoded).decode_utf8().map_err(|_| UrlError::NotText)?
            }
            _ => encoded.into(),
        };
        if key.matches('/').count() != encoded.matches('/').count() {
            return Err(UrlError::EncodedSlash);
        }
        if key.split('/').any(|segment| matches!(segment, "." | "..")) {
            return Err(UrlError::DotSegment);
        }
        if key.contains("//") {
            return Err(UrlError::EmptySegment);
        }
        Ok(SourceUrl { kind, scheme, host: host.to_owned(), key: key.into_owned() })
    }

    /// The URL as a path, in its usual form.
    pub fn to_path(&self) -> PathBuf {
        self.to_string().into()
    }
}

impl fmt::Display for SourceUrl {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let SourceUrl { kind, scheme, host, key } = self;
        let slash = if key.is_empty() { "" } else { "/" };
        match kind {
            StoreKind::Http => {
                let key = utf8_percent_encode(key, &ENCODED_CHARACTERS);
                write!(f, "{scheme}://{host}{slash}{key}")
            }
            _ => write!(f, "{scheme}://{host}{slash}{key}"),
        }
    }
}

impl fmt::Debug for SourceUrl {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_url_is_told_from_a_path_and_has_one_form() {
        let url = |text: &str| SourceUrl::parse(Path::new(text));
        for (text, form) in [
            ("s3://bucket/models/llama/", "s3://bucket/models/llama"),
            ("s3:/bucket/a", "s3://bucket/a"),
            ("HTTPS://host/a", "https://host/a"),
            ("gs://bucket", "gs://bucket"),
            ("https://host:8080/a%20b/c", "https://host:8080/a%20b/c"),
            ("https://host/a b/ä", "https://host/a%20b/%C3%A4"),
            ("https://host/100%/%23%3f%2525", "https://host/100%25/%23%3F%2525"),
            ("s3://bucket/a%20b", "s3://bucket/a%20b"),
        ] {
            assert_eq!(url(text).unwrap().unwrap().to_string(), form);
        }
        for text in [
            "models",
            "/s3://bucket",
            "file:///a",
            "hf://org/name",
            "https://hf.co/org/name",
            "s3:bucket",
        ] {
            assert!(url(text).is_none(), "{text}");
        }
    }

    #[test]
    fn a_url_with_a_secret_is_refused_without_showing_it() {
        let error = |text: &str| SourceUrl::parse(Path::new(text)).unwrap().unwrap_err();
        assert_eq!(error("https://me:secret@host/a"), UrlError::UserInfo);
        assert_eq!(error("https://host/a?X-Amz-Signature=secret"), UrlError::Query);
        assert_eq!(error("https://me@host?a=secret"), UrlError::UserInfo);
        assert_eq!(error("https://host?a=b@c&d=secret"), UrlError::Query);
        assert_eq!(error("https://hf.co/o/m/x.pt?token=secret"), UrlError::Query);
        assert_eq!(error("s3:///a"), UrlError::NoHost);
        assert_eq!(error("https://host/a%2fb"), UrlError::EncodedSlash);
        assert_eq!(error("https://host/a/%2e%2E/b"), UrlError::DotSegment);
        assert_eq!(error("https://host/%ff"), UrlError::NotText);
        assert_eq!(error("s3://bucket/a//b"), UrlError::EmptySegment);
        assert_eq!(error("s3://bucket/a/../b"), UrlError::DotSegment);
        for error in [UrlError::UserInfo, UrlError::Query] {
            assert!(!error.to_string().contains("X-Amz") && !error.to_string().contains("me:"));
        }
    }
}
