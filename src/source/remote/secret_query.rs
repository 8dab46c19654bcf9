//! The query string of a presigned URL, which is a secret. It is read from a file or standard input, added to each
//! request, and shown nowhere.

use std::collections::BTreeMap;
use std::fs::File;
use std::io::{self, Read};
use std::sync::{Arc, Mutex};

use reqwest::Url;

use crate::source::url::{QuerySource, SourceUrl, StoreKind};
use crate::threads::lock;

use super::error::RemoteError;

/// The longest file with a query string: presigned URLs with tokens of sessions have some kilobytes.
const MAX_QUERY_BYTES: u64 = 64 << 10;

/// The shortest value that is redacted: shorter ones are no secrets.
const MIN_SECRET_BYTES: usize = 8;

/// The texts of standard input and pipes, which can be read only once.
static PIPED_TEXTS: Mutex<BTreeMap<QuerySource, Arc<str>>> = Mutex::new(BTreeMap::new());

/// The query string of a URL, and where it was read.
pub struct SecretQuery {
    source: QuerySource,
    /// The URL that a whole presigned URL in the file must agree with.
    url: SourceUrl,
    text: Mutex<Arc<str>>,
}

impl std::fmt::Debug for SecretQuery {
    // The text is never shown.
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("SecretQuery").field("source", &self.source).finish_non_exhaustive()
    }
}

impl SecretQuery {
    /// Reads the query string that a URL names the file of; `None` if it names none.
    pub fn read(url: &SourceUrl) -> Result<Option<SecretQuery>, RemoteError> {
        let Some(source) = url.query.clone() else { return Ok(None) };
        let text = Mutex::new(read_query(&source, url)?);
        Ok(Some(SecretQuery { source, url: url.clone(), text }))
    }

    /// The place that it was read from.
    pub fn source(&self) -> &QuerySource {
        &self.source
    }

    /// A hash, which tells clients of other query strings apart.
    pub fn hash(&self) -> blake3::Hash {
        blake3::hash(lock(&self.text).as_bytes())
    }

    /// Adds it to the URL of a request.
    pub fn add_to(&self, url: &mut Url) {
        let text = Arc::clone(&lock(&self.text));
        let query = match url.query().filter(|query| !query.is_empty()) {
            Some(query) => format!("{query}&{text}"),
            None => text.to_string(),
        };
        url.set_query(Some(&query));
    }

    /// Reads it again, and returns whether it changed.
    pub fn refresh(&self) -> Result<bool, RemoteError> {
        let text = read_query(&self.source, &self.url)?;
        let before = std::mem::replace(&mut *lock(&self.text), Arc::clone(&text));
        Ok(before != text)
    }

    /// A text without the query string and its values: servers repeat what they were asked for.
    pub fn redact(&self, text: &str) -> String {
        let query = Arc::clone(&lock(&self.text));
        let mut redacted = text.replace(&*query, "…");
        let mut values: Vec<String> = query
            .split('&')
            .filter_map(|pair| pair.split_once('='))
            .flat_map(|(_, value)| [value.to_owned(), decode(value)])
            .filter(|value| value.len() >= MIN_SECRET_BYTES)
            .collect();
        // A value can be part of another.
        values.sort_by_key(|value| std::cmp::Reverse(value.len()));
        for value in values {
            redacted = redacted.replace(&value, "…");
        }
        redacted
    }
}

/// A value without percent-encoding.
fn decode(value: &str) -> String {
    let pair = format!("a={value}");
    let url = Url::parse(&format!("http://host/?{pair}")).ok();
    let decoded = url.and_then(|url| Some(url.query_pairs().next()?.1.into_owned()));
    decoded.unwrap_or_default()
}

fn read_query(source: &QuerySource, url: &SourceUrl) -> Result<Arc<str>, RemoteError> {
    let failed = |why: String| RemoteError::BadQuery { origin: source.clone(), why };
    let text = read_source(source).map_err(|error| failed(format!("cannot read it: {error}")))?;
    parse_query(&text, url).map(Arc::from).map_err(|why| failed(why.to_owned()))
}

fn read_source(source: &QuerySource) -> io::Result<Arc<str>> {
    let file = match source {
        QuerySource::File(path) => Some(File::open(path)?),
        QuerySource::Stdin => None,
    };
    if let Some(file) = &file
        && file.metadata()?.is_file()
    {
        return read_bounded(file).map(Arc::from);
    }
    let mut known = lock(&PIPED_TEXTS);
    if let Some(text) = known.get(source) {
        return Ok(Arc::clone(text));
    }
    let text: Arc<str> = match file {
        Some(file) => read_bounded(file)?.into(),
        None => read_bounded(io::stdin().lock())?.into(),
    };
    known.insert(source.clone(), Arc::clone(&text));
    Ok(text)
}

fn read_bounded(input: impl Read) -> io::Result<String> {
    let mut text = String::new();
    input.take(MAX_QUERY_BYTES + 1).read_to_string(&mut text)?;
    match text.len() as u64 > MAX_QUERY_BYTES {
        true => Err(io::Error::other("it is too long for a query string")),
        false => Ok(text),
    }
}

/// The query string in a text that is one, or a whole presigned URL. No error has a part of the text.
fn parse_query<'a>(text: &'a str, url: &SourceUrl) -> Result<&'a str, &'static str> {
    let text = text.trim();
    if text.is_empty() {
        return Err("it is empty");
    }
    if text.contains(|c: char| c.is_whitespace() || c.is_control() || c == '#' || !c.is_ascii()) {
        return Err("it is not one line with a query string or a presigned URL");
    }
    let (address, query) = match text.split_once('?') {
        Some((address, query)) => (address, query),
        None if text.contains("://") => return Err("its URL has no query string"),
        None => ("", text),
    };
    if query.is_empty() {
        return Err("it is empty");
    }
    match address.is_empty() || is_address_of(address, url) {
        true => Ok(query),
        false => Err("it has the presigned URL of another host or path"),
    }
}

/// Whether an address is that of a URL, or of an object in the directory that the URL names.
fn is_address_of(address: &str, url: &SourceUrl) -> bool {
    if url.kind != StoreKind::Http {
        return false;
    }
    let expected = format!("{}://{}/{}", url.scheme, url.host, url.key);
    let (Ok(address), Ok(expected)) = (Url::parse(address), Url::parse(&expected)) else {
        return false;
    };
    // Without a user name and a password in it.
    let has_secret = !address.username().is_empty() || address.password().is_some();
    let inside = decode_path(&address);
    let inside = inside.strip_prefix(&decode_path(&expected));
    address.origin() == expected.origin()
        && !has_secret
        && inside
            .is_some_and(|rest| rest.is_empty() || rest.starts_with('/') || expected.path() == "/")
}

fn decode_path(url: &Url) -> String {
    decode(&url.path().replace('+', "%2B"))
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use super::*;

    fn url(text: &str) -> SourceUrl {
        SourceUrl::parse(Path::new(text)).unwrap().unwrap()
    }

    #[test]
    fn a_file_has_a_query_string_or_the_presigned_url() {
        let file = url("https://host/a b/m.pt?@-");
        for text in [
            "sig=secret&e=1",
            "?sig=secret&e=1\n",
            "https://host/a%20b/m.pt?sig=secret&e=1",
            "https://host:443/a%20b/m.pt?sig=secret&e=1",
        ] {
            assert_eq!(parse_query(text, &file), Ok("sig=secret&e=1"), "{text}");
        }
        // The directory of the file, where its shards are looked for.
        assert!(parse_query("https://host/a/m.pt?s=1", &url("https://host/a?@-")).is_ok());
        assert!(parse_query("https://host/m.pt?s=1", &url("https://host?@-")).is_ok());
        for text in [
            "",
            "?",
            "https://host/a%20b/m.pt",
            "https://other/a%20b/m.pt?sig=secret",
            "http://host/a%20b/m.pt?sig=secret",
            "https://host:8443/a%20b/m.pt?sig=secret",
            "https://me@host/a%20b/m.pt?sig=secret",
            "https://host/a%20b/n.pt?sig=secret",
            "https://host/a%20b/m.ptx?sig=secret",
            "sig=secret\nsig=other",
            "sig=secret#part",
        ] {
            let why = parse_query(text, &file).unwrap_err();
            assert!(!why.contains("secret"), "{text}");
        }
        assert!(parse_query("https://host/a?sig=s", &url("az://host/a?@-")).is_err());
    }

    #[test]
    fn a_text_of_a_server_is_shown_without_the_query() {
        let text = Mutex::new("X-Amz-Signature=0123456789ab&t=a%2Fb%2Fc%2Fd%2Fe&v=1".into());
        let query = SecretQuery { source: QuerySource::Stdin, url: url("https://h/a?@-"), text };
        let shown = query.redact("no /a?X-Amz-Signature=0123456789ab&t=a%2Fb%2Fc%2Fd%2Fe&v=1, signed 0123456789ab a/b/c/d/e");
        assert_eq!(shown, "no /a?…, signed … …");
        assert!(!format!("{query:?}").contains("0123"));
    }

    #[test]
    fn a_request_has_its_own_query_and_the_secret_one() {
        let text = Mutex::new("sig=a%2Fb".into());
        let query = SecretQuery { source: QuerySource::Stdin, url: url("https://h/a?@-"), text };
        let added = |text: &str| {
            let mut url = Url::parse(text).unwrap();
            query.add_to(&mut url);
            url.to_string()
        };
        assert_eq!(added("https://h/a"), "https://h/a?sig=a%2Fb");
        assert_eq!(added("https://h/a?comp=list"), "https://h/a?comp=list&sig=a%2Fb");
    }
}
