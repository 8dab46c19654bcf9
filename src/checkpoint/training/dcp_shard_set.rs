//! The set of safetensors files that torch.distributed.checkpoint wrote for the ranks of a run, judged by their names.
//!
//! A rank writes a file for each part of the model of which it has pieces, and none where it has none. A number that is
//! left out is a missing file only if pieces are missing.

use std::collections::{BTreeMap, BTreeSet, HashMap};

use crate::checkpoint::directory::DcpShardName;
use crate::checkpoint::tensor::TensorBox;
use crate::checkpoint::training_error::TrainingError;

/// Maximum number of pairs of a piece and a rank that are looked up to find a missing file.
const MAX_LOOKUP_COUNT: usize = 1 << 24;

/// The files of a folder.
pub struct DcpShardSet {
    /// In the order of the names.
    pub shards: Vec<DcpShardName>,
    /// The ranks that have files.
    ranks: BTreeSet<u64>,
}

impl DcpShardSet {
    /// The set of the files of these names. Each part of the model must have a file.
    pub fn from_names(names: &[String]) -> Result<DcpShardSet, TrainingError> {
        let shards: Vec<DcpShardName> =
            names.iter().filter_map(|name| DcpShardName::parse(name)).collect();
        let first = *shards.first().ok_or(TrainingError::NoTensors)?;
        let other = names.iter().zip(&shards).find(|(_, shard)| shard.parts != first.parts);
        if let Some((name, _)) = other {
            let (first, second) = (names[0].clone(), name.clone());
            return Err(TrainingError::MixedSaves { first, second });
        }
        let parts: BTreeSet<u64> = shards.iter().map(|shard| shard.part).collect();
        if let Some(part) = (1..=first.parts).find(|part| !parts.contains(part)) {
            let name = DcpShardName { rank: 1, part, ..first }.to_string();
            return Err(TrainingError::MissingFile { name });
        }
        let ranks = shards.iter().map(|shard| shard.rank).collect();
        Ok(DcpShardSet { shards, ranks })
    }

    /// The number of ranks that the names show: the highest.
    pub fn rank_count(&self) -> u64 {
        self.ranks.last().copied().unwrap_or(0)
    }

    /// The first file of the first rank that has none.
    pub fn first_absent(&self) -> Option<DcpShardName> {
        let (rank, _) = (1..).zip(&self.ranks).find(|(n, rank)| n != *rank)?;
        Some(DcpShardName { rank, ..*self.shards.first()? })
    }

    /// The note on ranks that have no file.
    pub fn absent_note(&self) -> Option<String> {
        let first = self.first_absent()?.rank;
        let count = self.rank_count().saturating_sub(self.ranks.len() as u64);
        Some(format!(
            "no file for {count} of these ranks, first shard-{first:05}: a rank without pieces writes none"
        ))
    }
}

/// A piece of a tensor, and the file that has it.
pub struct PlacedPiece<'a> {
    pub shard: DcpShardName,
    pub name: &'a str,
    pub part: &'a TensorBox,
}

/// Tensors of one kind in all layers: their names differ in numbers only, and the rank has the same box of each.
#[derive(PartialEq, Eq, Hash)]
struct LayerPiece<'a> {
    rank: u64,
    pattern: String,
    start: &'a [u64],
    counts: &'a [u64],
}

/// The file of a rank for a part of the model, where other layers show that it is missing.
///
/// A rank that has the rest of a tensor has the rest of the same tensor in other layers, too. Without its file these
/// would be shown without their last rows, since no file states their whole shape.
pub fn find_missing_part<'a>(
    set: &DcpShardSet,
    pieces: impl Iterator<Item = PlacedPiece<'a>>,
) -> Option<DcpShardName> {
    let parts = set.shards.first()?.parts;
    if (set.ranks.len() as u64).checked_mul(parts) == Some(set.shards.len() as u64) {
        return None;
    }
    let files: BTreeSet<(u64, u64)> =
        set.shards.iter().map(|shard| (shard.rank, shard.part)).collect();
    let mut ranks_of: BTreeMap<&str, BTreeSet<u64>> = BTreeMap::new();
    let mut layers: HashMap<LayerPiece<'_>, Vec<(&str, u64)>> = HashMap::new();
    for PlacedPiece { shard, name, part } in pieces {
        ranks_of.entry(name).or_default().insert(shard.rank);
        let pattern = number_pattern(name);
        let (start, counts) = (&*part.start, &*part.counts);
        let layer = LayerPiece { rank: shard.rank, pattern, start, counts };
        layers.entry(layer).or_default().push((name, shard.part));
    }
    let mut lookups = 0;
    let mut missing: Vec<(u64, u64)> = Vec::new();
    for tensors in layers.values() {
        // The ranks that have pieces of the tensor in the layer that most ranks have.
        let ranks = tensors.iter().filter_map(|(name, _)| ranks_of.get(name));
        let Some(ranks) = ranks.max_by_key(|ranks| ranks.len()) else { continue };
        for (name, part) in tensors.iter().filter(|(name, _)| ranks_of.get(name) != Some(ranks)) {
            lookups += ranks.len();
            if lookups > MAX_LOOKUP_COUNT {
                return None;
            }
            let own = ranks_of.get(name);
            let lacks = |rank: &&u64| {
                !files.contains(&(**rank, *part)) && own.is_none_or(|own| !own.contains(rank))
            };
            missing.extend(ranks.iter().find(lacks).map(|rank| (*rank, *part)));
        }
    }
    let (rank, part) = missing.into_iter().min()?;
    Some(DcpShardName { rank, part, parts })
}

/// A name with a mark in the place of each number.
fn number_pattern(name: &str) -> String {
    let mut pattern = String::with_capacity(name.len());
    for c in name.chars() {
        let mark = if c.is_ascii_digit() { '#' } else { c };
        if mark != '#' || !pattern.ends_with('#') {
            pattern.push(mark);
        }
    }
    pattern
}
