//! The version of an object: what tells its bytes from those of another object of the same name.

use std::time::{Duration, SystemTime};

use object_store::ObjectMeta;

use crate::source::disk_cache::CachedVersion;
use crate::source::metadata::{FileIdentity, FileState};

use super::error::RemoteError;

/// Identifies the content of an object.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ObjectVersion {
    /// The ETag without its quotes; `None` if the server gives none.
    etag: Option<String>,
    /// Whether the ETag is a weak one, which servers do not compare for ranges.
    is_weak: bool,
    /// Seconds of Last-Modified since 1970; 0 if the server gives none.
    modified: i64,
    /// Bytes of the object.
    pub size: u64,
}

impl ObjectVersion {
    /// The version in metadata of a listing or an answer.
    pub fn new(meta: &ObjectMeta) -> Result<ObjectVersion, RemoteError> {
        let etag = meta.e_tag.as_deref().filter(|etag| !etag.is_empty());
        let strong = etag.map(|etag| etag.strip_prefix("W/").unwrap_or(etag));
        let version = ObjectVersion {
            etag: strong.map(|etag| etag.trim_matches('"').to_owned()),
            is_weak: etag.is_some_and(|etag| etag.starts_with("W/")),
            modified: meta.last_modified.timestamp(),
            size: meta.size,
        };
        if i64::try_from(version.size).is_err() {
            return Err(RemoteError::ImpossibleSize);
        }
        match version.etag.is_some() || version.modified != 0 {
            true => Ok(version),
            false => Err(RemoteError::NoVersion),
        }
    }

    /// The version as the cache on disk knows it.
    pub fn to_cached(&self, url: String, store: String, key: String) -> CachedVersion {
        let ObjectVersion { etag, is_weak, modified, size } = self.clone();
        CachedVersion { url, store, key, size, etag, is_weak, modified }
    }

    /// The version that the cache on disk has.
    pub fn from_cached(cached: &CachedVersion) -> ObjectVersion {
        let CachedVersion { url: _, store: _, key: _, size, etag, is_weak, modified } =
            cached.clone();
        ObjectVersion { etag, is_weak, modified, size }
    }

    /// Whether another content always has another version.
    pub fn is_strong(&self) -> bool {
        self.etag.is_some() && !self.is_weak
    }

    /// Bytes of the ETag.
    pub fn etag_len(&self) -> usize {
        self.etag.as_ref().map_or(0, String::len)
    }

    /// The value of If-Match; `None` if the server could not compare it.
    pub fn if_match(&self) -> Option<String> {
        let etag = self.etag.as_ref().filter(|_| !self.is_weak)?;
        Some(format!("\"{etag}\""))
    }

    /// Whether an answer has this version. Some servers round Last-Modified differently in listings, so that it counts only
    /// where this version has no ETag: others leave ETags out of listings alone.
    pub fn matches(&self, answer: &ObjectVersion) -> bool {
        let is_same_tag = match (&self.etag, &answer.etag) {
            (Some(own), Some(others)) => own == others,
            (Some(_), None) => false,
            (None, _) => self.modified == answer.modified,
        };
        is_same_tag && self.size == answer.size
    }

    /// The state of the object as if it were a file: its device is the store, its inode number is the version.
    pub fn state(&self, store: u64, key: &str) -> FileState {
        let mut hasher = blake3::Hasher::new();
        hasher.update(key.as_bytes());
        hasher.update(&[0]);
        match &self.etag {
            Some(etag) => hasher.update(etag.as_bytes()),
            None => hasher.update(&self.modified.to_le_bytes()),
        };
        // Some servers round times differently in listings.
        let time = if self.etag.is_some() { 0 } else { self.modified };
        let identity = FileIdentity {
            dev: store,
            ino: short_hash(hasher.finalize()),
            size: self.size,
            mtime: time,
            mtime_nsec: 0,
        };
        FileState { identity, ctime: time, ctime_nsec: 0 }
    }

    /// The time of the last write.
    pub fn modified(&self) -> SystemTime {
        SystemTime::UNIX_EPOCH + Duration::from_secs(self.modified.max(0).unsigned_abs())
    }
}

/// The first eight bytes of a hash, where the system has numbers.
pub fn short_hash(hash: blake3::Hash) -> u64 {
    let [a, b, c, d, e, f, g, h, ..] = *hash.as_bytes();
    u64::from_le_bytes([a, b, c, d, e, f, g, h])
}

#[cfg(test)]
mod tests {
    use chrono::{DateTime, Utc};

    use super::*;

    fn meta(etag: Option<&str>, modified: i64) -> ObjectMeta {
        ObjectMeta {
            location: "key".into(),
            last_modified: DateTime::<Utc>::from_timestamp(modified, 123).unwrap(),
            size: 5,
            e_tag: etag.map(str::to_owned),
            version: None,
        }
    }

    #[test]
    fn versions_are_compared_by_etag_and_without_one_by_time() {
        let version = |etag, modified| ObjectVersion::new(&meta(etag, modified)).unwrap();
        assert!(version(Some("\"a\""), 7).matches(&version(Some("a"), 8)));
        assert!(!version(Some("\"a\""), 7).matches(&version(Some("\"b\""), 7)));
        assert!(!version(Some("\"a\""), 7).matches(&version(None, 7)));
        for answer in [None, Some("a")] {
            assert!(version(None, 7).matches(&version(answer, 7)));
            assert!(!version(None, 7).matches(&version(answer, 8)));
        }
        assert!(version(Some("a"), 7).is_strong() && !version(Some("W/\"a\""), 7).is_strong());
        assert_eq!(version(Some("a"), 7).if_match(), Some("\"a\"".to_owned()));
        assert_eq!(version(Some("W/\"a\""), 7).if_match(), None);
        assert!(matches!(ObjectVersion::new(&meta(None, 0)), Err(RemoteError::NoVersion)));
        assert!(matches!(ObjectVersion::new(&meta(Some(""), 0)), Err(RemoteError::NoVersion)));
    }

    #[test]
    fn another_version_is_another_file() {
        let state = |etag, key| ObjectVersion::new(&meta(etag, 7)).unwrap().state(1, key);
        assert_eq!(state(Some("a"), "key"), state(Some("\"a\""), "key"));
        assert_ne!(state(Some("a"), "key").identity, state(Some("b"), "key").identity);
        assert_ne!(state(Some("a"), "key").identity, state(Some("a"), "other").identity);
        assert_ne!(state(Some("7"), "key").identity, state(None, "key").identity);
    }
}
