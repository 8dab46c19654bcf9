//! The format of a file, detected by its first bytes and never by its name.

use std::path::Path;

use crate::source::{ReadAt, SourceError};

/// Bytes that tell every format from the others.
const PREFIX_BYTES: usize = 32;

/// The first bytes of a zip archive.
const ZIP_MAGIC: &[u8] = b"PK\x03\x04";

/// The first bytes of every torch file of the older form: torch's magic number, pickled by itself.
const LEGACY_MAGIC: &[u8] = b"\x80\x02\x8a\x0a\x6c\xfc\x9c\x46\xf9\x20\x6a\xa8\x50\x19.";

/// The format of a checkpoint's file.
#[derive(Clone, Copy, Debug, PartialEq, Eq, serde::Serialize)]
pub enum Format {
    /// A safetensors file.
    #[serde(rename = "safetensors")]
    Safetensors,
    /// `torch.save` since 1.6: a zip archive.
    #[serde(rename = "torch zip")]
    TorchZip,
    /// `torch.save` before 1.6: pickles and raw storages in a row.
    #[serde(rename = "torch legacy")]
    TorchLegacy,
}

impl Format {
    /// The name in messages and JSON.
    pub fn name(self) -> &'static str {
        match self {
            Format::Safetensors => "safetensors",
            Format::TorchZip => "torch zip",
            Format::TorchLegacy => "torch legacy",
        }
    }
}

/// The format that the first bytes suggest.
pub enum DetectedFormat {
    /// That of a checkpoint, which its reader still has to confirm.
    Checkpoint(Format),
    /// Another one, in words.
    Other(&'static str),
}

/// Detects the format of a file. The path only decides what a damaged file was meant to be.
pub fn detect(file: &dyn ReadAt, path: &Path) -> Result<DetectedFormat, SourceError> {
    let mut bytes = [0; PREFIX_BYTES];
    let len = file.size().min(PREFIX_BYTES as u64) as usize;
    file.read_exact_at(&mut bytes[..len], 0)?;
    let bytes = &bytes[..len];
    let is_named_safetensors = path.extension().is_some_and(|e| e == "safetensors" || e == "sft");
    // The length of a header may begin like any other format. No other format has a brace behind a length
    // that fits the file.
    let header = bytes.split_first_chunk::<8>().filter(|(_, rest)| rest.first() == Some(&b'{'));
    if header.is_some_and(|(len, _)| u64::from_le_bytes(*len) <= file.size() - 8) {
        return Ok(DetectedFormat::Checkpoint(Format::Safetensors));
    }
    Ok(match bytes {
        b if b.starts_with(ZIP_MAGIC) => DetectedFormat::Checkpoint(Format::TorchZip),
        [0x80, 2..=5, ..] if !is_named_safetensors || bytes.starts_with(LEGACY_MAGIC) => {
            DetectedFormat::Checkpoint(Format::TorchLegacy)
        }
        [_, _, _, _, _, _, _, _, b'{', ..] => DetectedFormat::Checkpoint(Format::Safetensors),
        // As the length of a header, its first bytes lead past its end.
        [0x80, 2..=5, ..]
            if bytes.first_chunk().is_none_or(|len| u64::from_le_bytes(*len) > file.size()) =>
        {
            DetectedFormat::Other("a pickle with the extension .safetensors")
        }
        // The safetensors reader says best what is wrong with it.
        [_, ..] if is_named_safetensors && !bytes.starts_with(b"version ") => {
            DetectedFormat::Checkpoint(Format::Safetensors)
        }
        [] => DetectedFormat::Other("an empty file"),
        b if b.starts_with(b"GGUF") => {
            DetectedFormat::Other("a GGUF file, not a checkpoint of torch or safetensors")
        }
        b if b.starts_with(b"\x89HDF") => {
            DetectedFormat::Other("an HDF5 file, not a checkpoint of torch or safetensors")
        }
        b if b.starts_with(b"version https://git-lfs") => DetectedFormat::Other(
            "a Git LFS pointer: the file that it stands for was not fetched (git lfs pull)",
        ),
        b if b.starts_with(b"<") => DetectedFormat::Other(
            "a web page or XML, most likely an error saved in place of a download",
        ),
        _ => DetectedFormat::Other("not a checkpoint of torch or safetensors"),
    })
}
