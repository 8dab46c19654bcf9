//! Reads the index of a set of shards (`*.index.json`), strictly.
//!
//! In: the file's bytes. Out: which shard holds which tensor. That the shards are there and hold
//! what the index says is checked where they are opened.

use std::collections::BTreeMap;
use std::fmt;
use std::marker::PhantomData;
use std::path::{Component, Path};

use serde::de::{self, Deserialize, Deserializer, IgnoredAny, MapAccess, Visitor};

/// The largest index that is read: 2,000,000 tensors of names of 200 bytes come to less.
pub const MAX_INDEX: u64 = 512 << 20;

/// What is wrong with an index.
#[derive(Debug, thiserror::Error)]
pub enum Fault {
    /// Larger than any index.
    #[error("{size} bytes are too many for an index")]
    TooLarge {
        /// The file's size.
        size: u64,
    },
    /// Not the JSON it must be.
    #[error("not what it must be: {0}")]
    Json(String),
    /// It names no shard.
    #[error("it names no shard")]
    Empty,
    /// A shard's name is not that of a file beneath the directory.
    #[error("shard `{shard}` is not a name inside the directory")]
    Leaves {
        /// The name.
        shard: String,
    },
    /// A shard is not there.
    #[error("shard `{shard}` is missing")]
    Missing {
        /// The name.
        shard: String,
    },
    /// A shard does not hold what the index says.
    #[error("tensor `{tensor}` is not in `{shard}`")]
    NotThere {
        /// The tensor.
        tensor: String,
        /// The shard that should hold it.
        shard: String,
    },
}

impl Fault {
    /// What the user can do about it.
    pub fn remedy(&self) -> &'static str {
        match self {
            Fault::Missing { .. } => "fetch the missing shard, or the whole checkpoint again",
            Fault::Leaves { .. } => "if you trust where it leads, allow it with --follow-symlinks",
            _ => "fetch the index and its shards again: they do not belong together or are damaged",
        }
    }
}

/// Reads an index: shard name to the tensors that it should hold, both in order.
pub fn parse(json: &[u8], may_leave: bool) -> Result<BTreeMap<String, Vec<String>>, Fault> {
    let raw: Raw = serde_json::from_slice(json).map_err(|e| Fault::Json(e.to_string()))?;
    let mut shards: BTreeMap<String, Vec<String>> = BTreeMap::new();
    for (tensor, shard) in raw.weight_map.0 {
        // `./shard` is `shard`.
        let shard = shard.strip_prefix("./").map(str::to_owned).unwrap_or(shard);
        shards.entry(shard).or_default().push(tensor);
    }
    if shards.is_empty() {
        return Err(Fault::Empty);
    }
    if !may_leave {
        let inside = |shard: &str| {
            let mut parts = Path::new(shard).components();
            !shard.contains('\0') && parts.all(|c| matches!(c, Component::Normal(_)))
        };
        if let Some(shard) = shards.keys().find(|shard| shard.is_empty() || !inside(shard)) {
            return Err(Fault::Leaves { shard: shard.clone() });
        }
    }
    Ok(shards)
}

#[derive(serde::Deserialize)]
struct Raw {
    weight_map: Unique<String>,
    #[serde(rename = "metadata")]
    _metadata: Option<IgnoredAny>,
}

/// A JSON object in which no key stands twice.
pub(super) struct Unique<V>(pub BTreeMap<String, V>);

impl<'de, V: Deserialize<'de>> Deserialize<'de> for Unique<V> {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        deserializer.deserialize_map(UniqueVisitor(PhantomData))
    }
}

struct UniqueVisitor<V>(PhantomData<V>);

impl<'de, V: Deserialize<'de>> Visitor<'de> for UniqueVisitor<V> {
    type Value = Unique<V>;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("an object of text values")
    }

    fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Unique<V>, A::Error> {
        let mut entries = BTreeMap::new();
        while let Some(key) = map.next_key::<String>()? {
            if entries.contains_key(&key) {
                return Err(de::Error::custom(format_args!("key `{key}` is there twice")));
            }
            entries.insert(key, map.next_value()?);
        }
        Ok(Unique(entries))
    }
}
