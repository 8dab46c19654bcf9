//! One bucket, container or web server: its requests, and what is known of it.

use std::collections::{BTreeMap, HashMap};
use std::ops::Range;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use futures_util::stream::{BoxStream, StreamExt, TryStreamExt};
use object_store::list::{PaginatedListOptions, PaginatedListResult};
use object_store::path::Path as ObjectPath;
use object_store::{Attribute, GetOptions, GetRange, ObjectMeta};

use crate::source::disk_cache::{CachedObject, CachedVersion, DiskCache};
use crate::source::url::{QuerySource, SourceUrl, StoreKind};
use crate::threads::lock_holding_forks;

use super::client::{StoreClient, build_client, endpoint_of, hash_settings};
use super::concurrency::{DEFAULT_MAX_LIMIT, RequestGate, RequestPermit};
use super::credentials::{self, Authorization};
use super::error::RemoteError;
use super::failure::{StoreFailure, asks_for_less, is_unanswered};
use super::listing::{ListingCache, StoreListing};
use super::options::RemoteOptions;
use super::outage::OutageWatch;
use super::retry::RetryBudget;
use super::secret_query::SecretQuery;
use super::version::{ObjectVersion, short_hash};

/// The body of an answer, in pieces.
pub type ObjectBody = BoxStream<'static, Result<bytes::Bytes, StoreFailure>>;

/// Metadata of an object, as a store states it.
pub struct ObjectHead {
    pub meta: ObjectMeta,
    /// An empty object can mark a directory, and web servers answer with a page in place of one.
    pub may_be_directory: bool,
}

/// Maximum objects that are remembered after a lookup; all are dropped then. Few are looked up by their own URL.
const MAX_KNOWN_OBJECT_COUNT: usize = 1000;

/// An object that was looked up, and when.
struct KnownObject {
    version: ObjectVersion,
    /// `None` unless the next open may use the version.
    looked_up_at: Option<Instant>,
}

/// Objects of one store, by their keys.
pub struct RemoteStore {
    /// `None` if no request may be sent.
    client: Option<StoreClient>,
    /// Renews what the client's requests are authorized by.
    authorization: Authorization,
    /// A URL of the store.
    url: SourceUrl,
    /// The process that opened it: connections do not survive a fork.
    pid: u32,
    /// The kind, the endpoint and the bucket: what tells it from other stores, in the cache on disk too.
    identity: String,
    /// Stands for the store in identities of files.
    pub id: u64,
    /// The cache on disk, if there is one.
    cache: Option<Arc<DiskCache>>,
    pub options: RemoteOptions,
    gate: RequestGate,
    pub outage: Arc<OutageWatch>,
    listings: Mutex<ListingCache>,
    has_noted_weak_versions: AtomicBool,
    /// Objects that were looked up, by their keys. A server without listings shows these.
    known_objects: Mutex<BTreeMap<String, KnownObject>>,
}

impl std::fmt::Debug for RemoteStore {
    // The client has credentials, which are never shown.
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("RemoteStore").field("kind", &self.url.kind).finish_non_exhaustive()
    }
}

/// The stores that are open, by what their clients were made of.
static STORES: Mutex<Option<HashMap<StoreKey, Arc<RemoteStore>>>> = Mutex::new(None);

#[derive(Clone, PartialEq, Eq, Hash)]
struct StoreKey {
    kind: StoreKind,
    scheme: &'static str,
    host: String,
    endpoint: String,
    options: RemoteOptions,
    /// The hash of the clouds' settings in the environment: other credentials are another client.
    settings: blake3::Hash,
    /// The file with the query string of requests, and a hash of that.
    query: Option<(QuerySource, blake3::Hash)>,
    pid: u32,
}

/// Refuses an endpoint with credentials in it: the cache on disk and messages name the endpoint.
fn refuse_secrets(endpoint: &str) -> Result<(), RemoteError> {
    let address = endpoint.split_once("://").map_or(endpoint, |(_, address)| address);
    let host = address.split(['/', '?', '#']).next().unwrap_or_default();
    if !host.contains('@') && !address.contains(['?', '#']) {
        return Ok(());
    }
    Err(RemoteError::BadCredentials {
        why: "the endpoint of the store has a user name, a password or a query string".to_owned(),
        remedy: "take it out of the variable or the profile that names the endpoint, and give the credentials in variables of their own".to_owned(),
    })
}

impl RemoteStore {
    /// The store of a URL. Stores are kept, with their connections.
    pub fn open(url: &SourceUrl) -> Result<Arc<RemoteStore>, RemoteError> {
        let options = RemoteOptions::current()?;
        let query = SecretQuery::read(url)?;
        let key = StoreKey {
            kind: url.kind,
            scheme: url.scheme,
            host: url.host.clone(),
            endpoint: endpoint_of(url.kind),
            options: options.clone(),
            settings: hash_settings(url.kind),
            query: query.as_ref().map(|query| (query.source().clone(), query.hash())),
            pid: std::process::id(),
        };
        let known =
            lock_holding_forks(&STORES).as_ref().and_then(|stores| stores.get(&key).cloned());
        if let Some(store) = known {
            return Ok(store);
        }
        let endpoint = match (url.kind, &*key.endpoint) {
            (StoreKind::S3, "") => credentials::aws_profile_endpoint().unwrap_or_default(),
            (_, endpoint) => endpoint.to_owned(),
        };
        refuse_secrets(&endpoint)?;
        let identity = format!("{:?} {endpoint} {}", url.kind, url.host);
        let cache = DiskCache::shared(&options.cache);
        let mut authorization = Authorization::with_query(query);
        let client = match options.offline {
            true => None,
            false => Some(build_client(url, &options, &mut authorization)?),
        };
        let store = Arc::new(RemoteStore {
            client,
            id: short_hash(blake3::hash(identity.as_bytes())),
            authorization,
            identity,
            cache,
            url: url.clone(),
            pid: key.pid,
            gate: RequestGate::new(options.connections),
            outage: Arc::new(OutageWatch::new(
                SourceUrl { key: String::new(), ..url.clone() }.to_string(),
                options.outage_timeout,
            )),
            options,
            listings: Mutex::default(),
            has_noted_weak_versions: AtomicBool::new(false),
            known_objects: Mutex::default(),
        });
        let mut stores = lock_holding_forks(&STORES);
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

    /// The URL of an object or a directory.
    pub fn url_of(&self, key: &str) -> SourceUrl {
        SourceUrl { key: key.to_owned(), ..self.url.clone() }
    }

    /// The listing of a directory, if it is not older.
    pub fn known_listing(&self, key: &str, max_age: Duration) -> Option<Arc<StoreListing>> {
        lock_holding_forks(&self.listings).get(key, max_age)
    }

    /// Forgets an object's version: the listing of its directory, and its lookup.
    pub fn forget_version_of(&self, key: &str) {
        self.forget_lookup(key);
        let parent = key.rsplit_once('/').map_or("", |(parent, _)| parent);
        lock_holding_forks(&self.listings).remove(parent);
    }

    /// Keeps the listing of a directory.
    pub fn remember_listing(&self, key: String, listing: Arc<StoreListing>) {
        lock_holding_forks(&self.listings).insert(key, listing);
    }

    /// Keeps an object that was looked up.
    pub fn remember_object(&self, key: String, version: ObjectVersion) {
        let mut objects = lock_holding_forks(&self.known_objects);
        if objects.len() >= MAX_KNOWN_OBJECT_COUNT {
            objects.clear();
        }
        objects.insert(key, KnownObject { version, looked_up_at: None });
    }

    /// Lets no open use the version of an earlier lookup.
    pub fn forget_lookup(&self, key: &str) {
        if let Some(object) = lock_holding_forks(&self.known_objects).get_mut(key) {
            object.looked_up_at = None;
        }
    }

    /// Lets the next open of an object that was looked up use its version.
    pub fn offer_lookup(&self, key: &str) {
        if let Some(object) = lock_holding_forks(&self.known_objects).get_mut(key) {
            object.looked_up_at = Some(Instant::now());
        }
    }

    /// Takes the version that a lookup has just found, for one open: it needs no request of its own. The version may be as old
    /// as that of a listing.
    pub fn take_lookup(&self, key: &str) -> Option<ObjectVersion> {
        let mut objects = lock_holding_forks(&self.known_objects);
        let object = objects.get_mut(key)?;
        object.looked_up_at.take().filter(|at| at.elapsed() < self.options.poll_interval)?;
        Some(object.version.clone())
    }

    /// The objects directly in a directory that were looked up; `None` without any, or if the store has listings.
    pub fn known_objects_in(&self, directory: &str) -> Option<Vec<(String, ObjectVersion)>> {
        if self.url.kind != StoreKind::Http {
            return None;
        }
        let objects = lock_holding_forks(&self.known_objects);
        let inside = objects.iter().filter_map(|(key, object)| {
            let (parent, name) = key.rsplit_once('/').unwrap_or(("", key));
            (parent == directory).then(|| (name.to_owned(), object.version.clone()))
        });
        Some(inside.collect::<Vec<_>>()).filter(|inside| !inside.is_empty())
    }

    /// The retries of one request or read. Fails at once in an outage that has just been found out.
    /// With a timeout, they end that early.
    pub fn retry_budget(&self, timeout: Option<Duration>) -> Result<RetryBudget, StoreFailure> {
        RetryBudget::new(Arc::clone(&self.outage), timeout)
    }

    /// What the cache on disk has of a version of an object.
    pub fn cached_object(&self, key: &str, version: &ObjectVersion) -> Option<CachedObject> {
        let version =
            version.to_cached(self.url_of(key).to_string(), self.identity.clone(), key.to_owned());
        Some(CachedObject::new(Arc::clone(self.cache.as_ref()?), version))
    }

    /// The objects that can be read without a request.
    pub fn cached_versions(&self) -> Vec<CachedVersion> {
        self.cache.as_ref().map(|cache| cache.versions(&self.identity)).unwrap_or_default()
    }

    fn client(&self) -> Result<&StoreClient, StoreFailure> {
        self.client.as_ref().ok_or(StoreFailure::Permanent(RemoteError::Offline))
    }

    fn object_path(&self, key: &str) -> Result<ObjectPath, StoreFailure> {
        // No store has an object of such a name.
        ObjectPath::parse(key).map_err(|_| StoreFailure::Missing)
    }

    /// Records an answer of the server. A refusal is an answer, too.
    fn record_answer<T>(&self, answer: object_store::Result<T>) -> Result<T, StoreFailure> {
        let answer = self.record_start(answer);
        if answer.is_ok() {
            self.outage.on_answer();
        }
        answer
    }

    /// Records the start of an answer, whose body may not come. A refusal has no body to wait for.
    fn record_start<T>(&self, answer: object_store::Result<T>) -> Result<T, StoreFailure> {
        if answer.as_ref().is_err_and(asks_for_less) {
            self.gate.on_busy();
        }
        if !answer.as_ref().is_err_and(is_unanswered) {
            self.outage.on_contact();
        }
        let answer = answer.map_err(|error| self.authorization.on_failure(error.into()));
        match &answer {
            Ok(_) => self.authorization.on_success(),
            Err(StoreFailure::Transient { .. }) => {}
            Err(_) => self.outage.on_answer(),
        }
        answer
    }

    /// The right to have a request for so many bytes in flight. Waiting for it is no outage.
    pub async fn permit(&self, bytes: u64) -> RequestPermit<'_> {
        self.gate.permit(bytes).await
    }

    /// The most requests for parts at once.
    pub fn max_request_count(&self) -> usize {
        self.options.connections.map_or(DEFAULT_MAX_LIMIT, usize::from)
    }

    /// The metadata of an object.
    pub async fn head(&self, key: &str) -> Result<ObjectHead, StoreFailure> {
        let path = self.object_path(key)?;
        // Presigned URLs are for GET alone, and an answer to HEAD cannot say why it is a denial.
        let first_byte =
            GetOptions { range: Some(GetRange::Bounded(0..1)), ..GetOptions::default() };
        if self.authorization.query.is_some() {
            let answer = self.client()?.objects.get_opts(&path, first_byte).await;
            let meta = self.record_answer(answer)?.meta;
            return Ok(ObjectHead { meta, may_be_directory: false });
        }
        let options = GetOptions { head: true, ..GetOptions::default() };
        let head = self.client()?.objects.get_opts(&path, options).await;
        let answer = match head {
            // The answer of S3 to credentials that have expired.
            Err(object_store::Error::Generic { source, .. })
                if source.to_string().contains("400 Bad Request") =>
            {
                self.client()?.objects.get_opts(&path, first_byte).await
            }
            answer => answer,
        };
        let answer = self.record_answer(answer)?;
        let is_page = self.url.kind == StoreKind::Http
            && answer.attributes.get(&Attribute::ContentType).is_some_and(|content_type| {
                content_type.as_ref().to_ascii_lowercase().starts_with("text/html")
            });
        let may_be_directory = answer.meta.size == 0 || is_page;
        Ok(ObjectHead { meta: answer.meta, may_be_directory })
    }

    /// Says once that this store's versions do not tell changes within a second.
    pub fn note_weak_version(&self) {
        if !self.has_noted_weak_versions.swap(true, Relaxed) {
            let (scheme, host) = (self.url.scheme, &self.url.host);
            tracing::warn!(
                store = %format_args!("{scheme}://{host}"),
                "the server states no strong ETag: a change within one second cannot be seen"
            );
        }
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
        let answer = self.record_start(self.client()?.objects.get_opts(&path, options).await)?;
        let found = ObjectVersion::new(&answer.meta).map_err(StoreFailure::Permanent)?;
        if !version.matches(&found) {
            return Err(StoreFailure::Changed);
        }
        if answer.range != range {
            return Err(StoreFailure::Permanent(RemoteError::NoRanges));
        }
        Ok(answer.into_stream().map_err(StoreFailure::from).boxed())
    }

    /// Whether the server honours If-Match: it must refuse a version that the object does not have.
    pub async fn compares_versions(&self, key: &str) -> Result<bool, StoreFailure> {
        let path = self.object_path(key)?;
        let options = GetOptions {
            if_match: Some("\"no-version-of-it\"".to_owned()),
            range: Some(GetRange::Bounded(0..1)),
            ..GetOptions::default()
        };
        match self.record_answer(self.client()?.objects.get_opts(&path, options).await) {
            Ok(_) => Ok(false),
            Err(StoreFailure::Changed) => Ok(true),
            Err(failure) => Err(failure),
        }
    }

    /// One page of the names directly in a directory, from a token on, and the token of the next page.
    pub async fn list_page(
        &self,
        directory: &str,
        token: Option<String>,
    ) -> Result<PaginatedListResult, StoreFailure> {
        if self.url.kind == StoreKind::Http && self.authorization.query.is_some() {
            // A presigned URL is that of one file.
            return Err(StoreFailure::Permanent(RemoteError::NoListing));
        }
        let path = self.object_path(directory)?;
        let prefix = if directory.is_empty() { String::new() } else { format!("{path}/") };
        let options = PaginatedListOptions {
            delimiter: Some("/".into()),
            page_token: token.clone(),
            ..PaginatedListOptions::default()
        };
        let client = self.client()?;
        let page = match &client.pages {
            Some(pages) => pages.list_paginated(Some(&prefix), options).await,
            // A web server lists a directory in one answer.
            None => client
                .objects
                .list_with_delimiter(Some(&path))
                .await
                .map(|result| PaginatedListResult { result, page_token: None }),
        };
        let no_listing = |failure| match (self.url.kind, failure) {
            (
                StoreKind::Http,
                StoreFailure::Permanent(RemoteError::Other { .. } | RemoteError::Denied { .. }),
            ) => StoreFailure::Permanent(RemoteError::NoListing),
            (_, failure) => failure,
        };
        self.record_answer(page).map_err(no_listing)
    }
}
