//! Reads the header of a safetensors file, strictly.
//!
//! In: any [`ReadAt`]. Out: a [`Header`]: tensors in file order, and metadata.
//! The reference reader takes the last of two equal keys; here that is a fault, because programs
//! that disagree on which one counts would see different tensors.

use std::borrow::Cow;
use std::collections::BTreeMap;
use std::fmt;

use serde::de::{self, Deserialize, Deserializer, MapAccess, SeqAccess, Visitor};

use crate::source::{self, ReadAt};

use super::json::{CheckedAny, JsonText, duplicate_key};
use super::{
    ByteRun, Dtype, MAX_TENSOR_COUNT, NameIndex, OriginId, Shape, Tensor, TensorBytes, TensorName,
};

/// The longest header that the reference reader takes.
pub const MAX_HEADER_BYTES: u64 = 100_000_000;

/// The shortest file: an eight-byte length and `{}`.
const MIN_FILE_BYTES: u64 = 10;

/// What is wrong with a safetensors file.
#[derive(Debug, thiserror::Error)]
pub enum HeaderError {
    /// The bytes cannot be had.
    #[error(transparent)]
    Source(#[from] source::SourceError),
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
    /// Not UTF-8, not JSON, or not the JSON it must be.
    #[error("its header is not what it must be: {0}")]
    Json(String),
    /// The size by dtype and shape is not that of the range.
    #[error(
        "tensor `{tensor}`: {dtype} of shape {shape:?} does not take the {len} bytes of its range"
    )]
    SizeMismatch {
        /// The tensor.
        tensor: String,
        /// Its type.
        dtype: Dtype,
        /// Its shape.
        shape: Vec<u64>,
        /// Bytes of the range.
        len: u64,
    },
    /// A range whose end lies before its start.
    #[error("tensor `{tensor}`: its range ends before it starts")]
    Reversed {
        /// The tensor.
        tensor: String,
    },
    /// A range past the end of the file.
    #[error("tensor `{tensor}`: ends at byte {end} of the data, which has {data}")]
    PastEnd {
        /// The tensor.
        tensor: String,
        /// Where it would end.
        end: u64,
        /// Bytes of data in the file.
        data: u64,
    },
    /// Two tensors share bytes, or there is a hole between them.
    #[error(
        "tensor `{tensor}`: starts at byte {start} of the data and the one before it ends at {before}"
    )]
    Gap {
        /// The tensor.
        tensor: String,
        /// Where it starts.
        start: u64,
        /// Where it should start.
        before: u64,
    },
    /// Bytes after the last tensor.
    #[error("{extra} bytes follow the last tensor")]
    TrailingBytes {
        /// How many.
        extra: u64,
    },
}

/// What a safetensors file says of itself.
#[derive(Debug)]
pub struct Header {
    /// The tensors in the order of their bytes, all of origin 0.
    pub tensors: Vec<Tensor>,
    /// `__metadata__`, where there is one.
    pub metadata: Option<BTreeMap<String, String>>,
}

/// Reads and checks a header.
pub fn parse_header(file: &dyn ReadAt) -> Result<Header, HeaderError> {
    let size = file.size();
    if size < MIN_FILE_BYTES {
        return Err(HeaderError::TooShort { size });
    }
    let mut len = [0; 8];
    file.read_exact_at(&mut len, 0)?;
    let len = u64::from_le_bytes(len);
    if len > MAX_HEADER_BYTES {
        return Err(HeaderError::TooLong { len });
    }
    if len > size - 8 {
        return Err(HeaderError::Truncated { len, size });
    }
    let mut json = vec![0; len as usize];
    file.read_exact_at(&mut json, 8)?;
    parse_json(&json, 8 + len, size)
}

fn parse_json(json: &[u8], data_start: u64, size: u64) -> Result<Header, HeaderError> {
    // The reference reader asks for the brace, so that a header cannot be padded in front.
    if json.first() != Some(&b'{') {
        return Err(HeaderError::Json("it does not begin with `{`".to_owned()));
    }
    let text = std::str::from_utf8(json).map_err(|e| HeaderError::Json(e.to_string()))?;
    let raw: HeaderJson =
        serde_json::from_str(text).map_err(|e| HeaderError::Json(e.to_string()))?;
    let data = size - data_start;
    let mut entries = raw.entries;
    // Empty tensors come before the one that starts at the same byte.
    if !entries.is_sorted_by_key(|(_, info)| info.data_offsets) {
        entries.sort_by_key(|(_, info)| info.data_offsets);
    }
    let names: Vec<TensorName> =
        TensorName::pack(entries.iter().map(|(name, _)| &**name)).collect();
    let mut before = 0;
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
        if start != before {
            return Err(HeaderError::Gap { tensor: tensor(), start, before });
        }
        before = end;
        let TensorInfo { dtype, shape, .. } = info;
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
    if before != data {
        return Err(HeaderError::TrailingBytes { extra: data - before });
    }
    Ok(Header { tensors, metadata: raw.metadata })
}

/// What a header says of one tensor.
struct TensorInfo {
    dtype: Dtype,
    shape: Shape,
    data_offsets: (u64, u64),
}

impl<'de> Deserialize<'de> for TensorInfo {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        deserializer.deserialize_map(TensorInfoVisitor)
    }
}

struct TensorInfoVisitor;

impl<'de> Visitor<'de> for TensorInfoVisitor {
    type Value = TensorInfo;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("an object with dtype, shape and data_offsets")
    }

    fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<TensorInfo, A::Error> {
        let (mut dtype, mut shape, mut data_offsets) = (None, None, None);
        while let Some(JsonText(key)) = map.next_key()? {
            let is_twice = match &*key {
                "dtype" => dtype.replace(map.next_value()?).is_some(),
                "shape" => shape.replace(map.next_value()?).is_some(),
                "data_offsets" => data_offsets.replace(map.next_value()?).is_some(),
                // The reference reader parses unknown fields whole, and refuses what it cannot parse.
                _ => {
                    let CheckedAny = map.next_value()?;
                    false
                }
            };
            if is_twice {
                return Err(de::Error::custom(duplicate_key(&key)));
            }
        }
        let DtypeName(dtype) = dtype.ok_or_else(|| de::Error::missing_field("dtype"))?;
        let ShapeList(shape) = shape.ok_or_else(|| de::Error::missing_field("shape"))?;
        let data_offsets = data_offsets.ok_or_else(|| de::Error::missing_field("data_offsets"))?;
        Ok(TensorInfo { dtype, shape, data_offsets })
    }
}

/// A data type by its name.
struct DtypeName(Dtype);

impl<'de> Deserialize<'de> for DtypeName {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        let JsonText(name) = JsonText::deserialize(deserializer)?;
        let unknown = || de::Error::custom(format_args!("unknown dtype `{name}`"));
        Dtype::from_name(&name).map(DtypeName).ok_or_else(unknown)
    }
}

/// A shape, from a list of sizes.
struct ShapeList(Shape);

impl<'de> Deserialize<'de> for ShapeList {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        deserializer.deserialize_seq(ShapeVisitor).map(ShapeList)
    }
}

struct ShapeVisitor;

impl<'de> Visitor<'de> for ShapeVisitor {
    type Value = Shape;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a list of numbers")
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut seq: A) -> Result<Shape, A::Error> {
        let mut shape = Shape::new();
        while let Some(dim) = seq.next_element()? {
            shape.push(dim);
        }
        shape.shrink_to_fit();
        Ok(shape)
    }
}

/// The header's JSON as it stands, equal keys refused.
struct HeaderJson<'a> {
    entries: Vec<(Cow<'a, str>, TensorInfo)>,
    metadata: Option<BTreeMap<String, String>>,
}

impl<'de: 'a, 'a> Deserialize<'de> for HeaderJson<'a> {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        deserializer.deserialize_map(HeaderJsonVisitor)
    }
}

struct HeaderJsonVisitor;

impl<'de> Visitor<'de> for HeaderJsonVisitor {
    type Value = HeaderJson<'de>;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("an object of tensors")
    }

    fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<HeaderJson<'de>, A::Error> {
        let mut entries: Vec<(Cow<'de, str>, TensorInfo)> = Vec::new();
        let mut metadata = None;
        while let Some(JsonText(key)) = map.next_key()? {
            if key == "__metadata__" {
                if metadata.is_some() {
                    return Err(de::Error::custom("`__metadata__` is there twice"));
                }
                let given = map.next_value::<Option<super::json::UniqueMap<String>>>()?;
                metadata = Some(given.map(|unique| unique.0));
            } else {
                if entries.len() == MAX_TENSOR_COUNT {
                    return Err(de::Error::custom(format_args!(
                        "more than {MAX_TENSOR_COUNT} tensors"
                    )));
                }
                entries.push((key, map.next_value()?));
            }
        }
        if let Err(place) = NameIndex::build(entries.len(), |place| &*entries[place].0) {
            let key = &entries[place].0;
            return Err(de::Error::custom(format_args!("tensor `{key}` is there twice")));
        }
        Ok(HeaderJson { entries, metadata: metadata.flatten() })
    }
}
