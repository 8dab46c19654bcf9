//! Parses the header of a safetensors file, strictly.
//!
//! In: any [`ReadAt`]. Out: a [`Header`]: tensors in file order, and metadata.
//!
//! Equal keys are an error here. The reference reader takes the last of them, and programs that disagree on which
//! key counts would see different tensors.

mod header_json;

use std::borrow::Cow;
use std::collections::BTreeMap;
use std::path::Path;
use std::sync::Arc;

use crate::shell_word::shell_word;
use crate::source::{ReadAt, SourceError};

use super::json::UniqueMap;
use super::tensor::{ByteRun, Dtype, OriginId, Tensor, TensorBytes, TensorName};
use header_json::{HeaderJson, TensorInfo};

/// The longest header that the reference reader takes.
pub const MAX_HEADER_BYTES: u64 = 100_000_000;

/// Characters of an unknown element type that a message shows; real names have 11 at most.
const MAX_DTYPE_CHARACTERS: usize = 40;

/// The metadata key under which torch.distributed.checkpoint writes the first steps of each tensor's piece.
pub const SHARDING_INFO_KEY: &str = "DCP_SHARDING_INFO";

/// Parses the first steps of each tensor's piece; `None` if they are malformed, or if a tensor has them twice.
pub fn parse_sharding_info(info: &str) -> Option<BTreeMap<String, Vec<u64>>> {
    #[derive(serde::Deserialize)]
    struct PieceInfo {
        saved_offsets: Vec<u64>,
    }
    let UniqueMap(pieces): UniqueMap<PieceInfo> = serde_json::from_str(info).ok()?;
    Some(pieces.into_iter().map(|(name, piece)| (name, piece.saved_offsets)).collect())
}

/// Size of the length prefix.
const LENGTH_PREFIX_BYTES: usize = 8;

/// The shortest file: an eight-byte length and `{}`.
const MIN_FILE_BYTES: u64 = 10;

/// What is wrong with a safetensors file.
#[allow(missing_docs)] // The messages name the fields.
#[derive(Debug, thiserror::Error)]
pub enum HeaderError {
    /// The bytes cannot be read.
    #[error(transparent)]
    Source(#[from] SourceError),
    /// A file without bytes.
    #[error("it is empty")]
    Empty,
    /// Too short to have a header.
    #[error("{size} bytes are too few to hold a header")]
    TooShort {
        /// The file's size.
        size: u64,
    },
    /// The header would end past the file.
    #[error("its header should be {len} bytes long and the file has {size}")]
    Truncated {
        /// The stated length.
        len: u64,
        /// The file's size.
        size: u64,
    },
    /// The header is longer than any reader takes.
    #[error(
        "its header should be {len} bytes long, and {MAX_HEADER_BYTES} is the most that any reader takes"
    )]
    TooLong {
        /// The stated length.
        len: u64,
    },
    /// Not UTF-8, not JSON, or not a header.
    #[error("its header is malformed: {0}")]
    Json(String),
    /// An element type that is not known here.
    #[error("tensor `{tensor}`: this version of ckptfs does not know the element type `{dtype}`")]
    UnknownDtype {
        tensor: String,
        /// Its name, shortened.
        dtype: String,
    },
    /// The size by dtype and shape is not that of the range.
    #[error(
        "tensor `{tensor}`: {dtype} of shape {shape:?} does not take the {len} bytes of its range"
    )]
    SizeMismatch {
        tensor: String,
        dtype: Dtype,
        shape: Vec<u64>,
        /// Bytes of the range.
        len: u64,
    },
    /// A range whose end lies before its start.
    #[error("tensor `{tensor}`: its range ends before it starts")]
    Reversed { tensor: String },
    /// A range past the end of the file.
    #[error("tensor `{tensor}`: ends at byte {end} of the data, which has {data}")]
    PastEnd {
        tensor: String,
        end: u64,
        /// Bytes of data in the file.
        data: u64,
    },
    /// Two tensors share bytes, or there is a hole between them.
    #[error(
        "tensor `{tensor}`: starts at byte {start} of the data and the one before it ends at {before}"
    )]
    Gap {
        tensor: String,
        start: u64,
        /// The end of the tensor before it.
        before: u64,
    },
    /// There are bytes after the last tensor.
    #[error("{extra} bytes follow the last tensor")]
    TrailingBytes {
        /// The number of those bytes.
        extra: u64,
    },
}

impl HeaderError {
    /// What the user can do about the file at a path.
    pub fn remedy(&self, path: &Path) -> Cow<'_, str> {
        match self {
            HeaderError::Source(error) => error.remedy(),
            HeaderError::UnknownDtype { .. } => format!(
                "read it with a newer ckptfs (this is {}), or with the safetensors package: it may know the type; \
                 if neither does, fetch {} again",
                env!("CARGO_PKG_VERSION"),
                shell_word(path)
            )
            .into(),
            HeaderError::Empty => "fetch or save it again".into(),
            HeaderError::TooShort { .. } | HeaderError::Truncated { .. } => {
                "fetch the file again: most often it is a download that was cut off".into()
            }
            _ => "fetch or save the file again; it is damaged or was written by a faulty program"
                .into(),
        }
    }
}

/// A parsed header.
#[derive(Debug)]
pub struct Header {
    /// The tensors in the order of their bytes, all of origin 0.
    pub tensors: Vec<Tensor>,
    /// The value of `__metadata__`, if there is one.
    pub metadata: Option<BTreeMap<String, String>>,
    /// The header as it is in the file, with its length prefix.
    pub raw: Arc<[u8]>,
}

/// Reads, parses and checks the header of a file.
pub fn parse_header(file: &dyn ReadAt) -> Result<Header, HeaderError> {
    let size = file.size();
    if size == 0 {
        return Err(HeaderError::Empty);
    }
    if size < MIN_FILE_BYTES {
        return Err(HeaderError::TooShort { size });
    }
    let mut len = [0; LENGTH_PREFIX_BYTES];
    file.read_exact_at(&mut len, 0)?;
    let len = u64::from_le_bytes(len);
    if len > MAX_HEADER_BYTES {
        return Err(HeaderError::TooLong { len });
    }
    if len > size - LENGTH_PREFIX_BYTES as u64 {
        return Err(HeaderError::Truncated { len, size });
    }
    let mut raw = vec![0; LENGTH_PREFIX_BYTES + len as usize];
    raw[..LENGTH_PREFIX_BYTES].copy_from_slice(&len.to_le_bytes());
    file.read_exact_at(&mut raw[LENGTH_PREFIX_BYTES..], LENGTH_PREFIX_BYTES as u64)?;
    parse_raw(raw.into(), size)
}

/// Whether a raw header of a file of `size` bytes lists exactly these tensors, in this order, and this metadata.
pub fn header_describes(
    raw: &Arc<[u8]>,
    size: u64,
    tensors: &[Tensor],
    metadata: &BTreeMap<String, String>,
) -> bool {
    let is_same =
        |a: &Tensor, b: &Tensor| (&a.name, a.dtype, &a.shape) == (&b.name, b.dtype, &b.shape);
    parse_raw(Arc::clone(raw), size).is_ok_and(|header| {
        header.metadata.as_ref() == Some(metadata)
            && header.tensors.len() == tensors.len()
            && header.tensors.iter().zip(tensors).all(|(a, b)| is_same(a, b))
    })
}

/// Parses a header with its length prefix, of a file of `size` bytes.
fn parse_raw(raw: Arc<[u8]>, size: u64) -> Result<Header, HeaderError> {
    let (json, data_start) = (&raw[LENGTH_PREFIX_BYTES..], raw.len() as u64);
    // The reference reader requires the brace too: a header cannot be padded in front.
    if json.first() != Some(&b'{') {
        return Err(HeaderError::Json("it does not begin with `{`".to_owned()));
    }
    let json = std::str::from_utf8(json).map_err(|e| HeaderError::Json(e.to_string()))?;
    let parsed: HeaderJson =
        serde_json::from_str(json).map_err(|e| HeaderError::Json(e.to_string()))?;
    if let Some((tensor, dtype)) = parsed.unknown_dtype {
        let dtype = dtype.chars().take(MAX_DTYPE_CHARACTERS).collect();
        return Err(HeaderError::UnknownDtype { tensor, dtype });
    }
    let data = size - data_start;
    let mut entries = parsed.entries;
    // Empty tensors come before the one that starts at the same byte.
    if !entries.is_sorted_by_key(|(_, info)| info.data_offsets) {
        entries.sort_by_key(|(_, info)| info.data_offsets);
    }
    let names: Vec<TensorName> =
        TensorName::pack(entries.iter().map(|(name, _)| &**name)).collect();
    let mut previous_end = 0;
    let mut tensors = Vec::with_capacity(entries.len());
    for (name, (_, info)) in names.into_iter().zip(entries) {
        let (start, end) = info.data_offsets;
        let tensor = || name.to_string();
        let Some(len) = end.checked_sub(start) else {
            return Err(HeaderError::Reversed { tensor: tensor() });
        };
        if end > data {
            return Err(HeaderError::PastEnd { tensor: tensor(), end, data });
        }
        if start != previous_end {
            return Err(HeaderError::Gap { tensor: tensor(), start, before: previous_end });
        }
        previous_end = end;
        let TensorInfo { dtype, shape, data_offsets: _ } = info;
        if dtype.byte_len(&shape) != Some(len) {
            return Err(HeaderError::SizeMismatch {
                tensor: tensor(),
                dtype,
                shape: shape.into_vec(),
                len,
            });
        }
        let run = ByteRun { origin: OriginId(0), offset: data_start + start, len };
        tensors.push(Tensor { name, dtype, shape, bytes: TensorBytes::Run(run) });
    }
    if previous_end != data {
        return Err(HeaderError::TrailingBytes { extra: data - previous_end });
    }
    let metadata = parsed.metadata;
    Ok(Header { tensors, metadata, raw })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_empty_file_is_called_empty() {
        let error = parse_header(&Vec::new()).unwrap_err();
        assert_eq!(error.to_string(), "it is empty");
        assert!(!error.remedy(Path::new("f")).contains("cut off"));
    }
}
