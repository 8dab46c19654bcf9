//! Reads one file, whatever its format: told by content, since names lie.

use std::collections::BTreeMap;
use std::ffi::OsStr;
use std::path::Path;
use std::sync::Arc;

use crate::source::{self, OpenFile, ReadAt};

use super::torch::{self, FileContents, LEGACY_MAGIC, LegacyError, ZIP_MAGIC};
use super::{
    Checkpoint, CheckpointError, Format, MAX_TENSOR_COUNT, Origin, ParseOptions, safetensors,
};

/// What the first bytes say.
enum SniffedKind {
    Checkpoint(Format),
    Other(&'static str),
}

/// Enough to tell every kind from the others.
const SNIFF_BYTES: usize = 32;

/// Read at once of every file: a page, which asking for less would read as well.
const FIRST_READ_BYTES: u64 = 4096;

fn sniff(file: &dyn ReadAt, path: &Path) -> Result<SniffedKind, CheckpointError> {
    let mut bytes = [0; SNIFF_BYTES];
    let len = file.size().min(SNIFF_BYTES as u64) as usize;
    file.read_exact_at(&mut bytes[..len], 0)?;
    let bytes = &bytes[..len];
    let named_safetensors = path.extension().is_some_and(|e| e == "safetensors" || e == "sft");
    // The length of a header may begin like anything else; that the brace follows it, and that it fits
    // the file, no other format has.
    let header = bytes.split_first_chunk::<8>().filter(|(_, rest)| rest.first() == Some(&b'{'));
    if header.is_some_and(|(len, _)| u64::from_le_bytes(*len) <= file.size() - 8) {
        return Ok(SniffedKind::Checkpoint(Format::Safetensors));
    }
    Ok(match bytes {
        b if b.starts_with(ZIP_MAGIC) => SniffedKind::Checkpoint(Format::TorchZip),
        [0x80, 2..=5, ..] if !named_safetensors || bytes.starts_with(LEGACY_MAGIC) => {
            SniffedKind::Checkpoint(Format::TorchLegacy)
        }
        [_, _, _, _, _, _, _, _, b'{', ..] => SniffedKind::Checkpoint(Format::Safetensors),
        // As the length of a header, its first bytes lead past its end.
        [0x80, 2..=5, ..]
            if bytes.first_chunk().is_none_or(|len| u64::from_le_bytes(*len) > file.size()) =>
        {
            SniffedKind::Other("a pickle that is called safetensors")
        }
        // Its own reader says best what is wrong with it.
        [_, ..] if named_safetensors && !bytes.starts_with(b"version ") => {
            SniffedKind::Checkpoint(Format::Safetensors)
        }
        [] => SniffedKind::Other("an empty file"),
        b if b.starts_with(b"GGUF") => {
            SniffedKind::Other("a GGUF file, not a checkpoint of torch or safetensors")
        }
        b if b.starts_with(b"\x89HDF") => {
            SniffedKind::Other("an HDF5 file, not a checkpoint of torch or safetensors")
        }
        b if b.starts_with(b"version https://git-lfs") => SniffedKind::Other(
            "a Git LFS pointer: the file that it stands for was not fetched (git lfs pull)",
        ),
        b if b.starts_with(b"<") => SniffedKind::Other(
            "a web page or XML, most likely an error saved in place of a download",
        ),
        _ => SniffedKind::Other("not a checkpoint of torch or safetensors"),
    })
}

/// A file whose first bytes were read: what tells its kind and most headers are there.
struct PrefetchedFile<'a> {
    file: &'a OpenFile,
    prefix: Vec<u8>,
}

impl PrefetchedFile<'_> {
    fn read(file: &OpenFile) -> Result<PrefetchedFile<'_>, CheckpointError> {
        let mut first = vec![0; file.size().min(FIRST_READ_BYTES) as usize];
        if file.size() <= MAX_WHOLE_FETCH_BYTES {
            // Not only where the page cache lacks it: to ask that makes the system fetch a part of it first.
            file.advise_will_need(0..file.size());
        }
        file.read_exact_at(&mut first, 0)?;
        Ok(PrefetchedFile { file, prefix: first })
    }
}

impl ReadAt for PrefetchedFile<'_> {
    fn size(&self) -> u64 {
        self.file.size()
    }

    fn read_exact_at(&self, buf: &mut [u8], offset: u64) -> Result<(), source::SourceError> {
        let range =
            usize::try_from(offset).ok().and_then(|from| Some(from..from.checked_add(buf.len())?));
        match range.and_then(|range| self.prefix.get(range)) {
            Some(bytes) => buf.copy_from_slice(bytes),
            None => self.file.read_exact_at(buf, offset)?,
        }
        Ok(())
    }
}

/// Whether a file looks like a checkpoint by its first bytes.
pub(super) fn looks_like_checkpoint(file: &OpenFile) -> bool {
    matches!(sniff(file, &file.file().path()), Ok(SniffedKind::Checkpoint(_)))
}

/// A file of no more than this is fetched whole when it is first read: its header and its tensors then cost
/// a disk one request.
const MAX_WHOLE_FETCH_BYTES: u64 = 128 << 10;

/// Reads an opened file.
pub(super) fn read_file(
    file: &OpenFile,
    options: &ParseOptions,
) -> Result<Checkpoint, CheckpointError> {
    let mut checkpoint = parse(&PrefetchedFile::read(file)?, &file.file().path(), options)?;
    checkpoint.origins.insert(0, Origin::File(Arc::clone(file.file())));
    // What was parsed must be what the identity stands for.
    file.check_unchanged()?;
    Ok(checkpoint)
}

/// Reads bytes in memory, for tests and fuzzing: they become the first origin.
pub fn parse_bytes(
    bytes: &[u8],
    path: &Path,
    options: &ParseOptions,
) -> Result<Checkpoint, CheckpointError> {
    let bytes = bytes.to_vec();
    let mut checkpoint = parse(&bytes, path, options)?;
    checkpoint.origins.insert(0, Origin::Memory(bytes.into()));
    Ok(checkpoint)
}

/// All but the first origin, which is the file itself.
fn parse(
    file: &dyn ReadAt,
    path: &Path,
    options: &ParseOptions,
) -> Result<Checkpoint, CheckpointError> {
    let format = match sniff(file, path)? {
        SniffedKind::Checkpoint(format) => format,
        SniffedKind::Other(what) => {
            return Err(CheckpointError::NotACheckpoint { path: path.to_path_buf(), what });
        }
    };
    let (contents, metadata) = match format {
        Format::Safetensors => read_safetensors(file, path, options)?,
        Format::TorchZip => (torch::read_zip(file, path, options)?, None),
        Format::TorchLegacy => {
            (torch::read_legacy(file, path, options).map_err(refuse_foreign_pickle)?, None)
        }
    };
    if contents.tensors.len() > MAX_TENSOR_COUNT {
        return Err(CheckpointError::TooManyTensors {
            path: path.to_path_buf(),
            limit: MAX_TENSOR_COUNT,
        });
    }
    Ok(Checkpoint {
        path: path.to_path_buf(),
        format,
        is_sharded: false,
        origins: contents.unpacked,
        open_file: None,
        index_file: None,
        tensors: contents.tensors,
        metadata,
        notes: contents.notes,
        refused: contents.refused,
        options: options.clone(),
    })
}

fn read_safetensors(
    file: &dyn ReadAt,
    path: &Path,
    options: &ParseOptions,
) -> Result<(FileContents, Option<BTreeMap<String, String>>), CheckpointError> {
    let header = safetensors::parse_header(file).map_err(|fault| match fault {
        safetensors::HeaderError::Source(error) => CheckpointError::Source(error),
        fault => CheckpointError::Header { path: path.to_path_buf(), fault },
    })?;
    if header.metadata.as_ref().is_some_and(|metadata| is_rank_shard(path, metadata)) {
        return Err(CheckpointError::RankShard { path: path.to_path_buf() });
    }
    if let Some(key) = &options.root_key {
        let fault = torch::SelectError::NoSuchKey { key: key.clone(), found: Default::default() };
        return Err(CheckpointError::Selection { path: path.to_path_buf(), fault });
    }
    let contents = FileContents {
        tensors: header.tensors,
        unpacked: Vec::new(),
        notes: Vec::new(),
        refused: Vec::new(),
    };
    Ok((contents, header.metadata))
}

/// The metadata key under which torch.distributed.checkpoint writes the offsets of each tensor's piece.
const SHARDING_INFO_KEY: &str = "DCP_SHARDING_INFO";

/// Whether a file holds one rank's pieces of a sharded save.
///
/// A file that was saved whole has the key too, with offsets of zero. The first rank's offsets are zero as well:
/// only its name, `shard-00001-…`, tells it from a whole one.
fn is_rank_shard(path: &Path, metadata: &BTreeMap<String, String>) -> bool {
    #[derive(serde::Deserialize)]
    struct RankPiece {
        saved_offsets: Vec<u64>,
    }
    let Some(info) = metadata.get(SHARDING_INFO_KEY) else { return false };
    let name = path.file_name().and_then(OsStr::to_str).unwrap_or_default();
    let is_named_by_rank = name
        .strip_prefix("shard-")
        .and_then(|rest| rest.split_once('-'))
        .is_some_and(|(rank, _)| !rank.is_empty() && rank.bytes().all(|b| b.is_ascii_digit()));
    let begins_at_zero = |piece: &RankPiece| piece.saved_offsets.iter().all(|&offset| offset == 0);
    is_named_by_rank
        || serde_json::from_str::<BTreeMap<String, RankPiece>>(info)
            .map_or(true, |pieces| !pieces.values().all(begins_at_zero))
}

fn refuse_foreign_pickle(error: CheckpointError) -> CheckpointError {
    match error {
        CheckpointError::Legacy { path, fault: LegacyError::Magic } => {
            CheckpointError::NotACheckpoint {
                path,
                what: "a pickle, and not one that torch.save wrote",
            }
        }
        error => error,
    }
}
