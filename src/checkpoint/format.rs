//! The format of a file, detected by its first bytes and never by its name.

use std::path::Path;

use crate::source::{ReadAt, SourceError};

use super::unread_format::UnreadFormat;

/// Bytes that tell every format from the others: the mark of a tar archive is the last.
const PREFIX_BYTES: usize = 512;

/// The first bytes of a zip archive.
const ZIP_MAGIC: &[u8] = b"PK\x03\x04";

/// The first bytes of every torch file of the older form: torch's magic number, pickled by itself.
const LEGACY_MAGIC: &[u8] = b"\x80\x02\x8a\x0a\x6c\xfc\x9c\x46\xf9\x20\x6a\xa8\x50\x19.";

/// First bytes of formats that are not read. A format that gets a reader moves to [`Format`].
const UNREAD_MAGICS: [(&[u8], UnreadFormat); 9] = [
    (b"GGUF", UnreadFormat::Gguf),
    (b"\x89HDF\r\n\x1a\n", UnreadFormat::Hdf5),
    (b"\x93NUMPY", UnreadFormat::Numpy),
    (b"\x1f\x8b\x08", UnreadFormat::Compressed { program: "gunzip" }),
    (b"\x28\xb5\x2f\xfd", UnreadFormat::Compressed { program: "unzstd" }),
    (b"\xfd7zXZ\0", UnreadFormat::Compressed { program: "unxz" }),
    (b"BZh", UnreadFormat::Compressed { program: "bunzip2" }),
    (b"version https://git-lfs", UnreadFormat::LfsPointer),
    (b"version https://hawser", UnreadFormat::LfsPointer),
];

/// The place of a tar archive's mark, and the mark.
const TAR_MARK: (usize, &[u8]) = (257, b"ustar");

/// The byte order mark that some programs write before text.
const BYTE_ORDER_MARK: &[u8] = b"\xef\xbb\xbf";

/// The format of a checkpoint.
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
    /// A folder of torch.distributed.checkpoint.
    #[serde(rename = "torch dcp")]
    Dcp,
    /// Per-rank safetensors files of torch.distributed.checkpoint.
    #[serde(rename = "safetensors dcp")]
    DcpSafetensors,
    /// A folder of DeepSpeed with ZeRO.
    #[serde(rename = "deepspeed zero")]
    DeepSpeed,
    /// Per-rank files of `torch.save`.
    #[serde(rename = "torch ranks")]
    RankFiles,
    /// A version that a trainer wrote as a delta.
    #[serde(rename = "safetensors delta")]
    Delta,
}

impl Format {
    /// The name in messages and JSON.
    pub fn name(self) -> &'static str {
        match self {
            Format::Safetensors => "safetensors",
            Format::TorchZip => "torch zip",
            Format::TorchLegacy => "torch legacy",
            Format::Dcp => "torch dcp",
            Format::DcpSafetensors => "safetensors dcp",
            Format::DeepSpeed => "deepspeed zero",
            Format::RankFiles => "torch ranks",
            Format::Delta => "safetensors delta",
        }
    }
}

/// The format of one file.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum FileFormat {
    Safetensors,
    TorchZip,
    TorchLegacy,
}

impl From<FileFormat> for Format {
    fn from(format: FileFormat) -> Format {
        match format {
            FileFormat::Safetensors => Format::Safetensors,
            FileFormat::TorchZip => Format::TorchZip,
            FileFormat::TorchLegacy => Format::TorchLegacy,
        }
    }
}

/// The format that the first bytes suggest.
pub enum DetectedFormat {
    /// That of a checkpoint, which its reader still has to confirm.
    Checkpoint(FileFormat),
    /// A format without a reader: it is recognised and refused by name.
    Unread(UnreadFormat),
}

/// Detects the format of a file. The path only decides what a damaged file was meant to be.
pub fn detect(file: &dyn ReadAt, path: &Path) -> Result<DetectedFormat, SourceError> {
    let mut bytes = [0; PREFIX_BYTES];
    let len = file.size().min(PREFIX_BYTES as u64) as usize;
    file.read_exact_at(&mut bytes[..len], 0)?;
    Ok(detect_prefix(&bytes[..len], file.size(), path))
}

/// The format of a file that is not read; `None` if it may be a checkpoint.
pub fn detect_unread(file: &dyn ReadAt, path: &Path) -> Result<Option<UnreadFormat>, SourceError> {
    Ok(match detect(file, path)? {
        DetectedFormat::Unread(format) => Some(format),
        DetectedFormat::Checkpoint(_) => None,
    })
}

fn detect_prefix(bytes: &[u8], size: u64, path: &Path) -> DetectedFormat {
    let is_named_safetensors = path.extension().is_some_and(|e| e == "safetensors" || e == "sft");
    let header_len = bytes.first_chunk::<8>().map(|len| u64::from_le_bytes(*len));
    let has_brace = bytes.get(8) == Some(&b'{');
    let unread = unread_format(bytes);
    // No header is as long as these four letters would make it, and files of GGUF can be longer than that.
    if unread == Some(UnreadFormat::Gguf) {
        return DetectedFormat::Unread(UnreadFormat::Gguf);
    }
    // The length of a header may begin like any other format. No other format has a brace behind a length
    // that fits the file.
    if has_brace && header_len.is_some_and(|len| len <= size - 8) {
        return DetectedFormat::Checkpoint(FileFormat::Safetensors);
    }
    match bytes {
        // Archives in a row; with a single one it would be shown as a tensor, which is a piece of one.
        b if b.starts_with(ZIP_MAGIC) && path.extension().is_some_and(|e| e == "distcp") => {
            DetectedFormat::Unread(UnreadFormat::DcpData)
        }
        b if b.starts_with(ZIP_MAGIC) => DetectedFormat::Checkpoint(FileFormat::TorchZip),
        [0x80, 2..=5, ..] if !is_named_safetensors || bytes.starts_with(LEGACY_MAGIC) => {
            DetectedFormat::Checkpoint(FileFormat::TorchLegacy)
        }
        // A file that is cut off, unless all of it is text.
        _ if has_brace && unread.is_none() => DetectedFormat::Checkpoint(FileFormat::Safetensors),
        // As the length of a header, its first bytes lead past its end.
        [0x80, 2..=5, ..] if header_len.is_none_or(|len| len > size) => {
            DetectedFormat::Unread(UnreadFormat::MisnamedPickle)
        }
        _ => match unread {
            Some(format) => DetectedFormat::Unread(format),
            // The safetensors reader says best what is wrong with it.
            None if is_named_safetensors => DetectedFormat::Checkpoint(FileFormat::Safetensors),
            None => DetectedFormat::Unread(UnreadFormat::Unknown),
        },
    }
}

/// The format that is not read, if the first bytes are those of one.
fn unread_format(bytes: &[u8]) -> Option<UnreadFormat> {
    if bytes.is_empty() {
        return Some(UnreadFormat::Empty);
    }
    let (tar_offset, tar_mark) = TAR_MARK;
    if bytes.get(tar_offset..).is_some_and(|rest| rest.starts_with(tar_mark)) {
        return Some(UnreadFormat::Tar);
    }
    let by_magic = UNREAD_MAGICS.iter().find(|(magic, _)| bytes.starts_with(magic));
    by_magic.map(|(_, format)| format.clone()).or_else(|| text_format(bytes))
}

/// The kind of text that a file begins with, if it is text.
fn text_format(bytes: &[u8]) -> Option<UnreadFormat> {
    let text = bytes.strip_prefix(BYTE_ORDER_MARK).unwrap_or(bytes).trim_ascii_start();
    if let [b'<', next, ..] = text
        && (next.is_ascii_alphabetic() || b"!?".contains(next))
    {
        let lower = text.to_ascii_lowercase();
        let has = |word: &[u8]| lower.windows(word.len()).any(|window| window == word);
        return Some(match has(b"<html") || has(b"<!doctype html") {
            true => UnreadFormat::WebPage,
            false => UnreadFormat::Xml,
        });
    }
    let is_text = |text: &str| text.chars().all(|c| !c.is_control() || c.is_ascii_whitespace());
    let is_text = match std::str::from_utf8(text) {
        Ok(text) => is_text(text),
        // The prefix may end within a character.
        Err(error) if error.error_len().is_none() => {
            std::str::from_utf8(&text[..error.valid_up_to()]).is_ok_and(is_text)
        }
        Err(_) => false,
    };
    // Some letters may be anything; a header whose file is cut off has zeros among them.
    (is_text && text.len() >= MIN_TEXT_BYTES).then(|| match text[0] {
        b'{' | b'[' => UnreadFormat::Json,
        _ => UnreadFormat::Text,
    })
}

/// Bytes that must be text before a file is called that: the length of a header has as many.
const MIN_TEXT_BYTES: usize = 8;

#[cfg(test)]
mod tests {
    use super::*;

    fn unread(bytes: &[u8], name: &str) -> Option<UnreadFormat> {
        match detect_prefix(bytes, bytes.len() as u64, Path::new(name)) {
            DetectedFormat::Unread(format) => Some(format),
            DetectedFormat::Checkpoint(_) => None,
        }
    }

    #[test]
    fn other_formats_are_told_apart_whatever_their_name() {
        let mut tar = [0; 300];
        tar[257..262].copy_from_slice(b"ustar");
        for (bytes, format) in [
            (&b""[..], UnreadFormat::Empty),
            (b"GGUF\x03\0\0\0{\0\0\0", UnreadFormat::Gguf),
            (b"\x89HDF\r\n\x1a\n and more", UnreadFormat::Hdf5),
            (b"\x93NUMPY\x01\0v\0{'descr'", UnreadFormat::Numpy),
            (b"version https://git-lfs.github.com/spec/v1\noid", UnreadFormat::LfsPointer),
            (b"<!DOCTYPE html>\n<html>", UnreadFormat::WebPage),
            (b"\xef\xbb\xbf \n<HTML lang=en>", UnreadFormat::WebPage),
            (b"<html>\xff\xfe", UnreadFormat::WebPage),
            (b"<?xml version='1.0'?><Error>", UnreadFormat::Xml),
            (b"{\"error\": \"not found\"}", UnreadFormat::Json),
            (b"{\"code\":{\"error\": 1}}", UnreadFormat::Json),
            (b"Entry not found", UnreadFormat::Text),
            ("Fichier non trouvé".as_bytes(), UnreadFormat::Text),
            (&tar, UnreadFormat::Tar),
        ] {
            for name in ["m.safetensors", "m.bin", "m"] {
                assert_eq!(unread(bytes, name).as_ref(), Some(&format), "{bytes:?} as {name}");
            }
        }
        assert_eq!(unread(b"\x01\x02", "m.bin"), Some(UnreadFormat::Unknown));
    }

    #[test]
    fn a_damaged_safetensors_file_is_for_its_reader() {
        for bytes in
            [&b"\x40\0\0\0\0\0\0\0{\"a"[..], b"\x40\0\0", b"<\0\0\0\0\0\0\0{", b"\x1f\x8b\0"]
        {
            assert_eq!(unread(bytes, "m.safetensors"), None, "{bytes:?}");
        }
    }
}
