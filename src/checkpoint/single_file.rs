//! Reads the checkpoint in one file, whatever its format.

use std::collections::BTreeMap;
use std::ffi::OsStr;
use std::path::Path;
use std::sync::{Arc, OnceLock};

use crate::source::{DeferredChecks, OpenFile, ReadAt, SourceError};

use super::contents::{Checkpoint, FileContents, MAX_TENSOR_COUNT};
use super::directory::{DcpShardName, MODEL_NAME};
use super::error::CheckpointError;
use super::format::{self, DetectedFormat, FileFormat};
use super::options::ParseOptions;
use super::safetensors::{self, HeaderError, SHARDING_INFO_KEY, parse_sharding_info};
use super::tensor::Origin;
use super::torch::{self, LegacyError, SelectError, TorchError, ZipError};
use super::unread_format::UnreadFormat;

/// Bytes of the first read of every file: a page, which a shorter read would fetch as well.
const FIRST_READ_BYTES: u64 = 4096;

/// The largest file that is fetched whole at its first read: header and tensors then cost a disk one request.
const MAX_WHOLE_FETCH_BYTES: u64 = 128 << 10;

/// The class of the pickle in which torch.distributed.checkpoint says where each piece lies.
const DCP_METADATA_CLASS: &str = "torch.distributed.checkpoint.metadata.Metadata";

/// Reads the checkpoint in an opened file.
pub fn read_file(file: &OpenFile, options: &ParseOptions) -> Result<Checkpoint, CheckpointError> {
    let parsed = parse(&PrefetchedFile::read(file)?, &file.file().path(), options);
    let mut checkpoint = parsed.map_err(|error| match error {
        CheckpointError::RankShard { path, .. } => {
            let chosen = file.file().has_sibling(MODEL_NAME).then_some(MODEL_NAME);
            CheckpointError::RankShard { path, chosen }
        }
        error => error,
    })?;
    checkpoint.origins.insert(0, Origin::File(Arc::clone(file.file())));
    // What was parsed must be what the identity stands for.
    file.check_unchanged()?;
    Ok(checkpoint)
}

/// Reads the checkpoint in bytes in memory, for tests and fuzzing. The bytes become the first origin.
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

/// A file whose first bytes are in memory: enough to detect its format, and for most headers.
struct PrefetchedFile<'a> {
    file: &'a OpenFile,
    prefix: Vec<u8>,
}

impl PrefetchedFile<'_> {
    fn read(file: &OpenFile) -> Result<PrefetchedFile<'_>, SourceError> {
        let mut prefix = vec![0; file.size().min(FIRST_READ_BYTES) as usize];
        if file.size() <= MAX_WHOLE_FETCH_BYTES {
            // Without a look at the page cache first: such a look makes the system fetch a part of the file.
            file.advise_will_need(0..file.size());
        }
        file.read_exact_at(&mut prefix, 0)?;
        Ok(PrefetchedFile { file, prefix })
    }
}

impl ReadAt for PrefetchedFile<'_> {
    fn size(&self) -> u64 {
        self.file.size()
    }

    fn read_exact_at(&self, buf: &mut [u8], offset: u64) -> Result<(), SourceError> {
        let range =
            usize::try_from(offset).ok().and_then(|from| Some(from..from.checked_add(buf.len())?));
        // Data behind an unread header must come from the file, which compares that header first.
        let may_use_prefix = self.deferred_checks().is_none_or(|checks| checks.get().is_none());
        match range.filter(|_| may_use_prefix).and_then(|range| self.prefix.get(range)) {
            Some(bytes) => buf.copy_from_slice(bytes),
            None => self.file.read_exact_at(buf, offset)?,
        }
        Ok(())
    }

    fn read_nearby(&self, targets: &mut [(u64, &mut [u8])]) -> Result<(), SourceError> {
        self.file.read_nearby(targets)
    }

    fn deferred_checks(&self) -> Option<&OnceLock<DeferredChecks>> {
        self.file.deferred_checks()
    }
}

/// Reads everything except for the first origin, which is the file itself.
fn parse(
    file: &dyn ReadAt,
    path: &Path,
    options: &ParseOptions,
) -> Result<Checkpoint, CheckpointError> {
    let path_buf = || path.to_path_buf();
    let format = match format::detect(file, path)? {
        DetectedFormat::Checkpoint(format) => format,
        DetectedFormat::Unread(format) => {
            return Err(CheckpointError::UnreadFormat { path: path_buf(), format });
        }
    };
    let contents = match format {
        FileFormat::Safetensors => read_safetensors(file, path, options)?,
        FileFormat::TorchZip => torch::read_zip(file, options).map_err(|e| torch_error(path, e))?,
        FileFormat::TorchLegacy => {
            torch::read_legacy(file, options).map_err(|e| torch_error(path, e))?
        }
    };
    let FileContents { tensors, unpacked, metadata, header, obvious_choices, notes, refused } =
        contents;
    if tensors.len() > MAX_TENSOR_COUNT {
        return Err(CheckpointError::TooManyTensors { path: path_buf(), limit: MAX_TENSOR_COUNT });
    }
    Ok(Checkpoint {
        path: path_buf(),
        format: format.into(),
        is_sharded: false,
        origins: unpacked,
        open_file: None,
        index_files: Vec::new(),
        tensors,
        metadata,
        header,
        obvious_choices,
        notes,
        refused,
        options: options.clone(),
        recipe: None,
    })
}

fn read_safetensors(
    file: &dyn ReadAt,
    path: &Path,
    options: &ParseOptions,
) -> Result<FileContents, CheckpointError> {
    let header = safetensors::parse_header(file).map_err(|error| match error {
        HeaderError::Source(error) => CheckpointError::Source(error),
        error => CheckpointError::Header { path: path.to_path_buf(), error },
    })?;
    if header.metadata.as_ref().is_some_and(|metadata| is_rank_shard(path, metadata)) {
        return Err(CheckpointError::RankShard { path: path.to_path_buf(), chosen: None });
    }
    if let Some(key) = &options.root_key {
        let error = SelectError::NoSuchKey { key: key.clone(), found: Default::default() };
        return Err(CheckpointError::Selection { path: path.to_path_buf(), error });
    }
    Ok(FileContents {
        tensors: header.tensors,
        unpacked: Vec::new(),
        metadata: header.metadata,
        header: Some(header.raw),
        obvious_choices: Vec::new(),
        notes: Vec::new(),
        refused: Vec::new(),
    })
}

/// Whether a file holds one rank's pieces of a sharded save.
///
/// A file that was saved whole has the key too, with offsets of zero. The first rank's offsets are zero as well:
/// only its name, `shard-00001-…`, tells it from a whole file.
fn is_rank_shard(path: &Path, metadata: &BTreeMap<String, String>) -> bool {
    let Some(info) = metadata.get(SHARDING_INFO_KEY) else { return false };
    let name = path.file_name().and_then(OsStr::to_str).unwrap_or_default();
    let begins_at_zero = |start: &Vec<u64>| start.iter().all(|&step| step == 0);
    DcpShardName::parse(name).is_some()
        || parse_sharding_info(info).is_none_or(|starts| !starts.values().all(begins_at_zero))
}

fn torch_error(path: &Path, error: TorchError) -> CheckpointError {
    let path = path.to_path_buf();
    let error = match error.into_source() {
        Ok(error) => return CheckpointError::Source(error),
        Err(error) => error,
    };
    match error {
        TorchError::Source(error) => CheckpointError::Source(error),
        TorchError::TorchScript => {
            CheckpointError::UnreadFormat { path, format: UnreadFormat::TorchScript }
        }
        TorchError::Legacy(LegacyError::Magic { class }) => {
            let is_dcp = class.as_deref() == Some(DCP_METADATA_CLASS);
            let format =
                if is_dcp { UnreadFormat::DcpMetadata } else { UnreadFormat::Pickle { class } };
            CheckpointError::UnreadFormat { path, format }
        }
        TorchError::Zip(ZipError::NoPickle { has_arrays }) => {
            let format = UnreadFormat::ZipArchive { has_arrays };
            CheckpointError::UnreadFormat { path, format }
        }
        TorchError::Zip(error) => CheckpointError::Zip { path, error },
        TorchError::Legacy(error) => CheckpointError::Legacy { path, error },
        TorchError::Pickle(error) => CheckpointError::Pickle { path, error },
        TorchError::Selection(error) => CheckpointError::Selection { path, error },
    }
}
