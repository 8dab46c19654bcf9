//! Sets fields of a model's configuration. Python writes `NaN` and `Infinity` into it, which JSON itself lacks.

use serde_json::{Map, Value};

/// The numbers of Python's JSON that are not valid elsewhere. A constant comes before one that it contains.
const CONSTANTS: [&str; 3] = ["-Infinity", "Infinity", "NaN"];

/// What a constant becomes a string with while the text is parsed.
const MARK: &str = "ckptfs constant ";

/// The text of a configuration with other fields, or what is wrong with it.
pub fn set_fields(text: &[u8], fields: &Map<String, Value>) -> Result<String, String> {
    let invalid = |error: &dyn std::fmt::Display| format!("is not valid JSON: {error}");
    let text = std::str::from_utf8(text).map_err(|error| invalid(&error))?;
    let quoted = if text.contains(MARK) { text.to_owned() } else { quote_constants(text) };
    let config: Value = serde_json::from_str(&quoted).map_err(|error| invalid(&error))?;
    let Value::Object(mut config) = config else { return Err("is no JSON object".to_owned()) };
    config.extend(fields.clone());
    let set = serde_json::to_string_pretty(&config).map_err(|error| invalid(&error))?;
    let unquote =
        |set: String, constant: &&str| set.replace(&format!("\"{MARK}{constant}\""), constant);
    Ok(if text.contains(MARK) { set } else { CONSTANTS.iter().fold(set, unquote) })
}

/// Makes strings of the constants outside of strings.
fn quote_constants(text: &str) -> String {
    let mut quoted = String::with_capacity(text.len());
    let (mut rest, mut is_in_string) = (text, false);
    while let Some(first) = rest.chars().next() {
        let constant =
            CONSTANTS.iter().find(|constant| !is_in_string && rest.starts_with(**constant));
        let len = match (constant, first) {
            (Some(constant), _) => {
                quoted.extend(["\"", MARK, constant, "\""]);
                rest = &rest[constant.len()..];
                continue;
            }
            // An escape has its own length, but the character behind the backslash ends no string.
            (None, '\\') if is_in_string => 1 + rest[1..].chars().next().map_or(0, char::len_utf8),
            (None, first) => {
                is_in_string ^= first == '"';
                first.len_utf8()
            }
        };
        quoted.push_str(&rest[..len]);
        rest = &rest[len..];
    }
    quoted
}

#[cfg(test)]
mod tests {
    use super::*;

    fn with_dtype(text: &str) -> Result<String, String> {
        let fields = Map::from_iter([("dtype".to_owned(), Value::from("bfloat16"))]);
        set_fields(text.as_bytes(), &fields)
            .map(|set| set.split_whitespace().collect::<Vec<_>>().join(""))
    }

    #[test]
    fn constants_of_python_are_kept() {
        let text = r#"{"dtype": "x", "limits": [0.0, Infinity, -Infinity], "n": NaN, "s": "NaN \" Infinity", "é\\": 1}"#;
        let set = with_dtype(text).unwrap();
        for part in [
            r#""dtype":"bfloat16""#,
            "[0.0,Infinity,-Infinity]",
            r#""n":NaN"#,
            r#""NaN\"Infinity""#,
            r#""é\\":1"#,
        ] {
            assert!(set.contains(part), "{part} in {set}");
        }
    }

    #[test]
    fn what_is_no_configuration_is_refused() {
        assert_eq!(with_dtype("[NaN]").unwrap_err(), "is no JSON object");
        for text in ["{", r#"{"a": Infinit}"#, r#"{"a": NaNNaN}"#, "\"\\", "", r#"{"a": -NaN}"#] {
            assert!(with_dtype(text).unwrap_err().starts_with("is not valid JSON: "), "{text}");
        }
        // Text that looks like ours stays as it is.
        let set = with_dtype(r#"{"a": "ckptfs constant NaN"}"#).unwrap();
        assert!(set.contains(r#""a":"ckptfsconstantNaN""#), "{set}");
    }
}
