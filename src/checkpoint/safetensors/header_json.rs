//! The JSON of a safetensors header. Equal keys are refused.

use std::borrow::Cow;
use std::collections::BTreeMap;
use std::fmt;

use serde::de::{self, Deserialize, Deserializer, MapAccess, SeqAccess, Visitor};

use crate::checkpoint::contents::MAX_TENSOR_COUNT;
use crate::checkpoint::json::{CheckedAny, JsonText, UniqueMap, duplicate_key};
use crate::checkpoint::name_index::NameIndex;
use crate::checkpoint::tensor::{Dtype, Shape};

/// The entry of one tensor.
pub struct TensorInfo {
    pub dtype: Dtype,
    pub shape: Shape,
    pub data_offsets: (u64, u64),
}

/// An entry as it is written: its type may be one that is not known here.
struct RawTensorInfo<'a> {
    dtype: Result<Dtype, Cow<'a, str>>,
    shape: Shape,
    data_offsets: (u64, u64),
}

impl<'de: 'a, 'a> Deserialize<'de> for RawTensorInfo<'a> {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        deserializer.deserialize_map(TensorInfoVisitor)
    }
}

struct TensorInfoVisitor;

impl<'de> Visitor<'de> for TensorInfoVisitor {
    type Value = RawTensorInfo<'de>;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("an object with dtype, shape and data_offsets")
    }

    fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<RawTensorInfo<'de>, A::Error> {
        let (mut dtype, mut shape, mut data_offsets) = (None, None, None);
        while let Some(JsonText(key)) = map.next_key()? {
            let is_duplicate = match &*key {
                "dtype" => dtype.replace(map.next_value()?).is_some(),
                "shape" => shape.replace(map.next_value()?).is_some(),
                "data_offsets" => data_offsets.replace(map.next_value()?).is_some(),
                // The reference reader parses unknown fields too, and refuses invalid ones.
                _ => {
                    let CheckedAny = map.next_value()?;
                    false
                }
            };
            if is_duplicate {
                return Err(de::Error::custom(duplicate_key(&key)));
            }
        }
        let DtypeName(dtype) = dtype.ok_or_else(|| de::Error::missing_field("dtype"))?;
        let ShapeList(shape) = shape.ok_or_else(|| de::Error::missing_field("shape"))?;
        let data_offsets = data_offsets.ok_or_else(|| de::Error::missing_field("data_offsets"))?;
        Ok(RawTensorInfo { dtype, shape, data_offsets })
    }
}

/// An element type from its name, or the name of one that is not known.
struct DtypeName<'a>(Result<Dtype, Cow<'a, str>>);

impl<'de: 'a, 'a> Deserialize<'de> for DtypeName<'a> {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        let JsonText(name) = JsonText::deserialize(deserializer)?;
        Ok(DtypeName(Dtype::from_name(&name).ok_or(name)))
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

/// The tensors of a header in the order of the JSON, and the metadata.
pub struct HeaderJson<'a> {
    pub entries: Vec<(Cow<'a, str>, TensorInfo)>,
    pub metadata: Option<BTreeMap<String, String>>,
    /// The first tensor of an unknown type, and the name of that type. Its entry has another type.
    pub unknown_dtype: Option<(String, String)>,
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
        let (mut metadata, mut unknown_dtype) = (None, None);
        while let Some(JsonText(key)) = map.next_key()? {
            if key == "__metadata__" {
                if metadata.is_some() {
                    return Err(de::Error::custom("`__metadata__` is there twice"));
                }
                let object = map.next_value::<Option<UniqueMap<String>>>()?;
                metadata = Some(object.map(|unique| unique.0));
            } else {
                if entries.len() == MAX_TENSOR_COUNT {
                    return Err(de::Error::custom(format_args!(
                        "more than {MAX_TENSOR_COUNT} tensors"
                    )));
                }
                let RawTensorInfo { dtype, shape, data_offsets } = map.next_value()?;
                let dtype = dtype.unwrap_or_else(|name| {
                    unknown_dtype.get_or_insert_with(|| (key.to_string(), name.into_owned()));
                    Dtype::U8
                });
                entries.push((key, TensorInfo { dtype, shape, data_offsets }));
            }
        }
        if let Err(index) = NameIndex::build(entries.len(), |index| &*entries[index].0) {
            let key = &entries[index].0;
            return Err(de::Error::custom(format_args!("tensor `{key}` is there twice")));
        }
        Ok(HeaderJson { entries, metadata: metadata.flatten(), unknown_dtype })
    }
}
