//! Joins the files that each rank of a run wrote with `torch.save`: of FSDP2 (`DTensor`) and FSDP1 (`ShardedTensor`).
//!
//! Each piece states its place in the whole tensor. Tensors that every file has whole are taken from the first rank.

use std::collections::{HashMap, HashSet};
use std::path::{Path, PathBuf};
use std::sync::Arc;

use crate::checkpoint::contents::{Checkpoint, MAX_TENSOR_COUNT};
use crate::checkpoint::directory::{split_rank, world_size};
use crate::checkpoint::error::CheckpointError;
use crate::checkpoint::format::Format;
use crate::checkpoint::options::ParseOptions;
use crate::checkpoint::refusal::{RefusedEntry, TensorError};
use crate::checkpoint::tensor::{
    AxisSlice, Dtype, Origin, OriginId, Shape, Tensor, TensorBox, TensorName,
};
use crate::checkpoint::torch::{
    FLAT_PARAMETER, LocalPart, PieceReader, RankPiece, RecordedRanks, Selection, TorchError,
    TorchValues, select_state_dict,
};
use crate::source::{OpenFile, Root};
use crate::threads::parallel_map;

use super::folder::{
    RankFileError, check_rank_count, folder_path, in_folder, origin_note, unrecorded_note,
};
use crate::checkpoint::training_error::TrainingError;

/// The files of all ranks that belong together.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RankFileSet {
    /// The name of each rank's file, in the order of ranks.
    pub names: Vec<(u32, String)>,
    /// The number of ranks, if the names state it.
    pub world_size: Option<u64>,
}

/// The contents of one rank's file.
struct RankContents {
    file: OpenFile,
    whole: Vec<Tensor>,
    pieces: Vec<TensorPiece>,
    refused: Vec<RefusedEntry>,
    obvious_choices: Vec<String>,
    notes: Vec<String>,
    /// Whether it has pieces at all, readable or not.
    has_pieces: bool,
    /// What its pieces together record of the ranks of the run.
    ranks: RecordedRanks,
}

/// One rank's piece of a tensor.
struct TensorPiece {
    name: String,
    /// The type; a rank without a part of a tensor may not state it.
    dtype: Option<Dtype>,
    shape: Shape,
    boxes: Vec<TensorBox>,
}

/// Reads the files of all ranks, which have these names.
pub fn read_folder(
    root: &Arc<Root>,
    directory: &Path,
    path: PathBuf,
    names: &[String],
    options: &ParseOptions,
) -> Result<Checkpoint, CheckpointError> {
    let folder = folder_path(root, directory);
    let error = in_folder(&folder);
    let set = RankFileSet::from_names(names).map_err(error)?;
    let read = |(number, (rank, name)): &(usize, &(u32, String))| {
        let file = OpenFile::open_in_root(root, &directory.join(name))?;
        let contents = read_rank(file, OriginId(*number as u32), *rank, name, options);
        contents.map_err(|e| e.into_checkpoint_error(name, error))
    };
    check_rank_count(set.names.len() as u64, options).map_err(error)?;
    let numbered: Vec<(usize, &(u32, String))> = set.names.iter().enumerate().collect();
    let ranks = parallel_map(&numbered, root.reader_threads(), read);
    let ranks = ranks.into_iter().collect::<Result<Vec<RankContents>, CheckpointError>>()?;
    let found = ranks.len() as u64;
    let recorded_size = set.check_recorded_ranks(&ranks).map_err(error)?;
    if found > 1 && !ranks.iter().any(|rank| rank.has_pieces) {
        return Err(error(TrainingError::PlainTensors { ranks: found }));
    }
    let joined = join_ranks(&ranks, &set).map_err(error)?;
    if joined.len() > MAX_TENSOR_COUNT {
        return Err(CheckpointError::TooManyTensors { path, limit: MAX_TENSOR_COUNT });
    }
    let mut refused: Vec<RefusedEntry> = Vec::new();
    let mut notes = Vec::new();
    let mut obvious_choices = vec![origin_note("per-rank files of torch", &folder, found)];
    if set.world_size.or(recorded_size).is_none() {
        notes.extend(unrecorded_note(found, options));
    }
    for rank in &ranks {
        let new = rank.refused.iter().filter(|entry| !refused.iter().any(|r| r.name == entry.name));
        let new: Vec<RefusedEntry> = new.cloned().collect();
        refused.extend(new);
        add_new(&mut notes, &rank.notes);
        add_new(&mut obvious_choices, &rank.obvious_choices);
        rank.file.check_unchanged()?;
    }
    Ok(Checkpoint {
        path,
        format: Format::RankFiles,
        is_sharded: true,
        origins: ranks.iter().map(|rank| Origin::File(Arc::clone(rank.file.file()))).collect(),
        open_file: None,
        index_files: Vec::new(),
        tensors: joined,
        metadata: None,
        header: None,
        obvious_choices,
        notes,
        refused,
        options: options.clone(),
        recipe: None,
    })
}

/// Adds the notes that are not there yet: each rank has the same.
fn add_new(notes: &mut Vec<String>, more: &[String]) {
    for note in more {
        if !notes.contains(note) {
            notes.push(note.clone());
        }
    }
}

/// Reads one rank's file, which becomes the origin of that number.
fn read_rank(
    file: OpenFile,
    origin: OriginId,
    rank: u32,
    name: &str,
    options: &ParseOptions,
) -> Result<RankContents, RankFileError> {
    let TorchValues { arena, top, pickle_bytes, mut storages } = TorchValues::read(&file)?;
    let selection = select_state_dict(&arena, top, pickle_bytes, options.root_key.as_deref())
        .map_err(TorchError::from)?;
    let Selection { entries, rank_pieces, mut refused, obvious_choices, notes } = selection;
    let mut whole = Vec::with_capacity(entries.len());
    for (name, id) in entries {
        match storages.tensor(&arena, TensorName::from(&*name), id) {
            Ok(mut tensor) => {
                tensor.bytes.embed(origin, 0);
                whole.push(tensor);
            }
            Err(error) => refused.push(RefusedEntry { name, error }),
        }
    }
    let (mut ranks, has_pieces) = (RecordedRanks::default(), !rank_pieces.is_empty());
    let mut reader = PieceReader::new(&arena, rank, rank_pieces.len());
    let mut pieces = Vec::with_capacity(rank_pieces.len());
    for entry in rank_pieces {
        if entry.class == FLAT_PARAMETER {
            let (tensor, name) = (entry.name, name.to_owned());
            return Err(RankFileError::Training(TrainingError::FlatParameter { tensor, name }));
        }
        let mut locate = |part: &LocalPart<'_>| {
            let local = storages.locate(TensorName::from(&*entry.name), &part.view)?;
            Ok((boxes_of_part(&local, part, origin)?, local.dtype))
        };
        let piece = reader.read(entry.value).and_then(|piece| {
            let RankPiece { shape, parts, is_later_replica, ranks: recorded, dtype } = piece;
            ranks = RecordedRanks {
                world_size: ranks.world_size.max(recorded.world_size),
                min_count: ranks.min_count.max(recorded.min_count),
                excess_of: ranks.excess_of.max(recorded.excess_of),
            };
            let (mut boxes, mut dtype) = (Vec::new(), dtype);
            for part in &parts {
                let (located, part_dtype) = locate(part)?;
                if !is_later_replica {
                    boxes.extend(located);
                }
                dtype = Some(part_dtype);
            }
            Ok((dtype, shape, boxes))
        });
        match piece {
            Ok((dtype, shape, boxes)) => {
                pieces.push(TensorPiece { name: entry.name, dtype, shape, boxes });
            }
            Err(error) => refused.push(RefusedEntry { name: entry.name, error }),
        }
    }
    if !storages.into_unpacked().is_empty() {
        let error = TrainingError::Compressed { name: name.to_owned() };
        return Err(RankFileError::Training(error));
    }
    Ok(RankContents { file, whole, pieces, refused, obvious_choices, notes, has_pieces, ranks })
}

/// The boxes of a whole tensor that a rank's tensor holds.
fn boxes_of_part(
    local: &Tensor,
    part: &LocalPart<'_>,
    origin: OriginId,
) -> Result<Vec<TensorBox>, TensorError> {
    if local.bytes.has_repeats() {
        return Err(TensorError::Malformed { what: "its piece repeats its bytes" });
    }
    let packing = local.dtype.torch_packing();
    let mut boxes = Vec::with_capacity(part.boxes.len());
    for place in &part.boxes {
        let steps = place.local_start.iter().zip(&place.counts);
        let mut slices: Vec<AxisSlice> =
            steps.map(|(&start, &count)| AxisSlice::range(start..start + count)).collect();
        if let Some(last) = slices.last_mut() {
            last.start *= packing;
            last.count *= packing;
        }
        let sliced = local.slice(&slices);
        let sliced = sliced.map_err(|_| TensorError::Malformed {
            what: "its piece does not hold the range that is recorded",
        })?;
        let mut bytes = sliced.bytes;
        bytes.embed(origin, 0);
        boxes.push(TensorBox { start: place.start.clone(), counts: place.counts.clone(), bytes });
    }
    Ok(boxes)
}

/// Joins the tensors of all ranks. Of equal parts, the first rank's is kept. Tensors that some rank has in no readable
/// form are left out.
fn join_ranks(ranks: &[RankContents], set: &RankFileSet) -> Result<Vec<Tensor>, TrainingError> {
    enum Joined<'a> {
        Whole(&'a Tensor),
        Pieces {
            dtype: Option<Dtype>,
            shape: &'a Shape,
            boxes: Vec<TensorBox>,
            places: HashSet<BoxPlace>,
        },
    }
    /// The first step and the number of steps along each axis.
    type BoxPlace = (Shape, Shape);
    let refused = ranks.iter().flat_map(|rank| rank.refused.iter().map(|entry| &*entry.name));
    let refused: HashSet<&str> = refused.collect();
    let mut order: Vec<&str> = Vec::new();
    let mut by_name: HashMap<&str, Joined<'_>> = HashMap::new();
    let mismatch = |n: usize, tensor: &str| TrainingError::PieceMismatch {
        tensor: tensor.to_owned(),
        name: set.names[n].1.clone(),
        what: "it has another shape or type than in another rank's file",
    };
    for (n, rank) in ranks.iter().enumerate() {
        for tensor in rank.whole.iter().filter(|tensor| !refused.contains(&*tensor.name)) {
            match by_name.get(&*tensor.name) {
                None => {
                    order.push(&tensor.name);
                    by_name.insert(&tensor.name, Joined::Whole(tensor));
                }
                Some(Joined::Whole(first))
                    if (first.dtype, &first.shape) == (tensor.dtype, &tensor.shape) => {}
                Some(_) => {
                    return Err(mismatch(n, &tensor.name));
                }
            }
        }
        for piece in rank.pieces.iter().filter(|piece| !refused.contains(&*piece.name)) {
            let new = || {
                let (boxes, places) = (Vec::new(), HashSet::new());
                Joined::Pieces { dtype: piece.dtype, shape: &piece.shape, boxes, places }
            };
            if !by_name.contains_key(&*piece.name) {
                order.push(&piece.name);
            }
            match by_name.entry(&piece.name).or_insert_with(new) {
                Joined::Pieces { dtype, shape, boxes, places }
                    if *shape == &piece.shape
                        && dtype.is_none_or(|dtype| piece.dtype.is_none_or(|own| own == dtype)) =>
                {
                    *dtype = dtype.or(piece.dtype);
                    for part in &piece.boxes {
                        // Another rank may have a replica.
                        if places.insert((part.start.clone(), part.counts.clone())) {
                            boxes.push(part.clone());
                        }
                    }
                }
                _ => {
                    return Err(mismatch(n, &piece.name));
                }
            }
        }
    }
    let names: Vec<TensorName> = TensorName::pack(order.iter().copied()).collect();
    let join = |(name, text): (TensorName, &str)| match by_name.remove(text) {
        Some(Joined::Whole(tensor)) => Ok(Some(Tensor { name, ..tensor.clone() })),
        Some(Joined::Pieces { dtype: Some(dtype), shape, boxes, .. }) => {
            let tensor = Tensor::join(name, dtype, shape, boxes);
            tensor
                .map(Some)
                .map_err(|error| TrainingError::Tiling { tensor: text.to_owned(), error })
        }
        Some(Joined::Pieces { dtype: None, .. }) => {
            Err(TrainingError::NoPieces { tensor: text.to_owned() })
        }
        None => Ok(None),
    };
    names.into_iter().zip(order).map(join).filter_map(Result::transpose).collect()
}

impl RankFileSet {
    /// The set of the files of these names, each of which ends with the number of a rank.
    pub fn from_names(names: &[String]) -> Result<RankFileSet, TrainingError> {
        let mut ranked: Vec<(u32, String)> =
            names.iter().filter_map(|name| Some((split_rank(name)?.1, name.clone()))).collect();
        ranked.sort();
        let set = RankFileSet {
            world_size: ranked.first().and_then(|(_, name)| world_size(name)),
            names: ranked,
        };
        if let Some(pair) = set.names.windows(2).find(|pair| pair[0].0 == pair[1].0) {
            let (first, second) = (pair[0].1.clone(), pair[1].1.clone());
            return Err(TrainingError::MixedSaves { first, second });
        }
        let gap = (0..).zip(&set.names).find(|(n, (rank, _))| n != rank).map(|(n, _)| n);
        match gap {
            Some(rank) => Err(TrainingError::MissingFile { name: set.name_of(rank) }),
            None => set.check_count(set.world_size).map(|()| set),
        }
    }

    /// Fails if the run had another number of ranks than there are files.
    fn check_count(&self, world_size: Option<u64>) -> Result<(), TrainingError> {
        let found = self.names.len() as u64;
        match world_size {
            Some(size) if found < size => {
                let name = self.name_of(found as u32);
                Err(match size - found {
                    1 => TrainingError::MissingFile { name },
                    missing => TrainingError::MissingFiles { first: name, more: missing - 1 },
                })
            }
            Some(ranks) if found > ranks => {
                Err(TrainingError::ExcessFile { name: self.name_of(ranks as u32), ranks })
            }
            _ => Ok(()),
        }
    }

    /// Fails if the files record other ranks than theirs. Returns the number of ranks, if the files record it.
    fn check_recorded_ranks(&self, ranks: &[RankContents]) -> Result<Option<u64>, TrainingError> {
        let of_all = || ranks.iter().map(|rank| rank.ranks);
        for (recorded, (_, name)) in of_all().zip(&self.names) {
            if let Some(ranks) = recorded.excess_of {
                return Err(TrainingError::ExcessFile { name: name.clone(), ranks });
            }
        }
        let min_count = of_all().map(|recorded| recorded.min_count).max();
        let found = self.names.len() as u64;
        self.check_count(min_count.filter(|count| *count > found))?;
        let world_size = of_all().filter_map(|recorded| recorded.world_size).max();
        self.check_count(world_size)?;
        Ok(world_size)
    }

    /// The name that the file of a rank has.
    fn name_of(&self, rank: u32) -> String {
        let Some((_, name)) = self.names.first() else { return format!("rank {rank}") };
        match split_rank(name) {
            Some((stem, _)) => {
                let extension = name.rsplit_once('.').map_or("", |(_, extension)| extension);
                format!("{stem}{rank}.{extension}")
            }
            None => name.clone(),
        }
    }
}
