//! Reads the index of a set of shards (`*.index.json`), strictly.
//!
//! In: the file's bytes. Out: an [`Index`], which says which shard holds which tensor. That the shards
//! are there and hold what the index says is checked where they are opened.

use std::borrow::Cow;
use std::collections::HashMap;
use std::fmt;
use std::path::{Component, Path};

use serde::de::{Deserialize, Deserializer, IgnoredAny, MapAccess, Visitor};

use super::Places;
use super::json::{Text, twice};

/// The largest index that is read: 2,000,000 tensors of names of 200 bytes come to less.
pub const MAX_INDEX: u64 = 512 << 20;

/// The byte order mark that some editors write before UTF-8 text.
const BYTE_ORDER_MARK: &[u8] = b"\xef\xbb\xbf";

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
    /// The JSON begins with a byte order mark.
    #[error("it begins with a byte order mark, which loaders refuse")]
    ByteOrderMark,
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
            Fault::ByteOrderMark => "save it as UTF-8 without a byte order mark",
            _ => "fetch the index and its shards again: they do not belong together or are damaged",
        }
    }
}

/// What an index says: which shard holds which tensor.
#[derive(Debug)]
pub struct Index<'a> {
    shards: Vec<String>,
    held: Vec<usize>,
    /// Each with the place of its shard.
    tensors: Vec<(Cow<'a, str>, u32)>,
    places: Places,
}

impl Index<'_> {
    /// The shards, in the order of their names.
    pub fn shards(&self) -> &[String] {
        &self.shards
    }

    /// The place of the shard that should hold a tensor.
    pub fn holder(&self, tensor: &str) -> Option<usize> {
        let place = self.places.find(tensor, |place| &self.tensors[place].0)?;
        Some(self.tensors[place].1 as usize)
    }

    /// How many tensors the shard at a place should hold.
    pub fn held_by(&self, place: usize) -> usize {
        self.held[place]
    }

    /// The tensors that the shard at a place should hold, in no order.
    pub fn tensors_of(&self, place: usize) -> impl Iterator<Item = &str> {
        let of = self.tensors.iter().filter(move |(_, holder)| *holder as usize == place);
        of.map(|(tensor, _)| &**tensor)
    }
}

/// Reads an index.
pub fn parse(json: &[u8], may_leave: bool) -> Result<Index<'_>, Fault> {
    let raw: Raw<Holders> = read(json)?;
    let Holders { shards, holders: mut tensors } = raw.weight_map;
    let (shards, shard_places) = shards.sorted();
    if shards.is_empty() {
        return Err(Fault::Empty);
    }
    let mut held = vec![0; shards.len()];
    for (_, shard) in &mut tensors {
        *shard = shard_places[*shard as usize];
        held[*shard as usize] += 1;
    }
    let places = Places::of(tensors.len(), |place| &tensors[place].0);
    let places = places.map_err(|place| Fault::Json(twice(&tensors[place].0)))?;
    if let Some(shard) = shards.iter().find(|shard| !may_leave && leaves(shard)) {
        return Err(Fault::Leaves { shard: shard.clone() });
    }
    Ok(Index { shards, held, tensors, places })
}

/// Whether a name is not one of a file beneath the directory.
pub fn leaves(shard: &str) -> bool {
    let mut parts = Path::new(shard).components();
    shard.is_empty() || shard.contains('\0') || !parts.all(|c| matches!(c, Component::Normal(_)))
}

/// The shards that an index names, in order. That it is right in all else is not looked at.
pub fn shards(json: &[u8]) -> Result<Vec<String>, Fault> {
    let raw: Raw<Shards> = read(json)?;
    Ok(raw.weight_map.sorted().0)
}

fn read<'a, T: Deserialize<'a>>(json: &'a [u8]) -> Result<T, Fault> {
    if json.starts_with(BYTE_ORDER_MARK) {
        return Err(Fault::ByteOrderMark);
    }
    let text = std::str::from_utf8(json).map_err(|error| Fault::Json(error.to_string()))?;
    serde_json::from_str(text).map_err(|error| Fault::Json(error.to_string()))
}

#[derive(serde::Deserialize)]
struct Raw<T> {
    weight_map: T,
    #[serde(rename = "metadata")]
    _metadata: Option<IgnoredAny>,
}

/// Shards in the order in which they are first named.
#[derive(Default)]
struct Shards {
    places: HashMap<String, u32>,
    last: Option<(String, u32)>,
}

impl Shards {
    /// The place of one. Most tensors lie in the shard of the one before them.
    fn place(&mut self, shard: &str) -> u32 {
        // `./shard` is `shard`.
        let shard = shard.strip_prefix("./").unwrap_or(shard);
        if let Some((_, place)) = self.last.as_ref().filter(|(last, _)| last == shard) {
            return *place;
        }
        let next = self.places.len() as u32;
        let place = *self.places.entry(shard.to_owned()).or_insert(next);
        self.last = Some((shard.to_owned(), place));
        place
    }

    /// Their names, sorted; and by the place that each had, the one that it has there.
    fn sorted(self) -> (Vec<String>, Vec<u32>) {
        let mut named: Vec<(String, u32)> = self.places.into_iter().collect();
        named.sort();
        let mut places = vec![0; named.len()];
        for (place, (_, before)) in (0..).zip(&named) {
            places[*before as usize] = place;
        }
        (named.into_iter().map(|(name, _)| name).collect(), places)
    }
}

/// The shards of a weight map, whose tensors nobody asks for yet.
impl<'de> Deserialize<'de> for Shards {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        deserializer.deserialize_map(ShardsVisitor)
    }
}

struct ShardsVisitor;

impl<'de> Visitor<'de> for ShardsVisitor {
    type Value = Shards;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("an object of text values")
    }

    fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Shards, A::Error> {
        let mut shards = Shards::default();
        while let Some((IgnoredAny, Text(shard))) = map.next_entry()? {
            shards.place(&shard);
        }
        Ok(shards)
    }
}

/// A weight map.
struct Holders<'a> {
    shards: Shards,
    holders: Vec<(Cow<'a, str>, u32)>,
}

impl<'de: 'a, 'a> Deserialize<'de> for Holders<'a> {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        deserializer.deserialize_map(HoldersVisitor)
    }
}

struct HoldersVisitor;

impl<'de> Visitor<'de> for HoldersVisitor {
    type Value = Holders<'de>;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("an object of text values")
    }

    fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Holders<'de>, A::Error> {
        let (mut shards, mut holders) = (Shards::default(), Vec::new());
        while let Some((Text(tensor), Text(shard))) = map.next_entry()? {
            let place = shards.place(&shard);
            holders.push((tensor, place));
        }
        Ok(Holders { shards, holders })
    }
}
