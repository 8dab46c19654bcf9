//! Sends the requests of all stores: one HTTP client for each, which counts, bounds waiting, and decides on redirects.
//!
//! A redirect to another host is followed without credentials. From a host of the internet, none is followed to an address
//! that only this machine or its network can reach. `addresses` checks the address that is connected to.

use std::sync::{Arc, OnceLock};
use std::time::Duration;

use async_trait::async_trait;
use http::header::{
    AUTHORIZATION, COOKIE, HOST, LOCATION, PROXY_AUTHORIZATION, RANGE, RETRY_AFTER,
};
use http::{HeaderMap, Method, StatusCode};
use http_body_util::{BodyExt, Limited};
use object_store::ClientOptions;
use object_store::client::{
    HttpClient, HttpConnector, HttpError, HttpRequest, HttpResponse, HttpResponseBody, HttpService,
};
use reqwest::Url;

use crate::source::request_counters::count_request;

use super::addresses::{AddressRefused, AddressResolver, AddressRule, literal_address};
use super::error::TransportError;
use super::listing_filter::remove_unusable_names;
use super::options::RemoteOptions;
use super::secret_query::SecretQuery;

/// Redirects that one request follows.
const MAX_REDIRECT_COUNT: usize = 5;

/// The longest time that a server can ask to wait, in one answer.
const MAX_RETRY_AFTER_INTERVAL: Duration = Duration::from_secs(60);

/// Connections that are kept to each host: as many as parts are read at once.
const MAX_IDLE_CONNECTIONS: usize = 64;

/// The longest answer that is no part of an object: a thousand names take less than a MiB.
const MAX_ANSWER_BYTES: usize = 16 << 20;

/// The longest answer with a reason for an error: stores send some hundred bytes.
const MAX_ERROR_BYTES: usize = 64 << 10;

/// A whole answer takes at most this many times the longest stall: a page of names has less than a MiB.
const WHOLE_ANSWER_STALLS: u32 = 3;

/// Variables by which a container says where its credentials are.
const CONTAINER_VARIABLES: [&str; 2] =
    ["AWS_CONTAINER_CREDENTIALS_RELATIVE_URI", "AWS_CONTAINER_CREDENTIALS_FULL_URI"];

/// Headers by which a request is authenticated, beside those that begin with `x-amz-` or `x-ms-`.
const CREDENTIAL_HEADERS: [http::HeaderName; 3] = [AUTHORIZATION, COOKIE, PROXY_AUTHORIZATION];

fn connection_error(error: &reqwest::Error, url: &Url) -> TransportError {
    // The innermost error says it shortest, and has no URL.
    let mut innermost: &dyn std::error::Error = error;
    while let Some(source) = innermost.source() {
        innermost = source;
        if let Some(AddressRefused(rule)) = source.downcast_ref() {
            return address_refused(*rule, url);
        }
    }
    let message = match innermost.is::<reqwest::Error>() {
        true if error.is_timeout() => "timed out".to_owned(),
        true => "the connection failed".to_owned(),
        false => innermost.to_string(),
    };
    TransportError::Connection(message)
}

fn address_refused(rule: AddressRule, url: &Url) -> TransportError {
    match rule {
        AddressRule::Any | AddressRule::NoMetadata => TransportError::Metadata,
        AddressRule::Public => {
            let host = url.host_str().unwrap_or_default().to_owned();
            TransportError::Redirect { host, why: "an address in a private network" }
        }
    }
}

/// The rule for hosts that the user names. On a foreign network, any host may have a metadata server's address.
fn address_rule(options: &RemoteOptions) -> AddressRule {
    let is_container = CONTAINER_VARIABLES.iter().any(|name| std::env::var_os(name).is_some());
    match options.instance_metadata || is_container {
        true => AddressRule::Any,
        false => AddressRule::NoMetadata,
    }
}

/// Makes the HTTP clients of stores.
#[derive(Clone, Debug)]
pub struct Connector {
    pub options: RemoteOptions,
    /// Added to each request, if the URL names one.
    pub query: Option<Arc<SecretQuery>>,
}

impl HttpConnector for Connector {
    fn connect(&self, options: &ClientOptions) -> object_store::Result<HttpClient> {
        // A metadata server has no encryption: the client of its credentials says so.
        let allows = object_store::ClientConfigKey::AllowHttp;
        let allow_http = self.options.allow_http
            || options.get_config_value(&allows).is_some_and(|value| value == "true");
        let stall_timeout = self.options.stall_timeout;
        let rule = address_rule(&self.options);
        let resolver = AddressResolver::new(rule);
        let client = http_client(stall_timeout, resolver.clone()).map_err(client_error)?;
        let query = self.query.clone();
        let public_client = OnceLock::new();
        Ok(HttpClient::new(Transport {
            client,
            public_client,
            resolver,
            rule,
            allow_http,
            stall_timeout,
            query,
        }))
    }
}

fn client_error(error: reqwest::Error) -> object_store::Error {
    object_store::Error::Generic { store: "HTTP", source: Box::new(error.without_url()) }
}

fn http_client(
    stall_timeout: Duration,
    resolver: AddressResolver,
) -> reqwest::Result<reqwest::Client> {
    // An error means that it was installed before.
    let _ = rustls::crypto::ring::default_provider().install_default();
    let mut builder = reqwest::Client::builder()
        .user_agent(concat!("ckptfs/", env!("CARGO_PKG_VERSION")))
        .redirect(reqwest::redirect::Policy::none())
        .dns_resolver(Arc::new(resolver))
        .connect_timeout(stall_timeout)
        .read_timeout(stall_timeout)
        .pool_max_idle_per_host(MAX_IDLE_CONNECTIONS)
        .http1_only();
    let bundle = std::env::var_os("AWS_CA_BUNDLE").or_else(|| std::env::var_os("SSL_CERT_FILE"));
    if let Some(pem) = bundle.and_then(|path| std::fs::read(path).ok())
        && let Ok(certificates) = reqwest::Certificate::from_pem_bundle(&pem)
    {
        for certificate in certificates {
            builder = builder.add_root_certificate(certificate);
        }
    }
    builder.build()
}

/// Sends a request without credentials, to see whether the server answers. Returns the headers of
/// its answer, of any status.
pub async fn greet(url: &Url, options: &RemoteOptions) -> Result<HeaderMap, TransportError> {
    if url.scheme() == "http" && !options.allow_http {
        return Err(TransportError::PlainHttp);
    }
    // A literal address is not resolved.
    let rule = address_rule(options);
    if literal_address(url).is_some_and(|address| !rule.allows(address)) {
        return Err(address_refused(rule, url));
    }
    let failed = |error: reqwest::Error| connection_error(&error, url);
    let client = http_client(options.stall_timeout, AddressResolver::new(rule)).map_err(failed)?;
    let request = client.head(url.clone()).timeout(options.stall_timeout).send();
    let answer = request.await.map_err(failed)?;
    Ok(answer.headers().clone())
}

/// Sends the requests of one store.
#[derive(Debug)]
struct Transport {
    client: reqwest::Client,
    /// Follows redirects of hosts of the internet. Made when it is first needed.
    public_client: OnceLock<reqwest::Client>,
    resolver: AddressResolver,
    rule: AddressRule,
    allow_http: bool,
    stall_timeout: Duration,
    query: Option<Arc<SecretQuery>>,
}

impl Transport {
    /// The client that connects to the addresses that a rule allows.
    fn client_of(&self, rule: AddressRule) -> Result<reqwest::Client, TransportError> {
        if rule == self.rule {
            return Ok(self.client.clone());
        }
        if let Some(client) = self.public_client.get() {
            return Ok(client.clone());
        }
        let client = http_client(self.stall_timeout, self.resolver.with_rule(rule));
        let client = client.map_err(|error| TransportError::Connection(error.to_string()))?;
        Ok(self.public_client.get_or_init(|| client).clone())
    }
}

#[async_trait]
impl HttpService for Transport {
    async fn call(&self, request: HttpRequest) -> Result<HttpResponse, HttpError> {
        let (parts, body) = request.into_parts();
        let body = body.collect().await?.to_bytes();
        let mut url: Url =
            parts.uri.to_string().parse().map_err(|_| {
                TransportError::Connection("the address is not a valid URL".to_owned())
            })?;
        if let Some(query) = &self.query {
            query.add_to(&mut url);
        }
        let mut headers = parts.headers;
        let mut rule = self.rule;
        for _ in 0..=MAX_REDIRECT_COUNT {
            if url.scheme() == "http" && !self.allow_http {
                return Err(TransportError::PlainHttp.into());
            }
            if literal_address(&url).is_some_and(|address| !rule.allows(address)) {
                return Err(address_refused(rule, &url).into());
            }
            let in_flight = count_request();
            let request = self
                .client_of(rule)?
                .request(parts.method.clone(), url.clone())
                .headers(headers.clone())
                .body(body.clone())
                .send();
            let answer = tokio::time::timeout(self.stall_timeout, request).await;
            let answer = answer
                .map_err(|_| TransportError::Connection("no answer in time".to_owned()))?
                .map_err(|error| connection_error(&error, &url))?;
            let status = answer.status();
            let is_final = matches!(
                status,
                StatusCode::NOT_IMPLEMENTED | StatusCode::HTTP_VERSION_NOT_SUPPORTED
            );
            if status == StatusCode::TOO_MANY_REQUESTS
                || status == StatusCode::REQUEST_TIMEOUT
                || status.is_server_error() && !is_final
            {
                let retry_after = retry_after(answer.headers());
                return Err(TransportError::Busy { status, retry_after }.into());
            }
            let is_listing = parts.method.as_str() == "PROPFIND";
            let is_denied = matches!(status, StatusCode::UNAUTHORIZED | StatusCode::FORBIDDEN);
            if is_listing && status != StatusCode::MULTI_STATUS && !is_denied {
                return Err(TransportError::NoListing.into());
            }
            if status.is_redirection() && status != StatusCode::NOT_MODIFIED {
                if let Some(region) = answer.headers().get("x-amz-bucket-region") {
                    let region = region.to_str().unwrap_or_default().to_owned();
                    return Err(TransportError::OtherRegion(region).into());
                }
                let target = redirect_target(&url, &parts.method, answer.headers())?;
                if let Some(target) = target {
                    if leads_to_directory(&url, &target) {
                        return Err(TransportError::NoListing.into());
                    }
                    if url.origin() != target.origin() {
                        remove_credentials(&mut headers);
                        let connected = answer.remote_addr().map(|address| address.ip());
                        if self.resolver.is_public(&url, connected) {
                            rule = AddressRule::Public;
                        }
                    }
                    url = target;
                    continue;
                }
            }
            let answer: http::Response<reqwest::Body> = answer.into();
            let (parts, body) = answer.into_parts();
            let body = if !status.is_success() {
                error_answer(body, self.stall_timeout).await.into()
            } else if headers.contains_key(RANGE) {
                HttpResponseBody::new(body.map_err(move |error| {
                    // Until the whole body was read, or is dropped.
                    let _ = &in_flight;
                    HttpError::from(connection_error(&error, &url))
                }))
            } else {
                let limit = self.stall_timeout * WHOLE_ANSWER_STALLS;
                let slow = |_| TransportError::Connection("the answer is too slow".to_owned());
                tokio::time::timeout(limit, whole_answer(body)).await.map_err(slow)??.into()
            };
            return Ok(HttpResponse::from_parts(parts, body));
        }
        let host = url.host_str().unwrap_or_default().to_owned();
        Err(TransportError::Redirect { host, why: "again and again" }.into())
    }
}

/// Reads an answer whose status is an error. The status decides: what comes too late, or is too long, is left out.
async fn error_answer(body: reqwest::Body, limit: Duration) -> bytes::Bytes {
    let whole = Limited::new(body, MAX_ERROR_BYTES).collect();
    match tokio::time::timeout(limit, whole).await {
        Ok(Ok(body)) => body.to_bytes(),
        Ok(Err(_)) | Err(_) => bytes::Bytes::new(),
    }
}

/// Reads a whole answer that is no part of an object. A listing loses the names that cannot be shown.
async fn whole_answer(body: reqwest::Body) -> Result<bytes::Bytes, TransportError> {
    let broken = |_| TransportError::Connection("the answer broke or is too long".to_owned());
    let body = Limited::new(body, MAX_ANSWER_BYTES).collect().await.map_err(broken)?.to_bytes();
    let Some((kept, count)) = remove_unusable_names(&body) else { return Ok(body) };
    tracing::warn!(
        count,
        "names in a store are not shown: each has an empty segment, `.`, `..` or a control character"
    );
    Ok(kept.into())
}

/// Whether a redirect only adds a slash, as web servers do for directories.
fn leads_to_directory(from: &Url, to: &Url) -> bool {
    from.origin() == to.origin() && to.path().strip_suffix('/') == Some(from.path())
}

/// The time that a server asks to wait, in seconds or as a date.
fn retry_after(headers: &HeaderMap) -> Option<Duration> {
    let text = headers.get(RETRY_AFTER)?.to_str().ok()?.trim();
    let wait = match text.parse() {
        Ok(seconds) => Duration::from_secs(seconds),
        Err(_) => {
            let date = chrono::DateTime::parse_from_rfc2822(text).ok()?;
            (date.to_utc() - chrono::Utc::now()).to_std().unwrap_or_default()
        }
    };
    Some(wait.min(MAX_RETRY_AFTER_INTERVAL))
}

/// The URL that an answer redirects to; `None` if it states none, or the request is not repeated for it.
fn redirect_target(
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
        _ => Err(refused(host, "without encryption")),
    }
}

fn remove_credentials(headers: &mut HeaderMap) {
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

#[cfg(test)]
mod tests {
    use crate::source::remote::error::{RemoteError, StoreFailure};

    use super::*;

    /// Sends a request as after a redirect of a host of the internet, and returns the failure.
    async fn follow_from_the_internet(url: &str) -> StoreFailure {
        let resolver = AddressResolver::new(AddressRule::Any);
        let client = |rule| http_client(Duration::from_secs(5), resolver.with_rule(rule)).unwrap();
        let transport = Transport {
            client: client(AddressRule::Public),
            public_client: OnceLock::new(),
            resolver: resolver.clone(),
            rule: AddressRule::Public,
            allow_http: true,
            stall_timeout: Duration::from_secs(5),
            query: None,
        };
        let request = http::Request::get(url).body(Vec::new().into()).unwrap();
        let error = transport.call(request).await.unwrap_err();
        let error: &TransportError =
            std::error::Error::source(&error).unwrap().downcast_ref().unwrap();
        error.to_failure()
    }

    #[tokio::test]
    async fn from_the_internet_no_private_address_is_connected_to() {
        let listener = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
        listener.set_nonblocking(true).unwrap();
        let port = listener.local_addr().unwrap().port();
        for host in ["127.0.0.1", "localhost", "[::ffff:127.0.0.1]", "[64:ff9b::7f00:1]"] {
            let error = follow_from_the_internet(&format!("http://{host}:{port}/a")).await;
            let is_refused = matches!(error, StoreFailure::Permanent(RemoteError::Redirect { .. }));
            assert!(is_refused, "{host}: {error:?}");
        }
        assert!(listener.accept().is_err());
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

    #[test]
    fn a_server_may_ask_to_wait_for_a_minute_and_no_longer() {
        let after = |text: &str| {
            let mut headers = HeaderMap::new();
            headers.insert(RETRY_AFTER, text.parse().unwrap());
            retry_after(&headers)
        };
        assert_eq!(after("3"), Some(Duration::from_secs(3)));
        assert_eq!(after("99999"), Some(MAX_RETRY_AFTER_INTERVAL));
        assert_eq!(after("Wed, 21 Oct 2015 07:28:00 GMT"), Some(Duration::ZERO));
        assert_eq!(after("soon"), None);
    }
}
