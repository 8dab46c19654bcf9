//! HTTP clients: their timeouts, certificates and the addresses that they connect to.

use std::sync::Arc;
use std::time::Duration;

use http::header::ACCEPT_ENCODING;
use http::{HeaderMap, HeaderValue};
use reqwest::{Certificate, ClientBuilder, Url};

use super::addresses::{AddressRefused, AddressResolver, AddressRule, literal_address};
use super::certificates::certificate_refusal;
use super::failure::TransportError;
use super::options::RemoteOptions;

/// Objects are read as they are stored: ranges of a compressed answer are not those of the file.
const IDENTITY: HeaderValue = HeaderValue::from_static("identity");

/// Idle connections that are kept to each host: as many as the parts that are read at once.
const MAX_IDLE_CONNECTIONS: usize = 64;

/// The error of a client that cannot be made.
pub fn client_error(error: reqwest::Error) -> object_store::Error {
    object_store::Error::Generic { store: "HTTP", source: Box::new(error.without_url()) }
}

/// A client that connects to the addresses that a resolver gives, and follows no redirect.
pub fn http_client(
    stall_timeout: Duration,
    resolver: AddressResolver,
    certificates: &[Certificate],
) -> reqwest::Result<reqwest::Client> {
    client_builder(stall_timeout, resolver, certificates).build()
}

/// The same, before it is built.
pub fn client_builder(
    stall_timeout: Duration,
    resolver: AddressResolver,
    certificates: &[Certificate],
) -> ClientBuilder {
    // An error means that it was installed before.
    let _ = rustls::crypto::ring::default_provider().install_default();
    let builder = reqwest::Client::builder()
        .user_agent(concat!("ckptfs/", env!("CARGO_PKG_VERSION")))
        .default_headers(HeaderMap::from_iter([(ACCEPT_ENCODING, IDENTITY)]))
        .redirect(reqwest::redirect::Policy::none())
        .dns_resolver(Arc::new(resolver))
        .connect_timeout(stall_timeout)
        .read_timeout(stall_timeout)
        .pool_max_idle_per_host(MAX_IDLE_CONNECTIONS)
        .http1_only();
    let add = |builder: ClientBuilder, certificate: &Certificate| {
        builder.add_root_certificate(certificate.clone())
    };
    certificates.iter().fold(builder, add)
}

/// Sends a request without credentials, to see whether the server answers. Returns the headers of
/// its answer, of any status.
pub async fn greet(
    url: &Url,
    options: &RemoteOptions,
    certificates: &[Certificate],
) -> Result<HeaderMap, TransportError> {
    if url.scheme() == "http" && !options.allow_http {
        return Err(TransportError::PlainHttp);
    }
    // A literal address is not resolved.
    let rule = address_rule(options);
    if literal_address(url).is_some_and(|address| !rule.allows(address)) {
        return Err(address_refused(rule, url));
    }
    let failed = |error: reqwest::Error| connection_error(&error, url);
    let client = http_client(options.stall_timeout, AddressResolver::new(rule), certificates);
    let client = client.map_err(failed)?;
    let request = client.head(url.clone()).timeout(options.stall_timeout).send();
    let answer = request.await.map_err(failed)?;
    Ok(answer.headers().clone())
}

/// The reason that a request was not answered.
pub fn connection_error(error: &reqwest::Error, url: &Url) -> TransportError {
    // The innermost error says it shortest, and has no URL.
    let mut innermost: &dyn std::error::Error = error;
    while let Some(source) = innermost.source() {
        innermost = source;
        if let Some(AddressRefused(rule)) = source.downcast_ref() {
            return address_refused(*rule, url);
        }
    }
    if let Some(why) = certificate_refusal(innermost) {
        return TransportError::Encryption(why);
    }
    let message = match innermost.is::<reqwest::Error>() {
        true if error.is_timeout() => "timed out".to_owned(),
        true => "the connection failed".to_owned(),
        false => innermost.to_string(),
    };
    TransportError::Connection(message)
}

/// The refusal of an address that a rule does not allow.
pub fn address_refused(rule: AddressRule, url: &Url) -> TransportError {
    match rule {
        AddressRule::Any | AddressRule::NoMetadata => TransportError::Metadata,
        AddressRule::Public => {
            let host = url.host_str().unwrap_or_default().to_owned();
            TransportError::Redirect { host, why: "an address in a private network" }
        }
    }
}

/// The rule for hosts that the user names. On a foreign network, any host may have a metadata server's address.
pub fn address_rule(options: &RemoteOptions) -> AddressRule {
    match options.instance_metadata {
        true => AddressRule::Any,
        false => AddressRule::NoMetadata,
    }
}
