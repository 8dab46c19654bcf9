//! Parses the index of a set of shards (`*.index.json`), strictly.
//!
//! In: the file's bytes. Out: a [`ShardIndex`], which says which shard has which tensor. Opening the shards
//! checks that it is true.

use std::borrow::Cow;
use std::collections::HashMap;
use std::fmt;
use std::path::{Component, Path};

use serde::de::{Deserialize, Deserializer, IgnoredAny, MapAccess, Visitor};

use crate::shell_word::shell_word;

use super::json::{JsonText, duplicate_key};
use super::name_index::NameIndex;

/// The largest index that is read: 2,000,000 tensors with names of 200 bytes take less.
pub const MAX_INDEX_BYTES: u64 = 512 << 20;

/// The byte order mark that some editors write before UTF-8 text.
const BYTE_ORDER_MARK: &[u8] = b"\xef\xbb\xbf";

/// What is wrong with an index.
#[allow(missing_docs)] // The messages name the fields.
#[derive(Debug, thiserror::Error)]
pub enum IndexError {
    /// Larger than any index.
    #[error("{size} bytes are too many for an index")]
    TooLarge {
        /// The file's size.
        size: u64,
    },
    /// Not JSON, or not an index.
    #[error("it is malformed: {0}")]
    Json(String),
    /// The JSON begins with a byte order mark.
    #[error("it begins with a byte order mark, which loaders refuse")]
    ByteOrderMark,
    /// It names no shard.
    #[error("it names no shard")]
    NoShards,
    /// A shard's name is not that of a file beneath the directory.
    #[error("shard `{shard}` is not a name inside the directory")]
    OutsideDirectory { shard: String },
    /// A shard is not there.
    #[error("shard `{shard}` is missing")]
    MissingShard { shard: String },
    /// A shard lacks a tensor that the index says it has.
    #[error("tensor `{tensor}` is not in `{shard}`")]
    MissingTensor {
        tensor: String,
        /// The shard that should have it.
        shard: String,
    },
}

impl IndexError {
    /// What the user can do about it.
    ///
    /// `path` is that of the index.
    pub fn remedy(&self, path: &Path) -> String {
        match self {
            IndexError::MissingShard { shard } => {
                format!("fetch {}", shell_word(&path.with_file_name(shard)))
            }
            IndexError::OutsideDirectory { .. } => {
                "if you trust where it leads, allow it with --follow-symlinks".to_owned()
            }
            IndexError::ByteOrderMark => {
                format!("remove the mark: sed -i '1s/^\\xef\\xbb\\xbf//' {}", shell_word(path))
            }
            _ => "fetch the index and its shards again: they do not belong together or are damaged"
                .to_owned(),
        }
    }
}

/// A parsed index: which shard has which tensor.
#[derive(Debug)]
pub struct ShardIndex<'a> {
    shards: Vec<String>,
    tensor_counts: Vec<usize>,
    /// Each tensor with the number of its shard.
    tensors: Vec<(Cow<'a, str>, u32)>,
    names: NameIndex,
}

impl ShardIndex<'_> {
    /// The names of the shards, sorted.
    pub fn shards(&self) -> &[String] {
        &self.shards
    }

    /// The number of the shard that should have a tensor.
    pub fn shard_of(&self, tensor: &str) -> Option<usize> {
        let index = self.names.find(tensor, |index| &self.tensors[index].0)?;
        Some(self.tensors[index].1 as usize)
    }

    /// The number of tensors that a shard should have.
    pub fn tensor_count_in(&self, shard: usize) -> usize {
        self.tensor_counts[shard]
    }

    /// The tensors that a shard should have, in no order.
    pub fn tensors_in(&self, shard: usize) -> impl Iterator<Item = &str> {
        let tensors = self.tensors.iter().filter(move |(_, number)| *number as usize == shard);
        tensors.map(|(tensor, _)| &**tensor)
    }
}

/// Parses an index. Unless it `may_lead_outside`, every shard must lie beneath the directory.
pub fn parse_index(json: &[u8], may_lead_outside: bool) -> Result<ShardIndex<'_>, IndexError> {
    let index = parse_index_or_empty(json, may_lead_outside)?;
    if index.shards.is_empty() { Err(IndexError::NoShards) } else { Ok(index) }
}

/// The same for an index that may name no shard, as that of a version without changes.
pub fn parse_index_or_empty(
    json: &[u8],
    may_lead_outside: bool,
) -> Result<ShardIndex<'_>, IndexError> {
    let raw: IndexJson<WeightMap> = parse_json(json)?;
    let WeightMap { shards, mut tensors } = raw.weight_map;
    let (shards, sorted_numbers) = shards.into_sorted();
    let mut tensor_counts = vec![0; shards.len()];
    for (_, shard) in &mut tensors {
        *shard = sorted_numbers[*shard as usize];
        tensor_counts[*shard as usize] += 1;
    }
    let names = NameIndex::build(tensors.len(), |index| &tensors[index].0)
        .map_err(|index| IndexError::Json(duplicate_key(&tensors[index].0)))?;
    if let Some(shard) = shards.iter().find(|shard| !may_lead_outside && leads_outside(shard)) {
        return Err(IndexError::OutsideDirectory { shard: shard.clone() });
    }
    Ok(ShardIndex { shards, tensor_counts, tensors, names })
}

/// Whether a name is not that of a file beneath the directory.
pub fn leads_outside(shard: &str) -> bool {
    let mut parts = Path::new(shard).components();
    shard.is_empty() || shard.contains('\0') || !parts.all(|c| matches!(c, Component::Normal(_)))
}

/// The names of the shards of an index, sorted. Nothing else of it is checked.
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

/// The shards of a weight map, numbered in the order in which it first names them.
#[derive(Default)]
struct ShardTable {
    numbers: HashMap<String, u32>,
    last: Option<(String, u32)>,
}

impl ShardTable {
    /// The number of a shard. Most tensors are in the shard of the tensor before them.
    fn number_of(&mut self, shard: &str) -> u32 {
        // `./shard` is `shard`.
        let shard = shard.strip_prefix("./").unwrap_or(shard);
        if let Some((_, number)) = self.last.as_ref().filter(|(last, _)| last == shard) {
            return *number;
        }
        let next = self.numbers.len() as u32;
        let number = *self.numbers.entry(shard.to_owned()).or_insert(next);
        self.last = Some((shard.to_owned(), number));
        number
    }

    /// The sorted names, and the new number of each shard by its old number.
    fn into_sorted(self) -> (Vec<String>, Vec<u32>) {
        let mut named: Vec<(String, u32)> = self.numbers.into_iter().collect();
        named.sort();
        let mut sorted_numbers = vec![0; named.len()];
        for (sorted, (_, number)) in (0..).zip(&named) {
            sorted_numbers[*number as usize] = sorted;
        }
        (named.into_iter().map(|(name, _)| name).collect(), sorted_numbers)
    }
}

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

/// A weight map: its tensors, each with the number of its shard.
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
        let (mut shards, mut tensors) = (ShardTable::default(), Vec::new());
        while let Some((JsonText(tensor), JsonText(shard))) = map.next_entry()? {
            let number = shards.number_of(&shard);
            tensors.push((tensor, number));
        }
        Ok(WeightMap { shards, tensors })
    }
}
