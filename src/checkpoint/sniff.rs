//! Reads one file, whatever its format: told by content, since names lie.

use std::collections::BTreeMap;
use std::ffi::OsStr;
use std::path::Path;
use std::sync::Arc;

use crate::source::{self, OpenFile, ReadAt};

use super::torch::{self, Contents, LEGACY_MAGIC, LegacyFault, ZIP_MAGIC};
use super::{Checkpoint, Error, Format, MAX_TENSORS, Options, Origin, safetensors};

/// What the first bytes say.
enum Kind {
    Checkpoint(Format),
    Other(&'static str),
}

/// Enough to tell every kind from the others.
const SNIFFED: usize = 32;

/// Read at once of every file: a page, which asking for less would read as well.
const FIRST: u64 = 4096;

fn sniff(file: &dyn ReadAt, path: &Path) -> Result<Kind, Error> {
    let mut bytes = [0; SNIFFED];
    let len = file.size().min(SNIFFED as u64) as usize;
    file.read_exact_at(&mut bytes[..len], 0)?;
    let bytes = &bytes[..len];
    let named_safetensors = path.extension().is_some_and(|e| e == "safetensors" || e == "sft");
    // The length of a header may begin like anything else; that the brace follows it, and that it fits
    // the file, no other format has.
    let header = bytes.split_first_chunk::<8>().filter(|(_, rest)| rest.first() == Some(&b'{'));
    if header.is_some_and(|(len, _)| u64::from_le_bytes(*len) <= file.size() - 8) {
        return Ok(Kind::Checkpoint(Format::Safetensors));
    }
    Ok(match bytes {
        b if b.starts_with(ZIP_MAGIC) => Kind::Checkpoint(Format::TorchZip),
        [0x80, 2..=5, ..] if !named_safetensors || bytes.starts_with(LEGACY_MAGIC) => {
            Kind::Checkpoint(Format::TorchLegacy)
        }
        [_, _, _, _, _, _, _, _, b'{', ..] => Kind::Checkpoint(Format::Safetensors),
        // As the length of a header, its first bytes lead past its end.
        [0x80, 2..=5, ..]
            if bytes.first_chunk().is_none_or(|len| u64::from_le_bytes(*len) > file.size()) =>
        {
            Kind::Other("a pickle that is called safetensors")
        }
        // Its own reader says best what is wrong with it.
        [_, ..] if named_safetensors && !bytes.starts_with(b"version ") => {
            Kind::Checkpoint(Format::Safetensors)
        }
        [] => Kind::Other("an empty file"),
        b if b.starts_with(b"GGUF") => {
            Kind::Other("a GGUF file, not a checkpoint of torch or safetensors")
        }
        b if b.starts_with(b"\x89HDF") => {
            Kind::Other("an HDF5 file, not a checkpoint of torch or safetensors")
        }
        b if b.starts_with(b"version https://git-lfs") => Kind::Other(
            "a Git LFS pointer: the file that it stands for was not fetched (git lfs pull)",
        ),
        b if b.starts_with(b"<") => {
            Kind::Other("a web page or XML, most likely an error saved in place of a download")
        }
        _ => Kind::Other("not a checkpoint of torch or safetensors"),
    })
}

/// A file whose first bytes were read: what tells its kind and most headers are there.
struct Begun<'a> {
    file: &'a OpenFile,
    first: Vec<u8>,
}

impl Begun<'_> {
    fn of(file: &OpenFile) -> Result<Begun<'_>, Error> {
        let mut first = vec![0; file.size().min(FIRST) as usize];
        if file.size() <= SMALL {
            // Not only where the page cache lacks it: to ask that makes the system fetch a part of it first.
            file.expect(0..file.size());
        }
        file.read_exact_at(&mut first, 0)?;
        Ok(Begun { file, first })
    }
}

impl ReadAt for Begun<'_> {
    fn size(&self) -> u64 {
        self.file.size()
    }

    fn read_exact_at(&self, buf: &mut [u8], offset: u64) -> Result<(), source::Error> {
        let range =
            usize::try_from(offset).ok().and_then(|from| Some(from..from.checked_add(buf.len())?));
        match range.and_then(|range| self.first.get(range)) {
            Some(bytes) => buf.copy_from_slice(bytes),
            None => self.file.read_exact_at(buf, offset)?,
        }
        Ok(())
    }
}

/// Whether a file looks like a checkpoint by its first bytes.
pub(super) fn looks_like_one(file: &OpenFile) -> bool {
    matches!(sniff(file, &file.file().path()), Ok(Kind::Checkpoint(_)))
}

/// A file of no more than this is fetched whole when it is first read: its header and its tensors then cost
/// a disk one request.
const SMALL: u64 = 128 << 10;

/// Reads an opened file.
pub(super) fn read(file: &OpenFile, options: &Options) -> Result<Checkpoint, Error> {
    let mut checkpoint = parse(&Begun::of(file)?, &file.file().path(), options)?;
    checkpoint.origins.insert(0, Origin::File(Arc::clone(file.file())));
    // What was parsed must be what the identity stands for.
    file.check_unchanged()?;
    Ok(checkpoint)
}

/// Reads bytes in memory, for tests and fuzzing: they become the first origin.
pub fn parse_bytes(bytes: &[u8], path: &Path, options: &Options) -> Result<Checkpoint, Error> {
    let bytes = bytes.to_vec();
    let mut checkpoint = parse(&bytes, path, options)?;
    checkpoint.origins.insert(0, Origin::Memory(bytes.into()));
    Ok(checkpoint)
}

/// All but the first origin, which is the file itself.
fn parse(file: &dyn ReadAt, path: &Path, options: &Options) -> Result<Checkpoint, Error> {
    let format = match sniff(file, path)? {
        Kind::Checkpoint(format) => format,
        Kind::Other(what) => {
            return Err(Error::NotACheckpoint { path: path.to_path_buf(), what });
        }
    };
    let (contents, metadata) = match format {
        Format::Safetensors => read_safetensors(file, path, options)?,
        Format::TorchZip => (torch::read_zip(file, path, options)?, None),
        Format::TorchLegacy => {
            (torch::read_legacy(file, path, options).map_err(not_by_torch)?, None)
        }
    };
    if contents.tensors.len() > MAX_TENSORS {
        return Err(Error::TooMany { path: path.to_path_buf(), limit: MAX_TENSORS });
    }
    Ok(Checkpoint {
        path: path.to_path_buf(),
        format,
        sharded: false,
        origins: contents.unpacked,
        opened: None,
        index: None,
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
    options: &Options,
) -> Result<(Contents, Option<BTreeMap<String, String>>), Error> {
    let header = safetensors::parse(file).map_err(|fault| match fault {
        safetensors::Fault::Read(error) => Error::Source(error),
        fault => Error::Header { path: path.to_path_buf(), fault },
    })?;
    if header.metadata.as_ref().is_some_and(|metadata| is_rank_shard(path, metadata)) {
        return Err(Error::RankShard { path: path.to_path_buf() });
    }
    if let Some(key) = &options.root_key {
        let fault = torch::ChoiceFault::NoSuchKey { key: key.clone(), found: Default::default() };
        return Err(Error::Choice { path: path.to_path_buf(), fault });
    }
    let contents = Contents {
        tensors: header.tensors,
        unpacked: Vec::new(),
        notes: Vec::new(),
        refused: Vec::new(),
    };
    Ok((contents, header.metadata))
}

/// The metadata key under which torch.distributed.checkpoint writes the offsets of each tensor's piece.
const SHARDING_INFO: &str = "DCP_SHARDING_INFO";

/// Whether a file holds one rank's pieces of a sharded save.
///
/// A file that was saved whole has the key too, with offsets of zero. The first rank's offsets are zero as well:
/// only its name, `shard-00001-…`, tells it from a whole one.
fn is_rank_shard(path: &Path, metadata: &BTreeMap<String, String>) -> bool {
    #[derive(serde::Deserialize)]
    struct Piece {
        saved_offsets: Vec<u64>,
    }
    let Some(info) = metadata.get(SHARDING_INFO) else { return false };
    let name = path.file_name().and_then(OsStr::to_str).unwrap_or_default();
    let is_named_by_rank = name
        .strip_prefix("shard-")
        .and_then(|rest| rest.split_once('-'))
        .is_some_and(|(rank, _)| !rank.is_empty() && rank.bytes().all(|b| b.is_ascii_digit()));
    let begins_at_zero = |piece: &Piece| piece.saved_offsets.iter().all(|&offset| offset == 0);
    is_named_by_rank
        || serde_json::from_str::<BTreeMap<String, Piece>>(info)
            .map_or(true, |pieces| !pieces.values().all(begins_at_zero))
}

fn not_by_torch(error: Error) -> Error {
    match error {
        Error::Legacy { path, fault: LegacyFault::Magic } => {
            Error::NotACheckpoint { path, what: "a pickle, and not one that torch.save wrote" }
        }
        error => error,
    }
}
