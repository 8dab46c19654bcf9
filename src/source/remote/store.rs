//! The client of one bucket, container or web server, and its requests.

use std::collections::{BTreeMap, HashMap};
use std::ops::Range;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use futures_util::StreamExt;
use futures_util::stream::BoxStream;
use object_store::aws::{AmazonS3Builder, AmazonS3ConfigKey};
use object_store::azure::{AzureConfigKey, MicrosoftAzureBuilder};
use object_store::gcp::{GoogleCloudStorageBuilder, GoogleConfigKey};
use object_store::http::HttpBuilder;
use object_store::path::Path as ObjectPath;
use object_store::{BackoffConfig, GetOptions, GetRange, ObjectMeta, ObjectStore, RetryConfig};
use tokio::sync::{Semaphore, SemaphorePermit};

use crate::source::disk_cache::{CachedObject, CachedVersion, DiskCache};
use crate::source::url::{SourceUrl, StoreKind};
use crate::threads::lock;

use super::credentials;
use super::error::{RemoteError, StoreFailure};
use super::options::RemoteOptions;
use super::outage::OutageWatch;
use super::retry::RetryBudget;
use super::transport::Connector;
use super::version::ObjectVersion;

/// Requests of one store that are in flight at once: enough to fill a fast network at 50 MB/s a connection.
const MAX_REQUEST_COUNT: usize = 64;

/// The longest outage before a store has answered once: its address may be wrong.
const FIRST_ANSWER_TIMEOUT: Duration = Duration::from_secs(10);

/// Names of a directory that are read. A listing beyond that is no model's.
const MAX_NAME_COUNT: usize = 100_000;

/// Objects of one store, by their keys.
pub struct RemoteStore {
    /// `None` if no request may be sent.
    client: Option<Box<dyn ObjectStore>>,
    /// The URL that it was opened for, of which it is the host.
    url: SourceUrl,
    /// The process that opened it: connections do not survive a fork.
    pid: u32,
    kind: StoreKind,
    /// The kind, the endpoint and the bucket: what tells it from other stores, in the cache on disk too.
    identity: String,
    /// Stands for the store in identities of files.
    pub id: u64,
    /// The cache on disk, if there is one.
    cache: Option<Arc<DiskCache>>,
    pub options: RemoteOptions,
    in_flight: Semaphore,
    has_answered: AtomicBool,
    pub outage: Arc<OutageWatch>,
    listings: Mutex<HashMap<String, Arc<StoreListing>>>,
}

impl std::fmt::Debug for RemoteStore {
    // Not the client, which has the credentials.
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("RemoteStore").field("kind", &self.kind).finish_non_exhaustive()
    }
}

/// The body of an answer.
pub struct ObjectBody {
    pub stream: BoxStream<'static, object_store::Result<bytes::Bytes>>,
}

/// What a directory has: objects with their versions, and directories.
#[derive(Debug, Default)]
pub struct ListedNames {
    pub objects: Vec<(String, ObjectMeta)>,
    pub directories: Vec<String>,
}

/// The names in a directory with their versions, and when they were asked for.
#[derive(Debug)]
pub struct StoreListing {
    pub taken_at: Instant,
    pub entries: BTreeMap<String, StoreEntry>,
}

/// What has a name in a directory.
#[derive(Clone, Debug)]
pub enum StoreEntry {
    Object(ObjectVersion),
    Directory,
}

/// Listings that a store remembers. A program that walks through more asks again.
const MAX_LISTING_COUNT: usize = 1000;

/// The stores that are open, by what their clients were made of.
static STORES: Mutex<Option<HashMap<StoreKey, Arc<RemoteStore>>>> = Mutex::new(None);

#[derive(Clone, PartialEq, Eq, Hash)]
struct StoreKey {
    kind: StoreKind,
    scheme: &'static str,
    host: String,
    endpoint: String,
    options: RemoteOptions,
    /// Of the settings of the clouds in the environment: other credentials are another client.
    settings: blake3::Hash,
    pid: u32,
}

/// How the settings begin that the clients find in the environment.
const SETTING_PREFIXES: [&str; 5] = ["AWS_", "AZURE_", "GOOGLE_", "STORAGE_", "HOME"];

fn hash_settings() -> blake3::Hash {
    let mut settings: Vec<_> = std::env::vars_os()
        .filter(|(name, _)| {
            let name = name.to_string_lossy();
            SETTING_PREFIXES.iter().any(|prefix| name.starts_with(prefix))
        })
        .collect();
    settings.sort();
    let mut hasher = blake3::Hasher::new();
    hasher.update(credentials::aws_files().as_bytes());
    for (name, value) in settings {
        for part in [name, value] {
            hasher.update(part.as_encoded_bytes());
            hasher.update(&[0]);
        }
    }
    hasher.finalize()
}

impl RemoteStore {
    /// The store of a URL. Stores are kept, with their connections.
    pub fn open(url: &SourceUrl) -> Result<Arc<RemoteStore>, RemoteError> {
        let options = RemoteOptions::current()?;
        let key = StoreKey {
            kind: url.kind,
            scheme: url.scheme,
            host: url.host.clone(),
            endpoint: endpoint_of(url.kind),
            options: options.clone(),
            settings: hash_settings(),
            pid: std::process::id(),
        };
        let known = lock(&STORES).as_ref().and_then(|stores| stores.get(&key).cloned());
        if let Some(store) = known {
            return Ok(store);
        }
        let identity = format!("{:?} {} {}", url.kind, key.endpoint, url.host);
        let hash = blake3::hash(identity.as_bytes());
        let [a, b, c, d, e, f, g, h, ..] = *hash.as_bytes();
        let cache = DiskCache::shared(&options.cache);
        let client = if options.offline { None } else { Some(build_client(url, &options)?) };
        let store = Arc::new(RemoteStore {
            client,
            identity,
            cache,
            url: url.clone(),
            pid: key.pid,
            kind: url.kind,
            id: u64::from_le_bytes([a, b, c, d, e, f, g, h]),
            in_flight: Semaphore::new(options.connections.map_or(MAX_REQUEST_COUNT, usize::from)),
            outage: Arc::new(OutageWatch::new(
                SourceUrl { key: String::new(), ..url.clone() }.to_string(),
                options.outage_timeout,
            )),
            options,
            has_answered: AtomicBool::new(false),
            listings: Mutex::default(),
        });
        let mut stores = lock(&STORES);
        let stores = stores.get_or_insert_default();
        Ok(Arc::clone(stores.entry(key).or_insert(store)))
    }

    /// The same store, or in a forked child one with connections of its own.
    pub fn of_this_process(self: &Arc<Self>) -> Result<Arc<RemoteStore>, StoreFailure> {
        if self.pid == std::process::id() {
            return Ok(Arc::clone(self));
        }
        RemoteStore::open(&self.url).map_err(StoreFailure::Permanent)
    }

    /// The listing of a directory, if it is not older.
    pub fn known_listing(&self, key: &str, max_age: Duration) -> Option<Arc<StoreListing>> {
        let known = lock(&self.listings).get(key).cloned();
        known.filter(|listing| listing.taken_at.elapsed() < max_age)
    }

    /// Forgets the listing that has an object of a key.
    pub fn forget_listing_of(&self, key: &str) {
        let parent = key.rsplit_once('/').map_or("", |(parent, _)| parent);
        lock(&self.listings).remove(parent);
    }

    /// Keeps the listing of a directory.
    pub fn remember_listing(&self, key: String, listing: Arc<StoreListing>) {
        let mut listings = lock(&self.listings);
        if listings.len() >= MAX_LISTING_COUNT {
            listings.clear();
        }
        listings.insert(key, listing);
    }

    /// The retries of one request or read. Fails at once in an outage that has just been found out.
    pub fn retry_budget(&self) -> Result<RetryBudget, StoreFailure> {
        let timeout = self.options.outage_timeout;
        let is_known = self.has_answered.load(Relaxed);
        let timeout = if is_known { timeout } else { timeout.min(FIRST_ANSWER_TIMEOUT) };
        RetryBudget::new(timeout, Arc::clone(&self.outage))
    }

    /// What the cache on disk has of a version of an object.
    pub fn cached_object(&self, key: &str, version: &ObjectVersion) -> Option<CachedObject> {
        let url = SourceUrl { key: key.to_owned(), ..self.url.clone() };
        let version = version.to_cached(url.to_string(), self.identity.clone(), key.to_owned());
        Some(self.cache.as_ref()?.object(version))
    }

    /// The objects that can be read without a request.
    pub fn cached_versions(&self) -> Vec<CachedVersion> {
        self.cache.as_ref().map(|cache| cache.versions(&self.identity)).unwrap_or_default()
    }

    fn client(&self) -> Result<&dyn ObjectStore, StoreFailure> {
        self.client.as_deref().ok_or(StoreFailure::Permanent(RemoteError::Offline))
    }

    fn object_path(&self, key: &str) -> Result<ObjectPath, StoreFailure> {
        let path = match self.kind {
            StoreKind::Http => ObjectPath::from_url_path(key),
            _ => ObjectPath::parse(key),
        };
        // No store has an object of such a name.
        path.map_err(|_| StoreFailure::Missing)
    }

    /// The answer of the client. One that says no is an answer, too.
    fn answered<T>(&self, answer: object_store::Result<T>) -> Result<T, StoreFailure> {
        let answer = self.began(answer);
        if !matches!(answer, Err(StoreFailure::Transient { .. })) {
            self.outage.on_answer();
        }
        answer
    }

    /// The beginning of an answer, whose body may not come.
    fn began<T>(&self, answer: object_store::Result<T>) -> Result<T, StoreFailure> {
        let answer = answer.map_err(StoreFailure::from);
        if !matches!(answer, Err(StoreFailure::Transient { .. })) {
            self.has_answered.store(true, Relaxed);
        }
        answer
    }

    /// The right to have a request in flight. Waiting for it is no outage.
    pub async fn permit(&self) -> SemaphorePermit<'_> {
        self.in_flight.acquire().await.expect("it is never closed")
    }

    /// The metadata of an object.
    pub async fn head(&self, key: &str) -> Result<ObjectMeta, StoreFailure> {
        let path = self.object_path(key)?;
        let options = GetOptions { head: true, ..GetOptions::default() };
        Ok(self.answered(self.client()?.get_opts(&path, options).await)?.meta)
    }

    /// A range of an object of a version. The answer has just this range, and the same version.
    pub async fn get(
        &self,
        key: &str,
        version: &ObjectVersion,
        range: Range<u64>,
    ) -> Result<ObjectBody, StoreFailure> {
        let path = self.object_path(key)?;
        let options = GetOptions {
            if_match: version.if_match(),
            range: Some(GetRange::Bounded(range.clone())),
            ..GetOptions::default()
        };
        let answer = self.began(self.client()?.get_opts(&path, options).await)?;
        let found = ObjectVersion::new(&answer.meta).map_err(StoreFailure::Permanent)?;
        if !found.is_same(version) {
            return Err(StoreFailure::Changed);
        }
        if answer.range != range {
            return Err(StoreFailure::Permanent(RemoteError::NoRanges));
        }
        Ok(ObjectBody { stream: answer.into_stream() })
    }

    /// Whether the server refuses a read of a version that an object does not have.
    pub async fn compares_versions(&self, key: &str) -> Result<bool, StoreFailure> {
        let path = self.object_path(key)?;
        let options = GetOptions {
            if_match: Some("\"no-version-of-it\"".to_owned()),
            range: Some(GetRange::Bounded(0..1)),
            ..GetOptions::default()
        };
        match self.answered(self.client()?.get_opts(&path, options).await) {
            Ok(_) => Ok(false),
            Err(StoreFailure::Changed) => Ok(true),
            Err(failure) => Err(failure),
        }
    }

    /// The names directly in a directory.
    pub async fn list(&self, prefix: &str) -> Result<ListedNames, StoreFailure> {
        let path = self.object_path(prefix)?;
        let no_listing = |failure| match (self.kind, failure) {
            (
                StoreKind::Http,
                StoreFailure::Permanent(RemoteError::Other { .. } | RemoteError::Denied { .. }),
            ) => StoreFailure::Permanent(RemoteError::NoListing),
            (_, failure) => failure,
        };
        let listed = self.client()?.list_with_delimiter(Some(&path)).await;
        let listed = self.answered(listed).map_err(no_listing)?;
        if listed.objects.len() + listed.common_prefixes.len() > MAX_NAME_COUNT {
            let error = RemoteError::TooManyNames { limit: MAX_NAME_COUNT };
            return Err(StoreFailure::Permanent(error));
        }
        let name = |path: &ObjectPath| path.filename().map(str::to_owned);
        // Not the object that marks the directory itself.
        let is_inside = |meta: &ObjectMeta| meta.location.as_ref().len() > path.as_ref().len();
        let objects = listed.objects.into_iter().filter(is_inside);
        Ok(ListedNames {
            objects: objects.filter_map(|meta| Some((name(&meta.location)?, meta))).collect(),
            directories: listed.common_prefixes.iter().filter_map(name).collect(),
        })
    }
}

/// The endpoint of a kind of store, where it is not its cloud's own.
pub fn endpoint_of(kind: StoreKind) -> String {
    let names: &[&str] = match kind {
        StoreKind::S3 => &["AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL", "AWS_ENDPOINT"],
        StoreKind::Gcs => &["STORAGE_EMULATOR_HOST", "GOOGLE_BASE_URL"],
        StoreKind::Azure => {
            &["AZURE_STORAGE_ENDPOINT", "AZURITE_BLOB_STORAGE_URL", "AZURE_STORAGE_ACCOUNT_NAME"]
        }
        StoreKind::Http => &[],
    };
    names.iter().find_map(|name| std::env::var(name).ok()).unwrap_or_default()
}

/// Failed requests are sent again by us, which resume where they broke.
fn no_retries() -> RetryConfig {
    RetryConfig { backoff: BackoffConfig::default(), max_retries: 0, retry_timeout: Duration::ZERO }
}

fn build_client(
    url: &SourceUrl,
    options: &RemoteOptions,
) -> Result<Box<dyn ObjectStore>, RemoteError> {
    let connector = Connector { options: options.clone() };
    // Messages of the builders name settings, and no secret.
    let invalid = |error: object_store::Error| RemoteError::Other { message: error.to_string() };
    let text = |allow: bool| if allow { "true" } else { "false" };
    let skip = text(options.anonymous);
    Ok(match url.kind {
        StoreKind::S3 => {
            let mut builder = AmazonS3Builder::from_env()
                .with_bucket_name(&url.host)
                .with_retry(no_retries())
                .with_http_connector(connector)
                .with_config(AmazonS3ConfigKey::SkipSignature, skip);
            let settings = credentials::aws_settings(options)?;
            if let Some(region) = settings.region {
                builder = builder.with_region(region);
            }
            if let Some(endpoint) = settings.endpoint {
                builder = builder.with_endpoint(endpoint);
            }
            if let Some(provider) = settings.provider {
                builder = builder.with_credentials(provider);
            }
            Box::new(builder.build().map_err(invalid)?)
        }
        StoreKind::Gcs => {
            let mut builder = GoogleCloudStorageBuilder::from_env()
                .with_bucket_name(&url.host)
                .with_retry(no_retries())
                .with_http_connector(connector)
                .with_config(GoogleConfigKey::SkipSignature, skip);
            if let Ok(endpoint) = std::env::var("STORAGE_EMULATOR_HOST") {
                let has_scheme = endpoint.contains("://");
                let endpoint = if has_scheme { endpoint } else { format!("http://{endpoint}") };
                builder = builder.with_config(GoogleConfigKey::BaseUrl, endpoint);
            }
            if let Some(provider) = credentials::gcp_provider(options)? {
                builder = builder.with_credentials(provider);
            }
            Box::new(builder.build().map_err(invalid)?)
        }
        StoreKind::Azure => {
            credentials::require_azure(options)?;
            let builder = MicrosoftAzureBuilder::from_env()
                .with_container_name(&url.host)
                .with_retry(no_retries())
                .with_http_connector(connector)
                .with_config(AzureConfigKey::SkipSignature, skip);
            Box::new(builder.build().map_err(invalid)?)
        }
        StoreKind::Http => {
            let builder = HttpBuilder::new()
                .with_url(format!("{}://{}", url.scheme, url.host))
                .with_retry(no_retries())
                .with_http_connector(connector);
            Box::new(builder.build().map_err(invalid)?)
        }
    })
}

impl ObjectBody {
    /// The next bytes; `None` at the end of the body.
    pub async fn next(&mut self) -> Option<Result<bytes::Bytes, StoreFailure>> {
        Some(self.stream.next().await?.map_err(StoreFailure::from))
    }
}
