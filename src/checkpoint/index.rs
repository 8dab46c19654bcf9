//! Reads the index of a set of shards (`*.index.json`), strictly.
//!
//! In: the file's bytes. Out: an [`Index`], which says which shard holds which tensor. That the shards
//! are there and hold what the index says is checked where they are opened.

use std::borrow::Cow;
use std::collections::HashMap;
use std::fmt;
use std::path::{Component, Path};

use serde::de::{Deserialize, Deserializer, IgnoredAny, MapAccess, Visitor};

use super::NameIndex;
use super::json::{JsonText, duplicate_key};

/// The largest index that is read: 2,000,000 tensors of names of 200 bytes come to less.
pub const MAX_INDEX_BYTES: u64 = 512 << 20;

/// The byte order mark that some editors write before UTF-8 text.
const BYTE_ORDER_MARK: &[u8] = b"\xef\xbb\xbf";

/// What is wrong with an index.
#[derive(Debug, thiserror::Error)]
pub enum IndexError {
    /// Larger than any index.
    #[error("{size} bytes are too many for an index")]
    TooLarge {
        /// The file's size.
        size: u64,
    },
    /// Not the JSON it must be.
    #[error("not what it must be: {0}")]
    Json(String),
    /// The JSON begins with a byte order mark.
    #[error("it begins with a byte order mark, which loaders refuse")]
    ByteOrderMark,
    /// It names no shard.
    #[error("it names no shard")]
    NoShards,
    /// A shard's name is not that of a file beneath the directory.
    #[error("shard `{shard}` is not a name inside the directory")]
    OutsideDirectory {
        /// The name.
        shard: String,
    },
    /// A shard is not there.
    #[error("shard `{shard}` is missing")]
    MissingShard {
        /// The name.
        shard: String,
    },
    /// A shard does not hold what the index says.
    #[error("tensor `{tensor}` is not in `{shard}`")]
    MissingTensor {
        /// The tensor.
        tensor: String,
        /// The shard that should hold it.
        shard: String,
    },
}

impl IndexError {
    /// What the user can do about it.
    pub fn remedy(&self) -> &'static str {
        match self {
            IndexError::MissingShard { .. } => {
                "fetch the missing shard, or the whole checkpoint again"
            }
            IndexError::OutsideDirectory { .. } => {
                "if you trust where it leads, allow it with --follow-symlinks"
            }
            IndexError::ByteOrderMark => "save it as UTF-8 without a byte order mark",
            _ => "fetch the index and its shards again: they do not belong together or are damaged",
        }
    }
}

/// What an index says: which shard holds which tensor.
#[derive(Debug)]
pub struct ShardIndex<'a> {
    shards: Vec<String>,
    tensor_counts: Vec<usize>,
    /// Each with the place of its shard.
    tensors: Vec<(Cow<'a, str>, u32)>,
    names: NameIndex,
}

impl ShardIndex<'_> {
    /// The shards, in the order of their names.
    pub fn shards(&self) -> &[String] {
        &self.shards
    }

    /// The place of the shard that should hold a tensor.
    pub fn shard_of(&self, tensor: &str) -> Option<usize> {
        let place = self.names.find(tensor, |place| &self.tensors[place].0)?;
        Some(self.tensors[place].1 as usize)
    }

    /// How many tensors the shard at a place should hold.
    pub fn tensor_count_in(&self, place: usize) -> usize {
        self.tensor_counts[place]
    }

    /// The tensors that the shard at a place should hold, in no order.
    pub fn tensors_in(&self, place: usize) -> impl Iterator<Item = &str> {
        let of = self.tensors.iter().filter(move |(_, holder)| *holder as usize == place);
        of.map(|(tensor, _)| &**tensor)
    }
}

/// Reads an index.
pub fn parse_index(json: &[u8], may_lead_outside: bool) -> Result<ShardIndex<'_>, IndexError> {
    let raw: IndexJson<WeightMap> = parse_json(json)?;
    let WeightMap { shards, mut tensors } = raw.weight_map;
    let (shards, shard_places) = shards.into_sorted();
    if shards.is_empty() {
        return Err(IndexError::NoShards);
    }
    let mut held = vec![0; shards.len()];
    for (_, shard) in &mut tensors {
        *shard = shard_places[*shard as usize];
        held[*shard as usize] += 1;
    }
    let places = NameIndex::build(tensors.len(), |place| &tensors[place].0);
    let places = places.map_err(|place| IndexError::Json(duplicate_key(&tensors[place].0)))?;
    if let Some(shard) = shards.iter().find(|shard| !may_lead_outside && leads_outside(shard)) {
        return Err(IndexError::OutsideDirectory { shard: shard.clone() });
    }
    Ok(ShardIndex { shards, tensor_counts: held, tensors, names: places })
}

/// Whether a name is not one of a file beneath the directory.
pub fn leads_outside(shard: &str) -> bool {
    let mut parts = Path::new(shard).components();
    shard.is_empty() || shard.contains('\0') || !parts.all(|c| matches!(c, Component::Normal(_)))
}

/// The shards that an index names, in order. That it is right in all else is not looked at.
pub fn shard_names(json: &[u8]) -> Result<Vec<String>, IndexError> {
    let raw: IndexJson<ShardTable> = parse_json(json)?;
    Ok(raw.weight_map.into_sorted().0)
}

fn parse_json<'a, T: Deserialize<'a>>(json: &'a [u8]) -> Result<T, IndexError> {
    if json.starts_with(BYTE_ORDER_MARK) {
        return Err(IndexError::ByteOrderMark);
    }
    let text = std::str::from_utf8(json).map_err(|error| IndexError::Json(error.to_string()))?;
    serde_json::from_str(text).map_err(|error| IndexError::Json(error.to_string()))
}

#[derive(serde::Deserialize)]
struct IndexJson<T> {
    weight_map: T,
    #[serde(rename = "metadata")]
    _metadata: Option<IgnoredAny>,
}

/// Shards in the order in which they are first named.
#[derive(Default)]
struct ShardTable {
    numbers: HashMap<String, u32>,
    last: Option<(String, u32)>,
}

impl ShardTable {
    /// The place of one. Most tensors lie in the shard of the one before them.
    fn number_of(&mut self, shard: &str) -> u32 {
        // `./shard` is `shard`.
        let shard = shard.strip_prefix("./").unwrap_or(shard);
        if let Some((_, place)) = self.last.as_ref().filter(|(last, _)| last == shard) {
            return *place;
        }
        let next = self.numbers.len() as u32;
        let place = *self.numbers.entry(shard.to_owned()).or_insert(next);
        self.last = Some((shard.to_owned(), place));
        place
    }

    /// Their names, sorted; and by the place that each had, the one that it has there.
    fn into_sorted(self) -> (Vec<String>, Vec<u32>) {
        let mut named: Vec<(String, u32)> = self.numbers.into_iter().collect();
        named.sort();
        let mut places = vec![0; named.len()];
        for (place, (_, before)) in (0..).zip(&named) {
            places[*before as usize] = place;
        }
        (named.into_iter().map(|(name, _)| name).collect(), places)
    }
}

/// The shards of a weight map, whose tensors nobody asks for yet.
impl<'de> Deserialize<'de> for ShardTable {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        deserializer.deserialize_map(ShardTableVisitor)
    }
}

struct ShardTableVisitor;

impl<'de> Visitor<'de> for ShardTableVisitor {
    type Value = ShardTable;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("an object of text values")
    }

    fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<ShardTable, A::Error> {
        let mut shards = ShardTable::default();
        while let Some((IgnoredAny, JsonText(shard))) = map.next_entry()? {
            shards.number_of(&shard);
        }
        Ok(shards)
    }
}

/// A weight map.
struct WeightMap<'a> {
    shards: ShardTable,
    tensors: Vec<(Cow<'a, str>, u32)>,
}

impl<'de: 'a, 'a> Deserialize<'de> for WeightMap<'a> {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        deserializer.deserialize_map(WeightMapVisitor)
    }
}

struct WeightMapVisitor;

impl<'de> Visitor<'de> for WeightMapVisitor {
    type Value = WeightMap<'de>;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("an object of text values")
    }

    fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<WeightMap<'de>, A::Error> {
        let (mut shards, mut holders) = (ShardTable::default(), Vec::new());
        while let Some((JsonText(tensor), JsonText(shard))) = map.next_entry()? {
            let place = shards.number_of(&shard);
            holders.push((tensor, place));
        }
        Ok(WeightMap { shards, tensors: holders })
    }
}
