//! The clients of clouds' stores and of web servers, built from the user's settings.

use std::sync::Arc;
use std::time::Duration;

use object_store::aws::{AmazonS3Builder, AmazonS3ConfigKey};
use object_store::azure::AzureConfigKey;
use object_store::gcp::{GoogleCloudStorageBuilder, GoogleConfigKey};
use object_store::http::HttpBuilder;
use object_store::list::PaginatedListStore;
use object_store::{BackoffConfig, ClientConfigKey, ObjectStore, RetryConfig};

use crate::source::url::{SourceUrl, StoreKind};

use super::credentials::{self, Authorization};
use super::error::RemoteError;
use super::options::RemoteOptions;
use super::transport::Connector;

/// The requests that a store serves.
pub struct StoreClient {
    pub objects: Arc<dyn ObjectStore>,
    /// Lists page by page; `None` if the store lists in one answer.
    pub pages: Option<Arc<dyn PaginatedListStore>>,
}

impl StoreClient {
    fn paged(client: impl ObjectStore + PaginatedListStore) -> StoreClient {
        let client = Arc::new(client);
        StoreClient { objects: Arc::clone(&client) as _, pages: Some(client) }
    }
}

/// Prefixes of the variables that the client of a kind of store reads.
fn setting_prefixes(kind: StoreKind) -> &'static [&'static str] {
    match kind {
        StoreKind::S3 => &["AWS_", "HOME"],
        StoreKind::Gcs => &["GOOGLE_", "SERVICE_ACCOUNT", "STORAGE_", "CLOUDSDK_CONFIG", "HOME"],
        StoreKind::Azure => &["AZURE_", "AZURITE_", "MSI_", "IDENTITY_"],
        StoreKind::Http => &["AWS_CA_BUNDLE"],
    }
}

/// A hash of the settings in the environment that the client of a kind of store reads.
pub fn hash_settings(kind: StoreKind) -> blake3::Hash {
    let prefixes = setting_prefixes(kind);
    let mut settings: Vec<_> = std::env::vars_os()
        .filter(|(name, _)| {
            let name = name.as_encoded_bytes();
            prefixes.iter().any(|prefix| name.starts_with(prefix.as_bytes()))
        })
        .collect();
    settings.sort();
    let mut hasher = blake3::Hasher::new();
    if kind == StoreKind::S3 {
        hasher.update(credentials::aws_config_state().as_bytes());
    }
    for (name, value) in settings {
        for part in [name, value] {
            hasher.update(part.as_encoded_bytes());
            hasher.update(&[0]);
        }
    }
    hasher.finalize()
}

/// The endpoint of a kind of store, where it is not its cloud's own.
pub fn endpoint_of(kind: StoreKind) -> String {
    let names: &[&str] = match kind {
        StoreKind::S3 => &["AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL", "AWS_ENDPOINT"],
        StoreKind::Gcs => &["STORAGE_EMULATOR_HOST", "GOOGLE_BASE_URL"],
        StoreKind::Azure => &[
            "AZURE_STORAGE_ENDPOINT",
            "AZURITE_BLOB_STORAGE_URL",
            "AZURE_STORAGE_ACCOUNT_NAME",
            "AZURE_STORAGE_ACCOUNT",
        ],
        StoreKind::Http => &[],
    };
    names.iter().find_map(|name| credentials::non_empty(name)).unwrap_or_default()
}

/// Disables retries of the client: reads retry failed requests themselves, and resume where they broke.
fn no_retries() -> RetryConfig {
    RetryConfig { backoff: BackoffConfig::default(), max_retries: 0, retry_timeout: Duration::ZERO }
}

/// Builds the client of a store from the settings of its cloud. Records in `authorization` the credentials to renew.
pub fn build_client(
    url: &SourceUrl,
    options: &RemoteOptions,
    authorization: &mut Authorization,
) -> Result<StoreClient, RemoteError> {
    let query = authorization.query.clone();
    let has_query = query.is_some();
    let connector = Connector::new(options, url.kind, query)?;
    // Messages of the builders name settings, and no secret.
    let invalid = |error: object_store::Error| RemoteError::Other { message: error.to_string() };
    let text = |allow: bool| if allow { "true" } else { "false" };
    let skip = text(options.anonymous || has_query);
    let allow_http = text(options.allow_http);
    Ok(match url.kind {
        StoreKind::S3 => {
            let mut builder = AmazonS3Builder::from_env()
                .with_bucket_name(&url.host)
                .with_retry(no_retries())
                .with_http_connector(connector)
                .with_config(AmazonS3ConfigKey::SkipSignature, skip)
                .with_config(AmazonS3ConfigKey::Client(ClientConfigKey::AllowHttp), allow_http);
            let settings = credentials::aws_settings(options)?;
            authorization.credentials = settings.renewed;
            if let Some(region) = settings.region {
                builder = builder.with_region(region);
            }
            if let Some(endpoint) = settings.endpoint {
                builder = builder.with_endpoint(endpoint);
            }
            if let Some(provider) = settings.provider {
                builder = builder.with_credentials(provider);
            }
            StoreClient::paged(builder.build().map_err(invalid)?)
        }
        StoreKind::Gcs => {
            let mut builder = GoogleCloudStorageBuilder::from_env()
                .with_bucket_name(&url.host)
                .with_retry(no_retries())
                .with_http_connector(connector)
                .with_config(GoogleConfigKey::SkipSignature, skip)
                .with_config(GoogleConfigKey::Client(ClientConfigKey::AllowHttp), allow_http);
            if let Some(endpoint) = credentials::non_empty("STORAGE_EMULATOR_HOST") {
                let has_scheme = endpoint.contains("://");
                let endpoint = if has_scheme { endpoint } else { format!("http://{endpoint}") };
                builder = builder.with_config(GoogleConfigKey::BaseUrl, endpoint);
            }
            if let Some(provider) = credentials::gcp_provider(options)? {
                builder = builder.with_credentials(provider);
            } else if let Some(file) = credentials::gcp_default_file() {
                builder = builder.with_application_credentials(file.to_string_lossy());
            }
            StoreClient::paged(builder.build().map_err(invalid)?)
        }
        StoreKind::Azure => {
            let builder = credentials::azure_builder(options, has_query)?
                .with_container_name(&url.host)
                .with_retry(no_retries())
                .with_http_connector(connector)
                .with_config(AzureConfigKey::SkipSignature, skip)
                .with_config(AzureConfigKey::Client(ClientConfigKey::AllowHttp), allow_http);
            StoreClient::paged(builder.build().map_err(invalid)?)
        }
        StoreKind::Http => {
            let builder = HttpBuilder::new()
                .with_url(format!("{}://{}", url.scheme, url.host))
                .with_config(ClientConfigKey::AllowHttp, allow_http)
                .with_retry(no_retries())
                .with_http_connector(connector);
            StoreClient { objects: Arc::new(builder.build().map_err(invalid)?), pages: None }
        }
    })
}
