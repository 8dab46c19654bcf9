//! JSON parsing that headers and indexes share.

use std::borrow::Cow;
use std::collections::BTreeMap;
use std::fmt;
use std::marker::PhantomData;
use std::ops::Range;

use serde::de::{self, Deserialize, Deserializer, MapAccess, SeqAccess, Visitor};

/// Text borrowed from the JSON; a copy only if the JSON has escapes.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct JsonText<'a>(pub Cow<'a, str>);

impl<'de: 'a, 'a> Deserialize<'de> for JsonText<'a> {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        deserializer.deserialize_str(JsonTextVisitor(PhantomData))
    }
}

struct JsonTextVisitor<'a>(PhantomData<&'a str>);

impl<'de: 'a, 'a> Visitor<'de> for JsonTextVisitor<'a> {
    type Value = JsonText<'a>;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("text")
    }

    fn visit_borrowed_str<E: de::Error>(self, text: &'de str) -> Result<JsonText<'a>, E> {
        Ok(JsonText(Cow::Borrowed(text)))
    }

    fn visit_str<E: de::Error>(self, text: &str) -> Result<JsonText<'a>, E> {
        Ok(JsonText(Cow::Owned(text.to_owned())))
    }
}

/// A JSON object without duplicate keys.
pub struct UniqueMap<V>(pub BTreeMap<String, V>);

impl<'de, V: Deserialize<'de>> Deserialize<'de> for UniqueMap<V> {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        deserializer.deserialize_map(UniqueMapVisitor(PhantomData))
    }
}

struct UniqueMapVisitor<V>(PhantomData<V>);

impl<'de, V: Deserialize<'de>> Visitor<'de> for UniqueMapVisitor<V> {
    type Value = UniqueMap<V>;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("an object of text values")
    }

    fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<UniqueMap<V>, A::Error> {
        let mut entries = BTreeMap::new();
        while let Some(key) = map.next_key::<String>()? {
            if entries.contains_key(&key) {
                return Err(de::Error::custom(duplicate_key(&key)));
            }
            entries.insert(key, map.next_value()?);
        }
        Ok(UniqueMap(entries))
    }
}

/// A value that is parsed and dropped: its numbers, escapes and nesting must be valid. [`de::IgnoredAny`] skips a
/// value instead, at any depth.
pub struct CheckedAny;

impl<'de> Deserialize<'de> for CheckedAny {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        deserializer.deserialize_any(CheckedAnyVisitor)
    }
}

struct CheckedAnyVisitor;

impl<'de> Visitor<'de> for CheckedAnyVisitor {
    type Value = CheckedAny;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("any value")
    }

    fn visit_unit<E: de::Error>(self) -> Result<CheckedAny, E> {
        Ok(CheckedAny)
    }

    fn visit_bool<E: de::Error>(self, _: bool) -> Result<CheckedAny, E> {
        Ok(CheckedAny)
    }

    fn visit_i64<E: de::Error>(self, _: i64) -> Result<CheckedAny, E> {
        Ok(CheckedAny)
    }

    fn visit_u64<E: de::Error>(self, _: u64) -> Result<CheckedAny, E> {
        Ok(CheckedAny)
    }

    fn visit_f64<E: de::Error>(self, _: f64) -> Result<CheckedAny, E> {
        Ok(CheckedAny)
    }

    fn visit_str<E: de::Error>(self, _: &str) -> Result<CheckedAny, E> {
        Ok(CheckedAny)
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut seq: A) -> Result<CheckedAny, A::Error> {
        while let Some(CheckedAny) = seq.next_element()? {}
        Ok(CheckedAny)
    }

    fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<CheckedAny, A::Error> {
        while let Some((JsonText(_), CheckedAny)) = map.next_entry()? {}
        Ok(CheckedAny)
    }
}

/// Numbers that Python's `json` reads and writes, although JSON lacks them.
const PYTHON_NUMBERS: [&[u8]; 3] = [b"-Infinity", b"Infinity", b"NaN"];

/// Ranges of `NaN` and `Infinity` outside of strings.
pub fn python_numbers(json: &[u8]) -> Vec<Range<usize>> {
    let (mut found, mut at) = (Vec::new(), 0);
    while let Some(&byte) = json.get(at) {
        let rest = &json[at..];
        at += match byte {
            b'"' => string_len(rest),
            b'-' | b'I' | b'N' => {
                match PYTHON_NUMBERS.iter().find(|number| rest.starts_with(number)) {
                    Some(number) => {
                        found.push(at..at + number.len());
                        number.len()
                    }
                    None => 1,
                }
            }
            _ => 1,
        };
    }
    found
}

/// Replaces each of Python's own numbers by a zero between spaces, so that it joins no other token.
pub fn replace_python_numbers(json: &mut [u8]) {
    for range in python_numbers(json) {
        let number = &mut json[range];
        number.fill(b' ');
        number[1] = b'0';
    }
}

/// The length of the string at the start, with its quotes; the length of the JSON if the string does not end.
fn string_len(json: &[u8]) -> usize {
    let mut at = 1;
    while let Some(&byte) = json.get(at) {
        at += match byte {
            b'"' => return at + 1,
            b'\\' => 2,
            _ => 1,
        };
    }
    json.len()
}

/// The message that refuses a duplicate key.
pub fn duplicate_key(key: &str) -> String {
    format!("key `{key}` is there twice")
}

#[cfg(test)]
mod tests {
    use super::*;

    fn replaced(json: &str) -> String {
        let mut json = json.as_bytes().to_vec();
        replace_python_numbers(&mut json);
        String::from_utf8(json).unwrap()
    }

    #[test]
    fn pythons_numbers_become_zeros() {
        assert_eq!(replaced("[NaN,-Infinity , Infinity]"), "[ 0 , 0        ,  0      ]");
        assert_eq!(replaced(r#"{"NaN":"a\\\"NaN","b":NaN}"#), r#"{"NaN":"a\\\"NaN","b": 0 }"#);
        for same in ["", "\"", "\"\\", "\"NaN", "nan", "Na", "-Inf", "[-1, 2]"] {
            assert_eq!(replaced(same), same);
        }
    }

    #[test]
    fn what_python_refuses_stays_refused() {
        for json in ["-NaN", "--Infinity", "1NaN", "NaN1", "NaNNaN", "Infinity-Infinity", "{NaN:1}"]
        {
            assert!(serde_json::from_str::<de::IgnoredAny>(&replaced(json)).is_err(), "{json}");
        }
    }
}
