//! Joins the safetensors files that torch.distributed.checkpoint wrote for each rank: pieces under the names of whole
//! tensors, with their offsets in the metadata. There is no pickle.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use crate::checkpoint::contents::{Checkpoint, MAX_TENSOR_COUNT};
use crate::checkpoint::directory::DcpShardName;
use crate::checkpoint::error::CheckpointError;
use crate::checkpoint::format::Format;
use crate::checkpoint::options::ParseOptions;
use crate::checkpoint::safetensors::{self, HeaderError, SHARDING_INFO_KEY, parse_sharding_info};
use crate::checkpoint::tensor::{
    Dtype, Origin, OriginId, Shape, Tensor, TensorBox, TensorName, TilingError,
};
use crate::source::{OpenFile, Root, SourceError};
use crate::threads::parallel_map;

use super::dcp_shard_set::{DcpShardSet, PlacedPiece, find_missing_part};
use super::folder::{
    check_no_root_key, check_rank_count, folder_path, in_folder, origin_note, unrecorded_note,
};
use crate::checkpoint::training_error::TrainingError;

/// The prefix of metadata keys that describe the pieces.
const DCP_KEY_PREFIX: &str = "DCP_";

/// A piece of a tensor in one file.
struct ShardPiece {
    name: TensorName,
    dtype: Dtype,
    part: TensorBox,
}

/// Reads a folder with files of these names.
pub fn read_folder(
    root: &Arc<Root>,
    directory: &Path,
    path: PathBuf,
    names: &[String],
    options: &ParseOptions,
) -> Result<Checkpoint, CheckpointError> {
    let folder = folder_path(root, directory);
    let error = in_folder(&folder);
    check_no_root_key(options).map_err(error)?;
    let set = DcpShardSet::from_names(names).map_err(error)?;
    let ranks = set.rank_count();
    check_rank_count(ranks, options).map_err(error)?;
    let numbered: Vec<(usize, &String)> = names.iter().enumerate().collect();
    let read = |&(number, name): &(usize, &String)| {
        let file = OpenFile::open_in_root(root, &directory.join(name))?;
        let header = safetensors::parse_header(&file).map_err(|e| match e {
            HeaderError::Source(error) => CheckpointError::Source(error),
            error => CheckpointError::Header { path: file.file().path(), error },
        })?;
        let mismatch = |tensor: &str, what| {
            let (tensor, name) = (tensor.to_owned(), name.clone());
            error(TrainingError::PieceMismatch { tensor, name, what })
        };
        let metadata = header.metadata.unwrap_or_default();
        let starts = metadata.get(SHARDING_INFO_KEY).and_then(|info| parse_sharding_info(info));
        let no_offsets = || error(TrainingError::NoOffsets { name: name.clone() });
        let starts = starts.ok_or_else(no_offsets)?;
        let mut pieces = Vec::with_capacity(header.tensors.len());
        for tensor in header.tensors {
            let start = starts.get(&*tensor.name);
            let start = start.filter(|start| start.len() == tensor.shape.len());
            let start = start
                .ok_or_else(|| mismatch(&tensor.name, "DCP_SHARDING_INFO lacks its offsets"))?;
            if tensor.dtype.bits() % 8 != 0 {
                return Err(mismatch(&tensor.name, "its values share bytes"));
            }
            let mut bytes = tensor.bytes;
            bytes.embed(OriginId(number as u32), 0);
            let part = TensorBox { start: Shape::from_slice(start), counts: tensor.shape, bytes };
            pieces.push(ShardPiece { name: tensor.name, dtype: tensor.dtype, part });
        }
        Ok((file, pieces, metadata))
    };
    let files = parallel_map(&numbered, root.reader_threads(), read);
    let files = files.into_iter().collect::<Result<Vec<_>, CheckpointError>>()?;
    check_names_unchanged(root, directory, names)?;
    let pieces = files.iter().zip(&set.shards).flat_map(|((_, pieces, _), shard)| {
        pieces.iter().map(|piece| PlacedPiece {
            shard: *shard,
            name: &piece.name,
            part: &piece.part,
        })
    });
    if let Some(missing) = find_missing_part(&set, pieces) {
        return Err(error(TrainingError::MissingFile { name: missing.to_string() }));
    }
    let mut joined: BTreeMap<&str, (Dtype, Vec<TensorBox>)> = BTreeMap::new();
    for (number, (_, pieces, _)) in files.iter().enumerate() {
        for piece in pieces {
            let (dtype, boxes) =
                joined.entry(&piece.name).or_insert_with(|| (piece.dtype, Vec::new()));
            let is_same_rank =
                boxes.first().is_none_or(|first| first.start.len() == piece.part.start.len());
            if *dtype != piece.dtype || !is_same_rank {
                let (tensor, name) = (piece.name.to_string(), names[number].clone());
                let what = "it has another shape or type than in another rank's file";
                return Err(error(TrainingError::PieceMismatch { tensor, name, what }));
            }
            boxes.push(piece.part.clone());
        }
    }
    if joined.len() > MAX_TENSOR_COUNT {
        return Err(CheckpointError::TooManyTensors { path, limit: MAX_TENSOR_COUNT });
    }
    let packed: Vec<TensorName> =
        TensorName::pack(joined.keys().copied().collect::<Vec<_>>().into_iter()).collect();
    let mut tensors = Vec::with_capacity(joined.len());
    for (packed, (name, (dtype, boxes))) in packed.into_iter().zip(joined) {
        let tiling = |e| match (&e, set.first_absent()) {
            (TilingError::Hole { .. }, Some(shard)) => {
                error(TrainingError::MissingFile { name: shard.to_string() })
            }
            _ => error(TrainingError::Tiling { tensor: name.to_owned(), error: e }),
        };
        let shape = whole_shape(&boxes);
        tensors.push(Tensor::join(packed, dtype, &shape, boxes).map_err(tiling)?);
    }
    for (file, ..) in &files {
        file.check_unchanged()?;
    }
    let metadata = files.first().map(|(_, _, metadata)| {
        let kept = metadata.iter().filter(|(key, _)| !key.starts_with(DCP_KEY_PREFIX));
        kept.map(|(key, value)| (key.clone(), value.clone())).collect()
    });
    let obvious_choices = vec![origin_note("torch.distributed.checkpoint", &folder, ranks)];
    let notes = unrecorded_note(ranks, options).into_iter().chain(set.absent_note()).collect();
    Ok(Checkpoint {
        path,
        format: Format::DcpSafetensors,
        is_sharded: true,
        origins: files.iter().map(|(file, ..)| Origin::File(Arc::clone(file.file()))).collect(),
        open_file: None,
        index_files: Vec::new(),
        tensors,
        metadata,
        header: None,
        obvious_choices,
        notes,
        refused: Vec::new(),
        options: options.clone(),
        recipe: None,
    })
}

/// Fails if files of ranks came or went while their headers were read. Steps that are deleted would otherwise be shown
/// without their last rows.
fn check_names_unchanged(
    root: &Arc<Root>,
    directory: &Path,
    names: &[String],
) -> Result<(), CheckpointError> {
    let mut found = root.file_names(directory)?;
    found.retain(|name| DcpShardName::parse(name).is_some());
    found.sort();
    match found == names {
        true => Ok(()),
        false => Err(SourceError::changed(folder_path(root, directory)).into()),
    }
}

/// The smallest shape that has all pieces of a tensor: its own is not recorded.
fn whole_shape(boxes: &[TensorBox]) -> Shape {
    let mut shape: Shape = boxes.first().map(|part| part.counts.clone()).unwrap_or_default();
    for part in boxes {
        for (size, (start, count)) in shape.iter_mut().zip(part.axes()) {
            *size = (*size).max(start.saturating_add(count));
        }
    }
    shape
}
