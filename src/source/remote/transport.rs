//! Sends the requests of all stores: one HTTP client for each, which counts, bounds waiting, and decides on redirects.
//!
//! A redirect to another host is followed without credentials. From a host of the internet, none is followed to an address
//! that only this machine or its network can reach. `addresses` checks the address that is connected to.

use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::sync::{Arc, OnceLock};
use std::time::Duration;

use async_trait::async_trait;
use http::header::{ACCEPT, AUTHORIZATION, RANGE};
use http::{HeaderValue, StatusCode};
use http_body_util::BodyExt;
use object_store::ClientOptions;
use object_store::client::{
    HttpClient, HttpConnector, HttpError, HttpRequest, HttpResponse, HttpResponseBody, HttpService,
};
use reqwest::{Certificate, Url};

use crate::source::request_counters::count_request;
use crate::source::url::StoreKind;

use super::addresses::{AddressResolver, AddressRule, literal_address};
use super::answer::{check_headers, check_status, read_error_answer, read_whole_answer};
use super::certificates::read_certificates;
use super::error::RemoteError;
use super::failure::TransportError;
use super::http_client::{
    address_refused, address_rule, client_builder, client_error, connection_error, http_client,
};
use super::options::RemoteOptions;
use super::outage::FIRST_ANSWER_TIMEOUT;
use super::redirect::{leads_to_directory, redirect_target, remove_credentials};
use super::secret_query::SecretQuery;

/// Redirects that one request follows.
const MAX_REDIRECT_COUNT: usize = 5;

/// Makes the HTTP clients of stores.
#[derive(Clone, Debug)]
pub struct Connector {
    options: RemoteOptions,
    certificates: Vec<Certificate>,
    /// Added to each request, if the URL names one.
    query: Option<Arc<SecretQuery>>,
    has_regions: bool,
}

impl Connector {
    /// Makes clients of a kind of store, which add a query string to each request if there is one.
    pub fn new(
        options: &RemoteOptions,
        kind: StoreKind,
        query: Option<Arc<SecretQuery>>,
    ) -> Result<Connector, RemoteError> {
        let (options, certificates) = (options.clone(), read_certificates()?);
        Ok(Connector { options, certificates, query, has_regions: kind == StoreKind::S3 })
    }

    /// Gets a document of a service of this machine or its cloud. Proxies do not see the token, and no redirect is followed.
    pub async fn get_from_machine(
        &self,
        url: &Url,
        rule: AddressRule,
        token: Option<HeaderValue>,
    ) -> Result<(StatusCode, bytes::Bytes), TransportError> {
        if literal_address(url).is_some_and(|address| !rule.allows(address)) {
            return Err(address_refused(rule, url));
        }
        let failed = |error: reqwest::Error| connection_error(&error, url);
        let stall_timeout = self.options.stall_timeout;
        let resolver = AddressResolver::new(rule);
        let client = client_builder(stall_timeout, resolver, &self.certificates).no_proxy();
        let mut request =
            client.build().map_err(failed)?.get(url.clone()).header(ACCEPT, "application/json");
        if let Some(token) = token {
            request = request.header(AUTHORIZATION, token);
        }
        let _in_flight = count_request();
        let answer = send(request, url, stall_timeout).await?;
        let status = answer.status();
        check_status(status, answer.headers())?;
        let body = http::Response::<reqwest::Body>::from(answer).into_body();
        let body = match status.is_success() {
            true => read_whole_answer(body, stall_timeout).await?,
            false => read_error_answer(body, stall_timeout).await,
        };
        Ok((status, body))
    }
}

impl HttpConnector for Connector {
    fn connect(&self, options: &ClientOptions) -> object_store::Result<HttpClient> {
        // Only the client of a metadata server differs from the option: that server has no encryption.
        let allows = object_store::ClientConfigKey::AllowHttp;
        let allow_http = options.get_config_value(&allows).is_some_and(|value| value == "true");
        let stall_timeout = self.options.stall_timeout;
        let rule = address_rule(&self.options);
        let resolver = AddressResolver::new(rule);
        let certificates = self.certificates.clone();
        let client = http_client(stall_timeout, resolver.clone(), &certificates);
        let client = client.map_err(client_error)?;
        let (query, has_regions) = (self.query.clone(), self.has_regions);
        let public_client = OnceLock::new();
        Ok(HttpClient::new(Transport {
            client,
            public_client,
            certificates,
            resolver,
            rule,
            allow_http,
            stall_timeout,
            query,
            has_regions,
            has_answered: AtomicBool::new(false),
        }))
    }
}

/// Sends a request, and waits for the headers of its answer.
async fn send(
    request: reqwest::RequestBuilder,
    url: &Url,
    timeout: Duration,
) -> Result<reqwest::Response, TransportError> {
    tokio::time::timeout(timeout, request.send())
        .await
        .map_err(|_| TransportError::Connection("no answer in time".to_owned()))?
        .map_err(|error| connection_error(&error, url))
}

/// Sends the requests of one store.
#[derive(Debug)]
struct Transport {
    client: reqwest::Client,
    /// Follows redirects of hosts of the internet. Made when it is first needed.
    public_client: OnceLock<reqwest::Client>,
    certificates: Vec<Certificate>,
    resolver: AddressResolver,
    rule: AddressRule,
    allow_http: bool,
    stall_timeout: Duration,
    query: Option<Arc<SecretQuery>>,
    /// Whether an answer may name the region to ask. A web server in front of such a store redirects, and that is followed.
    has_regions: bool,
    /// Whether any answer has come.
    has_answered: AtomicBool,
}

impl Transport {
    /// The time that the headers of an answer may take. An address that never answered is likely a wrong one.
    fn answer_timeout(&self) -> Duration {
        match self.has_answered.load(Relaxed) {
            true => self.stall_timeout,
            false => self.stall_timeout.min(FIRST_ANSWER_TIMEOUT),
        }
    }

    /// The client that connects to the addresses that a rule allows.
    fn client_of(&self, rule: AddressRule) -> Result<reqwest::Client, TransportError> {
        if rule == self.rule {
            return Ok(self.client.clone());
        }
        if let Some(client) = self.public_client.get() {
            return Ok(client.clone());
        }
        let resolver = self.resolver.with_rule(rule);
        let client = http_client(self.stall_timeout, resolver, &self.certificates);
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
        let mut is_redirected = false;
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
                .body(body.clone());
            let answer = send(request, &url, self.answer_timeout()).await;
            let answer = answer.map_err(|error| match is_redirected {
                true => error.after_redirect_to(url.host_str().unwrap_or_default()),
                false => error,
            })?;
            self.has_answered.store(true, Relaxed);
            let status = answer.status();
            check_status(status, answer.headers())?;
            let is_listing = parts.method.as_str() == "PROPFIND";
            let is_denied = matches!(status, StatusCode::UNAUTHORIZED | StatusCode::FORBIDDEN);
            if is_listing && status != StatusCode::MULTI_STATUS && !is_denied {
                return Err(TransportError::NoListing.into());
            }
            if status.is_redirection() && status != StatusCode::NOT_MODIFIED {
                let region = answer.headers().get("x-amz-bucket-region");
                if let Some(region) = region.filter(|_| self.has_regions) {
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
                    is_redirected |= url.host_str() != target.host_str();
                    url = target;
                    continue;
                }
            }
            if status.is_success() {
                check_headers(&parts.method, answer.headers())?;
            }
            let answer: http::Response<reqwest::Body> = answer.into();
            let (parts, body) = answer.into_parts();
            let body = if !status.is_success() {
                read_error_answer(body, self.stall_timeout).await.into()
            } else if headers.contains_key(RANGE) {
                HttpResponseBody::new(body.map_err(move |error| {
                    // Until the whole body was read, or is dropped.
                    let _ = &in_flight;
                    HttpError::from(connection_error(&error, &url))
                }))
            } else {
                read_whole_answer(body, self.stall_timeout).await?.into()
            };
            return Ok(HttpResponse::from_parts(parts, body));
        }
        let host = url.host_str().unwrap_or_default().to_owned();
        Err(TransportError::Redirect { host, why: "again and again" }.into())
    }
}

#[cfg(test)]
mod tests {
    use crate::source::remote::failure::StoreFailure;

    use super::*;

    /// Sends a request as after a redirect of a host of the internet, and returns the failure.
    async fn follow_from_the_internet(url: &str) -> StoreFailure {
        let resolver = AddressResolver::new(AddressRule::Any);
        let client =
            |rule| http_client(Duration::from_secs(5), resolver.with_rule(rule), &[]).unwrap();
        let transport = Transport {
            client: client(AddressRule::Public),
            public_client: OnceLock::new(),
            certificates: Vec::new(),
            resolver: resolver.clone(),
            rule: AddressRule::Public,
            allow_http: true,
            stall_timeout: Duration::from_secs(5),
            query: None,
            has_regions: false,
            has_answered: AtomicBool::new(false),
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
}
