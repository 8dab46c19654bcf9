//! Parses the metadata in the index of a delta: its version, the version before, and its encodings.
//!
//! In: the bytes of any index. Out: [`DeltaMetadata`], or nothing if it is the index of a whole checkpoint.

use std::fmt;

use serde::de::{self, Deserialize, Deserializer, IgnoredAny, MapAccess, SeqAccess, Visitor};

use super::delta_error::DeltaError;
use super::json::duplicate_key;
use super::tensor::{ChecksumFormat, DeltaEncoding};

/// The name of the index of every version.
pub const VERSION_INDEX_NAME: &str = "model.safetensors.index.json";

/// Maximum digits of a version's number. No trainer writes as many.
const MAX_VERSION_DIGITS: usize = 12;

/// What the index of a delta says of it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DeltaMetadata {
    pub version: u64,
    pub base_version: u64,
    pub encoding: DeltaEncoding,
    pub checksum: ChecksumFormat,
}

/// Parses the metadata of an index; `None` without `delta_encoding`, which every delta has.
pub fn parse_delta_metadata(json: &[u8]) -> Result<Option<DeltaMetadata>, DeltaError> {
    // The parser of indexes refuses what is no index.
    let Ok(DeltaIndexJson { metadata }) = serde_json::from_slice(json) else { return Ok(None) };
    if let Some(key) = metadata.duplicate {
        return Err(DeltaError::Index { what: duplicate_key(key) });
    }
    let field = |name| metadata.field(name);
    if field(DELTA_ENCODING).is_none() {
        return Ok(None);
    }
    let text = |name| match field(name) {
        Some(FieldValue::Text(text)) => Ok(text.as_str()),
        Some(_) => Err(DeltaError::Index { what: format!("{name} is not text") }),
        None => Err(DeltaError::Index { what: format!("{name} is missing") }),
    };
    let unknown = |name, value: &str| DeltaError::Unknown { name, value: value.to_owned() };
    let version = |name| match field(name) {
        Some(FieldValue::Number(number)) => Ok(*number),
        _ => {
            let digits = text(name)?;
            let is_number = !digits.is_empty()
                && digits.len() <= MAX_VERSION_DIGITS
                && digits.bytes().all(|byte| byte.is_ascii_digit());
            let number = digits.parse().ok().filter(|_| is_number);
            number.ok_or_else(|| DeltaError::Index { what: format!("{name} is no number") })
        }
    };
    let compression = text(COMPRESSION_FORMAT)?;
    if compression != "zstd" {
        return Err(unknown(COMPRESSION_FORMAT, compression));
    }
    let (encoding, checksum) = (text(DELTA_ENCODING)?, text(CHECKSUM_FORMAT)?);
    Ok(Some(DeltaMetadata {
        version: version(VERSION)?,
        base_version: version(BASE_VERSION)?,
        encoding: DeltaEncoding::parse(encoding)
            .ok_or_else(|| unknown(DELTA_ENCODING, encoding))?,
        checksum: ChecksumFormat::parse(checksum)
            .ok_or_else(|| unknown(CHECKSUM_FORMAT, checksum))?,
    }))
}

const VERSION: &str = "version";
const BASE_VERSION: &str = "base_version";
const DELTA_ENCODING: &str = "delta_encoding";
const COMPRESSION_FORMAT: &str = "compression_format";
const CHECKSUM_FORMAT: &str = "checksum_format";

const FIELDS: [&str; 5] =
    [VERSION, BASE_VERSION, DELTA_ENCODING, COMPRESSION_FORMAT, CHECKSUM_FORMAT];

#[derive(serde::Deserialize)]
struct DeltaIndexJson {
    #[serde(default)]
    metadata: MetadataFields,
}

/// The fields of an index's metadata that describe a delta. All others are skipped.
#[derive(Default)]
struct MetadataFields {
    values: [Option<FieldValue>; FIELDS.len()],
    duplicate: Option<&'static str>,
}

impl MetadataFields {
    fn field(&self, name: &str) -> Option<&FieldValue> {
        let place = FIELDS.iter().position(|field| *field == name)?;
        self.values[place].as_ref()
    }
}

enum FieldValue {
    Text(String),
    Number(u64),
    Other,
}

impl<'de> Deserialize<'de> for MetadataFields {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        deserializer.deserialize_any(MetadataVisitor)
    }
}

struct MetadataVisitor;

/// Methods of a visitor, for the kinds of values that are ignored.
macro_rules! visit_ignored {
    ($value:ty: $default:expr; $($method:ident($kind:ty))*) => {
        $(fn $method<E: de::Error>(self, _: $kind) -> Result<$value, E> {
            Ok($default)
        })*

        fn visit_unit<E: de::Error>(self) -> Result<$value, E> {
            Ok($default)
        }

        fn visit_seq<A: SeqAccess<'de>>(self, mut seq: A) -> Result<$value, A::Error> {
            while seq.next_element::<IgnoredAny>()?.is_some() {}
            Ok($default)
        }
    };
}

impl<'de> Visitor<'de> for MetadataVisitor {
    type Value = MetadataFields;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("any value")
    }

    fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<MetadataFields, A::Error> {
        let mut fields = MetadataFields::default();
        while let Some(key) = map.next_key::<String>()? {
            let Some(place) = FIELDS.iter().position(|field| *field == key) else {
                map.next_value::<IgnoredAny>()?;
                continue;
            };
            if fields.values[place].replace(map.next_value()?).is_some() {
                fields.duplicate = Some(FIELDS[place]);
            }
        }
        Ok(fields)
    }

    visit_ignored! {
        MetadataFields: MetadataFields::default();
        visit_bool(bool) visit_i64(i64) visit_u64(u64) visit_f64(f64) visit_str(&str)
    }
}

impl<'de> Deserialize<'de> for FieldValue {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        deserializer.deserialize_any(FieldVisitor)
    }
}

struct FieldVisitor;

impl<'de> Visitor<'de> for FieldVisitor {
    type Value = FieldValue;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("any value")
    }

    fn visit_str<E: de::Error>(self, text: &str) -> Result<FieldValue, E> {
        Ok(FieldValue::Text(text.to_owned()))
    }

    fn visit_u64<E: de::Error>(self, number: u64) -> Result<FieldValue, E> {
        Ok(FieldValue::Number(number))
    }

    fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<FieldValue, A::Error> {
        while map.next_entry::<IgnoredAny, IgnoredAny>()?.is_some() {}
        Ok(FieldValue::Other)
    }

    visit_ignored! {
        FieldValue: FieldValue::Other;
        visit_bool(bool) visit_i64(i64) visit_f64(f64)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const DELTA: &str = r#"{"metadata": {"version": "000002", "base_version": "000001", "delta_encoding": "xor",
        "compression_format": "zstd", "checksum_format": "xxh3-128"}, "weight_map": {}}"#;

    fn parse(json: &str) -> Result<Option<DeltaMetadata>, String> {
        parse_delta_metadata(json.as_bytes()).map_err(|error| error.to_string())
    }

    #[test]
    fn what_an_index_says_of_a_delta_is_read() {
        let delta = DeltaMetadata {
            version: 2,
            base_version: 1,
            encoding: DeltaEncoding::Xor,
            checksum: ChecksumFormat::Xxh3,
        };
        assert_eq!(parse(DELTA), Ok(Some(delta)));
        assert_eq!(parse(&DELTA.replace("\"000002\"", "2")), Ok(Some(delta)));
        let other = DELTA.replace("xor", "overwrite").replace("xxh3-128", "adler32");
        let expected = DeltaMetadata {
            encoding: DeltaEncoding::Overwrite,
            checksum: ChecksumFormat::Adler32,
            ..delta
        };
        assert_eq!(parse(&other), Ok(Some(expected)));
    }

    #[test]
    fn indexes_of_whole_checkpoints_are_no_deltas() {
        for json in [
            r#"{"metadata": {"total_size": 5, "version": "1"}, "weight_map": {}}"#,
            r#"{"metadata": null, "weight_map": {}}"#,
            r#"{"metadata": [1, {"delta_encoding": "xor"}], "weight_map": {}}"#,
            r#"{"weight_map": {}}"#,
            "[]",
            "not JSON",
        ] {
            assert_eq!(parse(json), Ok(None), "{json}");
        }
    }

    #[test]
    fn what_is_unknown_or_ambiguous_is_refused_by_name() {
        for (from, to, words) in [
            ("xor", "add", "delta_encoding `add`"),
            ("zstd", "lz4", "compression_format `lz4`"),
            ("xxh3-128", "md5", "checksum_format `md5`"),
            ("\"xor\"", "null", "delta_encoding is not text"),
            ("\"000002\"", "\"2 \"", "version is no number"),
            ("\"000002\"", "-1", "version is not text"),
            ("\"000002\"", "\"9999999999999\"", "version is no number"),
            ("\"base_version\": \"000001\",", "", "base_version is missing"),
            ("\"version\"", "\"version\": \"000001\", \"version\"", "`version` is there twice"),
        ] {
            let error = parse(&DELTA.replace(from, to)).unwrap_err();
            assert!(error.contains(words), "{error}");
        }
    }
}
