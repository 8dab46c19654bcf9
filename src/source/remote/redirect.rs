//! Redirects: which are followed, and which headers another host must not receive.

use http::header::{AUTHORIZATION, COOKIE, HOST, LOCATION, PROXY_AUTHORIZATION};
use http::{HeaderMap, Method};
use reqwest::Url;

use super::failure::TransportError;

/// Headers that authenticate a request, beside those with a prefix of a cloud, such as `x-amz-`.
const CREDENTIAL_HEADERS: [http::HeaderName; 3] = [AUTHORIZATION, COOKIE, PROXY_AUTHORIZATION];

/// The longest scheme that a message shows. The longest that is in use has fewer characters.
const MAX_SCHEME_CHARS: usize = 32;

/// The URL that an answer redirects to; `None` if it states none, or the request is neither GET nor HEAD.
pub fn redirect_target(
    url: &Url,
    method: &Method,
    headers: &HeaderMap,
) -> Result<Option<Url>, TransportError> {
    let location = headers.get(LOCATION).and_then(|location| location.to_str().ok());
    let Some(location) = location.filter(|_| matches!(*method, Method::GET | Method::HEAD)) else {
        return Ok(None);
    };
    let refused = |host: &str, why| TransportError::Redirect { host: host.to_owned(), why };
    let target = url.join(location).map_err(|_| refused("no valid URL", "which is an error"))?;
    let host = target.host_str().unwrap_or_default();
    match target.scheme() {
        "https" => Ok(Some(target)),
        "http" if url.scheme() == "http" => Ok(Some(target)),
        "http" => Err(refused(host, "without encryption")),
        scheme => {
            let scheme: String = scheme.chars().take(MAX_SCHEME_CHARS).collect();
            let slashes = if host.is_empty() { "" } else { "//" };
            Err(TransportError::RedirectScheme(format!("{scheme}:{slashes}{host}")))
        }
    }
}

/// Removes what authenticates a request, before another host receives it.
pub fn remove_credentials(headers: &mut HeaderMap) {
    let is_credential = |name: &http::HeaderName| {
        CREDENTIAL_HEADERS.contains(name)
            || *name == HOST
            || name.as_str().starts_with("x-amz-")
            || name.as_str().starts_with("x-ms-")
            || name.as_str().starts_with("x-goog-")
    };
    let names: Vec<_> = headers.keys().filter(|name| is_credential(name)).cloned().collect();
    for name in names {
        headers.remove(name);
    }
}

/// Whether a redirect only adds a slash, as web servers do for directories.
pub fn leads_to_directory(from: &Url, to: &Url) -> bool {
    from.origin() == to.origin() && to.path().strip_suffix('/') == Some(from.path())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_redirects_to_web_servers_are_followed() {
        let target = |from: &str, location: &str| {
            let mut headers = HeaderMap::new();
            headers.insert(LOCATION, location.parse().unwrap());
            redirect_target(&from.parse().unwrap(), &Method::GET, &headers)
        };
        let url = |found: Result<Option<Url>, _>| found.unwrap().unwrap().to_string();
        assert_eq!(url(target("http://a/b", "c?d")), "http://a/c?d");
        assert_eq!(url(target("http://a/b", "https://c/d")), "https://c/d");
        for (location, expected) in [
            ("http://c/d", "a redirect to c is not followed"),
            ("file:///etc/passwd", "a redirect to file: is not followed"),
            ("FTP://c/?secret", "a redirect to ftp://c is not followed"),
            ("javascript:secret", "a redirect to javascript: is not followed"),
            ("http://", "a redirect to no valid URL is not followed"),
        ] {
            assert_eq!(target("https://a/b", location).unwrap_err().to_string(), expected);
        }
    }

    #[test]
    fn credentials_are_removed_from_headers() {
        let mut headers = HeaderMap::new();
        for name in ["authorization", "x-amz-security-token", "range", "if-match", "x-ms-date"] {
            headers.insert(http::HeaderName::from_static(name), "v".parse().unwrap());
        }
        remove_credentials(&mut headers);
        let mut left: Vec<&str> = headers.keys().map(|name| name.as_str()).collect();
        left.sort_unstable();
        assert_eq!(left, ["if-match", "range"]);
    }
}
