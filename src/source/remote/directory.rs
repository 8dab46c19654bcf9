//! A prefix of a store as a directory.
//!
//! A listing states the version of each object, so that opening one costs no request. After the poll interval it is
//! requested again.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, SystemTime};

use object_store::ObjectMeta;

use crate::source::disk_cache::CachedVersion;
use crate::source::error::SourceError;
use crate::source::metadata::{FileIdentity, FileKind, FileMetadata, FileState};
use crate::source::store::{DirEntry, FileHandle, LinkPolicy, MetadataQuery, SourceDirectory};
use crate::source::url::{SourceUrl, UrlError, shown_path};

use super::error::RemoteError;
use super::failure::StoreFailure;
use super::file::{RemoteFile, remote_error};
use super::listing::{StoreEntry, StoreListing};
use super::runtime::block_on;
use super::store::{ObjectHead, RemoteStore};
use super::version::{ObjectVersion, short_hash};

/// Threads that read headers at once, each with one small request at a time: for the network, a few connections.
const READER_THREADS: usize = 32;

/// The time for retries of the first request for a name, before its listing is requested.
const FIRST_LOOK_TIMEOUT: Duration = Duration::from_millis(200);

/// A directory of a store.
#[derive(Debug)]
pub struct RemoteDirectory {
    store: Arc<RemoteStore>,
    /// The key of the directory; empty at the top.
    key: String,
    /// The URL for messages.
    path: PathBuf,
}

impl RemoteDirectory {
    /// The directory of a URL that the user typed. No request is sent yet.
    pub fn open(
        typed: &Path,
        url: Result<SourceUrl, UrlError>,
    ) -> Result<RemoteDirectory, SourceError> {
        let opened = url.map_err(RemoteError::from).and_then(|url| {
            let store = RemoteStore::open(&url)?;
            let path = url.to_shown_path();
            Ok(RemoteDirectory { store, key: url.key, path })
        });
        opened.map_err(|error| {
            let path = display_url(typed, &error);
            remote_error(path, "open it", StoreFailure::Permanent(error))
        })
    }

    /// Whether the URL leads to a directory, and not to an object.
    pub fn is_directory(&self) -> Result<bool, SourceError> {
        let top = Path::new("");
        if self.key.is_empty() {
            return self.listing(top).map(|_| true);
        }
        self.store.forget_lookup(&self.key);
        match self.look_up(top)? {
            StoreEntry::Object(_) => {
                self.store.offer_lookup(&self.key);
                Ok(false)
            }
            StoreEntry::Directory => Ok(true),
        }
    }

    /// Asks the store what a path leads to. An empty object with names beneath it marks a directory.
    fn look_up(&self, inside: &Path) -> Result<StoreEntry, SourceError> {
        if self.store.options.offline {
            return self.look_up_offline(inside);
        }
        let mut head = self.head(inside, Some(FIRST_LOOK_TIMEOUT));
        if is_outage(&head) {
            // Some servers fail on the name of a directory.
            if self.has_names(inside)? {
                return Ok(StoreEntry::Directory);
            }
            head = self.head(inside, None);
        }
        let object = head.and_then(|head| Ok((self.object_version(inside, &head.meta)?, head)));
        let version = match object {
            Ok((version, head)) if !head.may_be_directory => version,
            Ok((version, _)) => match self.has_names(inside)? {
                true => return Ok(StoreEntry::Directory),
                false => version,
            },
            Err(error) if may_be_directory(&error) && self.has_names(inside)? => {
                return Ok(StoreEntry::Directory);
            }
            Err(error) => return Err(error),
        };
        self.store.remember_object(self.key_of(inside)?, version.clone());
        Ok(StoreEntry::Object(version))
    }

    /// Requests metadata of an object until the server is given up, or for a shorter time.
    fn head(&self, inside: &Path, timeout: Option<Duration>) -> Result<ObjectHead, SourceError> {
        self.request("look at it", inside, timeout, |store, key| Box::pin(store.head(key)))
    }

    /// What a path leads to, as far as the cache on disk knows.
    fn look_up_offline(&self, inside: &Path) -> Result<StoreEntry, SourceError> {
        let key = self.key_of(inside)?;
        let (parent, name) = key.rsplit_once('/').unwrap_or(("", &key));
        let mut entries = offline_entries(parent, &self.store.cached_versions());
        entries.remove(name).ok_or_else(|| {
            let failure = StoreFailure::Permanent(RemoteError::Offline);
            remote_error(self.display_path(inside), "look at it", failure)
        })
    }

    fn object_version(
        &self,
        inside: &Path,
        meta: &ObjectMeta,
    ) -> Result<ObjectVersion, SourceError> {
        ObjectVersion::new(meta).map_err(|error| {
            remote_error(self.display_path(inside), "open it", StoreFailure::Permanent(error))
        })
    }

    /// Whether a directory has any names. A server without listings has none.
    fn has_names(&self, inside: &Path) -> Result<bool, SourceError> {
        match self.listing(inside) {
            Ok(listing) => Ok(!listing.entries.is_empty()),
            Err(error) if error.is_missing() || error.is_denied_by_store() => Ok(false),
            Err(SourceError::Remote { error, .. }) if matches!(*error, RemoteError::NoListing) => {
                Ok(false)
            }
            Err(error) => Err(error),
        }
    }

    fn display_path(&self, inside: &Path) -> PathBuf {
        match self.key_of(inside) {
            Ok(key) => self.store.url_of(&key).to_shown_path(),
            Err(_) => self.path.join(inside),
        }
    }

    /// The key of a path inside.
    fn key_of(&self, inside: &Path) -> Result<String, SourceError> {
        let missing = || SourceError::Missing { path: self.path.join(inside) };
        let resolved = self.resolve_by_name(inside).ok_or_else(missing)?.path;
        let inside = resolved.to_str().ok_or_else(missing)?;
        Ok(match (self.key.is_empty(), inside.is_empty()) {
            (true, _) => inside.to_owned(),
            (false, true) => self.key.clone(),
            (false, false) => format!("{}/{inside}", self.key),
        })
    }

    /// Sends a request until it succeeds or the server is given up.
    fn request<T>(
        &self,
        action: &'static str,
        inside: &Path,
        timeout: Option<Duration>,
        send: impl for<'a> Fn(&'a RemoteStore, &'a str) -> Answer<'a, T>,
    ) -> Result<T, SourceError> {
        let key = self.key_of(inside)?;
        let error = |failure| remote_error(self.display_path(inside), action, failure);
        let attempts = async {
            let store = self.store.of_this_process()?;
            let _permit = store.permit(0).await;
            let mut budget = store.retry_budget(timeout)?;
            loop {
                match send(&store, &key).await {
                    Ok(answer) => return Ok(answer),
                    Err(failure) => budget.wait_after(failure).await?,
                }
            }
        };
        let answer = block_on(attempts).map_err(|failed| error(StoreFailure::Permanent(failed)))?;
        answer.map_err(error)
    }

    /// The listing of a directory inside, not older than it may be.
    fn listing(&self, inside: &Path) -> Result<Arc<StoreListing>, SourceError> {
        let key = self.key_of(inside)?;
        if let Some(known) = self.store.known_listing(&key, self.store.options.poll_interval) {
            return Ok(known);
        }
        let mut listing = StoreListing::new();
        let too_long = |failure| remote_error(self.display_path(inside), "list it", failure);
        if self.store.options.offline {
            for (name, entry) in offline_entries(&key, &self.store.cached_versions()) {
                listing.add(&name, entry).map_err(too_long)?;
            }
        } else {
            let mut token = None;
            loop {
                // Only the page that failed is requested again.
                let page = self.request("list it", inside, None, |store, key| {
                    Box::pin(store.list_page(key, token.clone()))
                });
                let page = match (page, self.store.known_objects_in(&key)) {
                    // Shows only known objects, such as the file that the URL names.
                    (Err(SourceError::Remote { error, .. }), Some(known))
                        if matches!(*error, RemoteError::NoListing) =>
                    {
                        for (name, version) in known {
                            listing.add(&name, StoreEntry::Object(version)).map_err(too_long)?;
                        }
                        return Ok(Arc::new(listing));
                    }
                    (page, _) => page?,
                };
                listing.add_page(&key, page.result).map_err(too_long)?;
                match page.page_token {
                    Some(next) if !next.is_empty() => token = Some(next),
                    _ => break,
                }
            }
        }
        let listing = Arc::new(listing);
        self.store.remember_listing(key, Arc::clone(&listing));
        Ok(listing)
    }

    /// The entry of a path: from a known listing or a recent lookup, else by a request.
    fn entry(&self, inside: &Path, may_be_old: bool) -> Result<StoreEntry, SourceError> {
        let parent = inside.parent().unwrap_or(Path::new(""));
        let Some(name) = inside.file_name().and_then(|name| name.to_str()) else {
            return Ok(StoreEntry::Directory);
        };
        let known = self.store.known_listing(&self.key_of(parent)?, Duration::MAX);
        let listing = match known {
            // A reader of one name often reads others: one listing renews them all.
            Some(_) if !may_be_old => self.listing(parent)?,
            Some(listing) => listing,
            None => match self.store.take_lookup(&self.key_of(inside)?) {
                Some(version) => return Ok(StoreEntry::Object(version)),
                None => return self.look_up(inside),
            },
        };
        let missing = || SourceError::Missing { path: self.display_path(inside) };
        listing.entries.get(name).cloned().ok_or_else(missing)
    }

    /// The state of a directory, which changes with its names.
    fn directory_state(&self, inside: &Path, may_be_old: bool) -> Result<FileState, SourceError> {
        let key = self.key_of(inside)?;
        let listing = match may_be_old {
            true => self.store.known_listing(&key, Duration::MAX),
            false => Some(self.listing(inside)?),
        };
        let mut names = blake3::Hasher::new();
        for (name, entry) in listing.iter().flat_map(|listing| &listing.entries) {
            names.update(name.as_bytes());
            names.update(&[0, u8::from(matches!(entry, StoreEntry::Directory))]);
        }
        let [ino, names] = [blake3::hash(key.as_bytes()), names.finalize()].map(short_hash);
        let mtime = names.cast_signed();
        let identity = FileIdentity { dev: self.store.id, ino, size: 0, mtime, mtime_nsec: 0 };
        Ok(FileState { identity, ctime: 0, ctime_nsec: 0 })
    }
}

type Answer<'a, T> = std::pin::Pin<Box<dyn Future<Output = Result<T, StoreFailure>> + Send + 'a>>;

impl SourceDirectory for RemoteDirectory {
    fn reader_threads(&self) -> usize {
        READER_THREADS
    }

    fn path(&self) -> &Path {
        &self.path
    }

    fn shown_path(&self, inside: &Path) -> PathBuf {
        self.display_path(inside)
    }

    fn entries(&self, inside: &Path) -> Result<Vec<DirEntry>, SourceError> {
        let listing = self.listing(inside)?;
        let entry = |(name, entry): (&String, &StoreEntry)| DirEntry {
            name: name.into(),
            kind: match entry {
                StoreEntry::Object(_) => FileKind::File,
                StoreEntry::Directory => FileKind::Directory,
            },
        };
        Ok(listing.entries.iter().map(entry).collect())
    }

    fn metadata(&self, inside: &Path, query: MetadataQuery) -> Result<FileMetadata, SourceError> {
        let key = self.key_of(inside)?;
        let may_be_old = query == MetadataQuery::Cached;
        match self.entry(inside, may_be_old)? {
            StoreEntry::Object(version) => {
                let state = version.state(self.store.id, &key);
                Ok(FileMetadata::of_remote(FileKind::File, state, version.modified()))
            }
            StoreEntry::Directory => {
                let state = self.directory_state(inside, may_be_old)?;
                Ok(FileMetadata::of_remote(FileKind::Directory, state, SystemTime::UNIX_EPOCH))
            }
        }
    }

    fn open(&self, inside: &Path, _: LinkPolicy) -> Result<Box<dyn FileHandle>, SourceError> {
        let path = self.display_path(inside);
        match self.entry(inside, false)? {
            StoreEntry::Directory => Err(SourceError::NotAFile { path, kind: "a directory" }),
            StoreEntry::Object(version) => {
                let key = self.key_of(inside)?;
                Ok(Box::new(RemoteFile::new(Arc::clone(&self.store), key, version, path)))
            }
        }
    }
}

fn is_outage<T>(answer: &Result<T, SourceError>) -> bool {
    matches!(answer, Err(SourceError::Remote { error, .. }) if matches!(**error, RemoteError::Outage { .. }))
}

/// Whether a name that cannot be looked at may be one of a directory. Credentials may list a directory and be denied to look
/// for an object of its name; web servers answer as they like.
fn may_be_directory(error: &SourceError) -> bool {
    let SourceError::Remote { error: remote, .. } = error else { return error.is_missing() };
    error.is_denied_by_store()
        || matches!(
            **remote,
            RemoteError::NoListing | RemoteError::NoVersion | RemoteError::Other { .. }
        )
}

/// The names in a directory that the cache on disk has objects of.
fn offline_entries(directory: &str, versions: &[CachedVersion]) -> BTreeMap<String, StoreEntry> {
    let mut entries = BTreeMap::new();
    for cached in versions {
        let inside = match directory {
            "" => Some(&*cached.key),
            _ => cached.key.strip_prefix(directory).and_then(|rest| rest.strip_prefix('/')),
        };
        let Some(inside) = inside else { continue };
        match inside.split_once('/') {
            Some((name, _)) => {
                entries.entry(name.to_owned()).or_insert(StoreEntry::Directory);
            }
            None => {
                let version = StoreEntry::Object(ObjectVersion::from_cached(cached));
                entries.insert(inside.to_owned(), version);
            }
        }
    }
    entries
}

/// A URL that was refused, without what may be a secret.
fn display_url(typed: &Path, error: &RemoteError) -> PathBuf {
    if !matches!(error, RemoteError::Url(UrlError::UserInfo)) {
        return shown_path(typed).into_owned();
    }
    let text = typed.to_string_lossy();
    let (scheme, rest) = text.split_once(":/").unwrap_or(("", ""));
    let rest = rest.trim_start_matches('/');
    let host = &rest[..rest.find(['/', '?', '#']).unwrap_or(rest.len())];
    let host = host.rsplit_once('@').map_or(host, |(_, host)| host);
    format!("{scheme}://…@{host}").into()
}
