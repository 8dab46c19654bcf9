//! Reads folders of torch.distributed.checkpoint (DCP): a table (`.metadata`), and files with the pieces of tensors.
//!
//! `table` reads the table, one for the folder or one of each rank. `pieces` reads where the bytes of each piece lie.
//! Here they are joined.

mod locations;
mod part_budget;
mod pieces;
mod running_save;
mod table;

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use crate::checkpoint::contents::{Checkpoint, MAX_TENSOR_COUNT};
use crate::checkpoint::error::CheckpointError;
use crate::checkpoint::format::Format;
use crate::checkpoint::options::ParseOptions;
use crate::checkpoint::shard_index::leads_outside;
use crate::checkpoint::tensor::{Origin, Tensor, TensorName};
use crate::checkpoint::torch::pickle::{MAX_PICKLE_BYTES, PickleError, read_pickle};
use crate::checkpoint::torch::{acquire_parse_permit, shorten_name};
use crate::source::{OpenFile, ReadAt, Root, SourceError, SourceFile};

use super::folder::{check_rank_count, folder_path, in_folder, origin_note, unrecorded_note};
use super::select_root::{FlatName, select_root};
use crate::checkpoint::training_error::TrainingError;
use pieces::{PieceError, read_pieces};
use running_save::check_save_ended;
use table::{DataFile, DcpTable, TableTensor};

/// The name of the table of a whole folder.
const TABLE_NAME: &str = ".metadata";

/// The ending of the names of tables: `__3.metadata` is that of rank 3, if each rank wrote one.
const TABLE_ENDING: &str = ".metadata";

/// The ending of the names of data.
const DATA_ENDING: &str = ".distcp";

/// The ending of a table's name until the save ends.
const UNFINISHED_ENDING: &str = ".metadata.tmp";

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
    let table_names = find_tables(names).map_err(error)?;
    let mut table = DcpTable::with_table_count(table_names.len());
    let mut index_files = Vec::with_capacity(table_names.len());
    for name in &table_names {
        index_files.push(read_table(root, directory, &folder, name, &mut table)?);
    }
    if table.tensors.len() > MAX_TENSOR_COUNT {
        return Err(CheckpointError::TooManyTensors { path, limit: MAX_TENSOR_COUNT });
    }
    // The number of tables is that of the ranks, if each wrote one. Otherwise the ranks are those in the names of data.
    let tables_by_rank = (*table_names != [TABLE_NAME]).then_some(table_names.len() as u64);
    let data_names = || names.iter().chain(table.files.iter().map(|file| &file.name));
    let named_ranks = || data_names().filter_map(writer_of).max()?.checked_add(1);
    if let Some(ranks) = tables_by_rank.or_else(named_ranks) {
        check_rank_count(ranks, options).map_err(error)?;
    }
    let flat = table.tensors.iter();
    let flat: Vec<FlatName<'_>> =
        flat.map(|tensor| FlatName { name: &tensor.name, key_ends: &tensor.key_ends }).collect();
    let selected = select_root(&flat, &table.others, options.root_key.as_deref()).map_err(error)?;
    drop(flat);
    let (tensors, data_files) = table.take_tensors(selected.names.iter().map(|&(n, _)| n));
    let piece_error = |e| match e {
        PieceError::Training(e) => error(e),
        PieceError::Source(e) => e.into(),
    };
    let files = open_files(root, directory, &data_files, options).map_err(piece_error)?;
    let table_of = |file: &DataFile| match (tables_by_rank, writer_of(&file.name)) {
        (Some(_), Some(rank)) => index_files.get(usize::try_from(rank).ok()?),
        _ => index_files.first(),
    };
    let pairs = files.iter().zip(&data_files);
    let pairs: Vec<_> = pairs.filter_map(|(file, data)| Some((file, table_of(data)?))).collect();
    check_save_ended(&pairs).map_err(error)?;
    if let Some((_, data)) = files.iter().zip(&data_files).find(|(file, _)| file.size() == 0) {
        return Err(error(TrainingError::EmptyFile { name: data.name.clone() }));
    }
    let boxes = read_pieces(&tensors, &files, root.reader_threads()).map_err(piece_error)?;
    for (file, data) in files.iter().zip(&data_files) {
        check_length(file, data).map_err(error)?;
    }
    let shown = tensors.iter().zip(&selected.names);
    let shown = shown.map(|(tensor, &(_, skip))| &tensor.name[skip..]);
    let shown: Vec<TensorName> = TensorName::pack(shown).collect();
    let mut joined = Vec::with_capacity(tensors.len());
    for ((name, tensor), boxes) in shown.into_iter().zip(&tensors).zip(boxes) {
        let TableTensor { name: recorded, dtype, shape, .. } = tensor;
        let tensor = Tensor::join(name, *dtype, shape, boxes);
        joined
            .push(tensor.map_err(|e| {
                error(TrainingError::Tiling { tensor: recorded.clone(), error: e })
            })?);
    }
    for file in &files {
        file.check_unchanged()?;
    }
    let ranks = tables_by_rank.unwrap_or_else(|| count_writers(&data_files));
    let unrecorded = tables_by_rank.and_then(|ranks| unrecorded_note(ranks, options));
    let origin = origin_note("torch.distributed.checkpoint", &folder, ranks);
    Ok(Checkpoint {
        path,
        format: Format::Dcp,
        is_sharded: true,
        origins: files.iter().map(|file| Origin::File(Arc::clone(file.file()))).collect(),
        open_file: None,
        index_files,
        tensors: joined,
        metadata: None,
        header: None,
        obvious_choices: [vec![origin], selected.obvious_choices].concat(),
        notes: selected.notes.into_iter().chain(unrecorded).collect(),
        refused: Vec::new(),
        options: options.clone(),
        recipe: None,
    })
}

/// The rank that wrote a file: `__3_0.distcp` is that of rank 3.
fn writer_of(name: impl AsRef<str>) -> Option<u64> {
    let (_, numbers) = name.as_ref().strip_suffix(DATA_ENDING)?.rsplit_once("__")?;
    numbers.split_once('_')?.0.parse().ok()
}

/// The number of ranks that wrote files of these names.
fn count_writers(files: &[DataFile]) -> u64 {
    let ranks: BTreeSet<u64> = files.iter().filter_map(|file| writer_of(&file.name)).collect();
    ranks.len().max(1) as u64
}

/// The names of the tables in a folder: one for the folder, or one of each rank.
fn find_tables(names: &[String]) -> Result<Vec<String>, TrainingError> {
    if let Some(name) = names.iter().find(|name| name.ends_with(UNFINISHED_ENDING)) {
        return Err(TrainingError::BeingWritten { name: name.clone() });
    }
    let rank = |name: &String| -> Option<u64> {
        name.strip_prefix("__")?.strip_suffix(TABLE_ENDING)?.parse().ok()
    };
    let mut ranks: Vec<(u64, &String)> =
        names.iter().filter_map(|name| Some((rank(name)?, name))).collect();
    ranks.sort_unstable();
    let has_whole = names.iter().any(|name| name == TABLE_NAME);
    match (has_whole, ranks.first()) {
        (true, None) => return Ok(vec![TABLE_NAME.to_owned()]),
        (false, None) => return Err(TrainingError::Unfinished { missing: TABLE_NAME }),
        (true, Some((_, rank))) => {
            return Err(TrainingError::MixedSaves {
                first: TABLE_NAME.to_owned(),
                second: (*rank).clone(),
            });
        }
        (false, Some(_)) => {}
    }
    if let Some(gap) = (0..).zip(&ranks).find(|(n, (rank, _))| n != rank) {
        return Err(TrainingError::MissingFile { name: format!("__{}{TABLE_ENDING}", gap.0) });
    }
    let has_no_table = |name: &&String| writer_of(name) >= Some(ranks.len() as u64);
    if let Some(data) = names.iter().find(has_no_table) {
        let table = format!("__{}{TABLE_ENDING}", ranks.len());
        return Err(TrainingError::MissingTable { data: data.clone(), table });
    }
    Ok(ranks.into_iter().map(|(_, name)| name.clone()).collect())
}

fn read_table(
    root: &Arc<Root>,
    directory: &Path,
    folder: &Path,
    name: &str,
    table: &mut DcpTable,
) -> Result<Arc<SourceFile>, CheckpointError> {
    let error =
        |error| CheckpointError::Training { path: folder.to_path_buf(), error: Box::new(error) };
    let pickle = |error: PickleError| TrainingError::Pickle { name: name.to_owned(), error };
    let file = OpenFile::open_in_root(root, &directory.join(name))?;
    let size = file.size();
    if size > MAX_PICKLE_BYTES {
        let limit = PickleError::CountLimit { what: "bytes", limit: MAX_PICKLE_BYTES };
        return Err(error(pickle(limit)));
    }
    let bytes = file.read_whole()?;
    // From here on, the source is not read.
    let permit = acquire_parse_permit(size, size);
    let (arena, top, used) = read_pickle(&bytes, size).map_err(|e| error(pickle(e)))?;
    if used != bytes.len() {
        return Err(error(pickle(PickleError::TrailingBytes(bytes.len() - used))));
    }
    drop(bytes);
    table.add(&arena, top, name, size).map_err(error)?;
    drop(permit);
    file.check_unchanged()?;
    Ok(Arc::clone(file.file()))
}

/// Opens the files that have the pieces.
fn open_files(
    root: &Arc<Root>,
    directory: &Path,
    files: &[DataFile],
    options: &ParseOptions,
) -> Result<Vec<OpenFile>, PieceError> {
    let open = |DataFile { name, .. }: &DataFile| {
        if !is_plain_path(name) {
            return Err(TrainingError::DataFileName { name: shorten_name(name) }.into());
        }
        if !options.follow_symlinks && leads_outside(name) {
            let path = root.shown_path(&directory.join(name));
            let root = root.path().to_path_buf();
            return Err(PieceError::Source(SourceError::OutsideRoot { path, root }));
        }
        OpenFile::open_in_root(root, &directory.join(name)).map_err(|error| match error {
            SourceError::Missing { .. } => TrainingError::MissingFile { name: name.clone() }.into(),
            error => PieceError::Source(error),
        })
    };
    files.iter().map(open).collect()
}

/// Whether a path is written as torch writes that of a file: not empty, without NUL or parts such as `./`.
fn is_plain_path(name: &str) -> bool {
    let is_plain = |part: &str| !matches!(part, "" | ".");
    !name.contains('\0') && name.strip_prefix('/').unwrap_or(name).split('/').all(is_plain)
}

/// Fails if a file is shorter than its table records, even if what it lacks is not shown.
fn check_length(file: &OpenFile, data: &DataFile) -> Result<(), TrainingError> {
    match file.size() < data.recorded_bytes {
        true => Err(TrainingError::ShortData {
            name: data.name.clone(),
            bytes: file.size(),
            recorded_bytes: data.recorded_bytes,
        }),
        false => Ok(()),
    }
}
