//! The manifest of a folder of blocks: their object and its version.

use std::fmt;

use serde::{Deserialize, Serialize};

/// One version of an object. Nothing in it is secret.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct CachedVersion {
    /// The URL of the object, for people.
    pub url: String,
    /// The store: its kind, its endpoint, and the bucket.
    pub store: String,
    /// The key in the store.
    pub key: String,
    /// Bytes of the object.
    pub size: u64,
    /// The ETag without quotes.
    pub etag: Option<String>,
    /// Whether the ETag is a weak one.
    pub is_weak: bool,
    /// Seconds of Last-Modified since 1970.
    pub modified: i64,
}

/// Names a version of an object in the cache.
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
pub struct ObjectId(pub [u8; 16]);

/// The name of the manifest in the folder of an object.
pub const MANIFEST_NAME: &str = "object.json";

/// Maximum bytes of a manifest. A key has at most 1,024 bytes, and JSON escapes each with at most six characters.
pub const MAX_MANIFEST_BYTES: u64 = 64 << 10;

impl CachedVersion {
    /// The identifier of this version. Other bytes of the same key have another one.
    pub fn id(&self) -> ObjectId {
        let CachedVersion { url: _, store, key, size, etag, is_weak, modified } = self;
        let mut hasher = blake3::Hasher::new();
        for text in [store, key] {
            hasher.update(&(text.len() as u64).to_le_bytes());
            hasher.update(text.as_bytes());
        }
        hasher.update(&size.to_le_bytes());
        match etag {
            Some(etag) => hasher.update(&[1, u8::from(*is_weak)]).update(etag.as_bytes()),
            None => hasher.update(&[0]).update(&modified.to_le_bytes()),
        };
        let mut id = [0; 16];
        id.copy_from_slice(&hasher.finalize().as_bytes()[..16]);
        ObjectId(id)
    }
}

impl ObjectId {
    /// The identifier that a folder is named by.
    pub fn parse(name: &str) -> Option<ObjectId> {
        let id = u128::from_str_radix(name, 16).ok()?.to_be_bytes();
        (ObjectId(id).to_string() == name).then_some(ObjectId(id))
    }
}

impl fmt::Display for ObjectId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:032x}", u128::from_be_bytes(self.0))
    }
}

impl fmt::Debug for ObjectId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_version_of_each_object_has_a_name_of_its_own() {
        let version = CachedVersion {
            url: "s3://bucket/a".into(),
            store: "s3 bucket".into(),
            key: "a".into(),
            size: 5,
            etag: Some("e".into()),
            is_weak: false,
            modified: 7,
        };
        let others = [
            CachedVersion { key: "b".into(), ..version.clone() },
            CachedVersion { store: "s3 bucketa".into(), key: String::new(), ..version.clone() },
            CachedVersion { size: 6, ..version.clone() },
            CachedVersion { etag: Some("f".into()), ..version.clone() },
            CachedVersion { is_weak: true, ..version.clone() },
            CachedVersion { etag: None, ..version.clone() },
            CachedVersion { etag: None, modified: 8, ..version.clone() },
        ];
        let mut ids: Vec<String> = others.iter().map(|other| other.id().to_string()).collect();
        ids.push(version.id().to_string());
        ids.sort_unstable();
        ids.dedup();
        assert_eq!(ids.len(), 8);
        // Some servers round the time differently in listings.
        assert_eq!(CachedVersion { modified: 8, ..version.clone() }.id(), version.id());
        assert_eq!(ObjectId::parse(&ids[0]).map(|id| id.to_string()), Some(ids[0].clone()));
        assert_eq!(ObjectId::parse("a"), None);
    }
}
