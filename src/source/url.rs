//! URLs of sources: which paths are URLs, and the parts that a store needs of one.
//!
//! A URL is passed as a path. Joining works on it as on a path.
//!
//! A query string can be a secret, so a URL never has one. `?@FILE` at its end names the file that has it.

use std::borrow::Cow;
use std::ffi::OsStr;
use std::fmt;
use std::os::unix::ffi::OsStrExt;
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

/// What stands for a query string where a URL is shown.
pub const HIDDEN_QUERY: &str = "?…";

/// What stands between a URL and the file that has its query string.
const QUERY_FILE_MARK: &[u8] = b"?@";

/// The name that stands for standard input.
const STDIN_NAME: &str = "-";

/// The place that the query string of a URL is read from.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum QuerySource {
    /// A file, by its absolute path.
    File(PathBuf),
    /// Standard input, which is read once.
    Stdin,
}

impl fmt::Display for QuerySource {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            QuerySource::File(path) => write!(f, "{}", path.display()),
            QuerySource::Stdin => f.write_str("standard input"),
        }
    }
}

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
    /// The file with the query string, if the URL names one.
    pub query: Option<QuerySource>,
}

/// The reason that a URL names no source.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum UrlError {
    /// A user name or a password before the host.
    #[error("a URL with a user name or a password is refused: it would show in lists and logs")]
    UserInfo,
    /// A query string, such as that of a presigned URL.
    #[error("a URL with a query string is refused: it may be a secret")]
    Query,
    /// A file with a query string, for a store that signs its requests by other ways.
    #[error("only https:// and az:// URLs take the query string of a file")]
    QueryOfStore,
    /// No name behind the mark.
    #[error("`?@` names no file")]
    NoQueryFile,
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
                "leave the credentials out, and set them in the environment (docs/remote.md)"
            }
            UrlError::Query => {
                "leave out what follows the `?`; or write it to a file that only you can read, and end the URL with ?@FILE, or with ?@- for standard input (docs/remote.md)"
            }
            UrlError::QueryOfStore => {
                "give the presigned https:// URL, or set credentials in the environment (docs/remote.md)"
            }
            UrlError::NoQueryFile => "end the URL with ?@FILE, or with ?@- for standard input",
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

/// The URL without the name of the file with its query string, and that name.
fn split_query_file(url: &[u8]) -> (&[u8], Option<&Path>) {
    let mark = url.windows(QUERY_FILE_MARK.len()).position(|window| window == QUERY_FILE_MARK);
    let first = url.iter().position(|byte| matches!(byte, b'?' | b'#'));
    match mark.filter(|mark| first == Some(*mark)) {
        Some(at) => {
            let name = OsStr::from_bytes(&url[at + QUERY_FILE_MARK.len()..]);
            (&url[..at], Some(Path::new(name)))
        }
        None => (url, None),
    }
}

/// The directory part of a URL with a query file, which keeps the file, and the name in it. `None` of any other path.
pub fn split_url_parent(path: &Path) -> Option<(PathBuf, &OsStr)> {
    split_scheme(path)?;
    let bytes = path.as_os_str().as_encoded_bytes();
    let (url, query_file) = split_query_file(bytes);
    query_file?;
    let (url, mark) = (Path::new(OsStr::from_bytes(url)), &bytes[url.len()..]);
    let mut parent = url.parent()?.as_os_str().to_owned();
    parent.push(OsStr::from_bytes(mark));
    Some((parent.into(), url.file_name()?))
}

/// A path as messages and lists show it: of a URL with a query string, `?…` stands for that.
pub fn shown_path(path: &Path) -> Cow<'_, Path> {
    let bytes = path.as_os_str().as_encoded_bytes();
    match bytes.iter().position(|byte| matches!(byte, b'?' | b'#')) {
        Some(at) if split_scheme(path).is_some() => {
            let mut shown = OsStr::from_bytes(&bytes[..at]).to_owned();
            shown.push(HIDDEN_QUERY);
            Cow::Owned(shown.into())
        }
        _ => Cow::Borrowed(path),
    }
}

/// A path that the user typed as an absolute one, with its links resolved if it exists. A URL stays as it is.
pub fn absolute_path(path: &Path) -> PathBuf {
    if is_source_url(path) {
        return path.to_path_buf();
    }
    let absolute = std::fs::canonicalize(path).or_else(|_| std::path::absolute(path));
    absolute.unwrap_or_else(|_| path.to_path_buf())
}

/// Whether a path is a URL whose query string comes from standard input.
pub fn reads_stdin(path: &Path) -> bool {
    split_scheme(path).is_some()
        && split_query_file(path.as_os_str().as_encoded_bytes()).1 == Some(Path::new(STDIN_NAME))
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
        let (rest, query_file) = split_query_file(rest);
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
        let query = query_file.map(|name| match name.to_str() {
            _ if !matches!(kind, StoreKind::Http | StoreKind::Azure) => Err(UrlError::QueryOfStore),
            Some("") => Err(UrlError::NoQueryFile),
            Some(STDIN_NAME) => Ok(QuerySource::Stdin),
            _ => Ok(QuerySource::File(std::path::absolute(name).unwrap_or_else(|_| name.into()))),
        });
        let query = query.transpose()?;
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
        Ok(SourceUrl { kind, scheme, host: host.to_owned(), key: key.into_owned(), query })
    }

    /// The URL as messages show it, as a path.
    pub fn to_shown_path(&self) -> PathBuf {
        self.to_string().into()
    }
}

impl fmt::Display for SourceUrl {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let SourceUrl { kind, scheme, host, key, query } = self;
        let slash = if key.is_empty() { "" } else { "/" };
        let mark = if query.is_some() { HIDDEN_QUERY } else { "" };
        match kind {
            StoreKind::Http => {
                let key = utf8_percent_encode(key, &ENCODED_CHARACTERS);
                write!(f, "{scheme}://{host}{slash}{key}{mark}")
            }
            _ => write!(f, "{scheme}://{host}{slash}{key}{mark}"),
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
        assert_eq!(error("https://host/a?b?@file"), UrlError::Query);
        assert_eq!(error("https://host/a#b?@file"), UrlError::Query);
        for error in [UrlError::UserInfo, UrlError::Query] {
            assert!(!error.to_string().contains("X-Amz") && !error.to_string().contains("me:"));
        }
    }

    #[test]
    fn a_url_names_the_file_with_its_query_string() {
        let url = |text: &str| SourceUrl::parse(Path::new(text)).unwrap();
        let file = Some(QuerySource::File("/home/me/q?.txt".into()));
        let presigned = url("https://host/a/m.pt?@/home/me/q?.txt").unwrap();
        assert_eq!((presigned.key.as_str(), presigned.query.clone()), ("a/m.pt", file.clone()));
        assert_eq!(presigned.to_string(), "https://host/a/m.pt?…");
        assert_eq!(url("az://container/a?@/home/me/q?.txt").unwrap().query, file);
        assert_eq!(url("https://host/a?@-").unwrap().query, Some(QuerySource::Stdin));
        let here = std::env::current_dir().unwrap().join("q.txt");
        assert_eq!(url("https://host/a?@q.txt").unwrap().query, Some(QuerySource::File(here)));
        assert_eq!(url("s3://bucket/a?@q.txt"), Err(UrlError::QueryOfStore));
        assert_eq!(url("https://host/a?@"), Err(UrlError::NoQueryFile));
        assert_eq!(url("https://me@host/a?@q.txt"), Err(UrlError::UserInfo));
        assert!(reads_stdin(Path::new("https://host/a?@-")));
        assert!(!reads_stdin(Path::new("https://host/a?@-x")) && !reads_stdin(Path::new("a?@-")));
    }

    #[test]
    fn the_parent_of_a_url_keeps_its_query_file() {
        let parent = |text: &'static str| split_url_parent(Path::new(text));
        let (folder, name) = parent("https://host/a/m.pt?@/home/q.txt").unwrap();
        assert_eq!(
            (folder.as_path(), name),
            (Path::new("https://host/a?@/home/q.txt"), "m.pt".as_ref())
        );
        assert_eq!(parent("https://host/a/m.pt"), None);
        assert_eq!(parent("folder/m.pt?@q.txt"), None);
        let shown = |text: &'static str| shown_path(Path::new(text)).into_owned();
        assert_eq!(shown("https://host/a/m.pt?@q.txt"), Path::new("https://host/a/m.pt?…"));
        assert_eq!(shown("https://host/a?token=secret"), Path::new("https://host/a?…"));
        assert_eq!(shown("folder/a?b"), Path::new("folder/a?b"));
    }
}
