//! Sets fields of a model's configuration. Python writes `NaN` and `Infinity` into it, which JSON itself lacks.

use std::collections::BTreeSet;
use std::fmt::Display;
use std::ops::Range;

use serde_json::{Map, Value};

use crate::checkpoint::python_numbers;

/// Prefix of the strings that replace Python's numbers while the text is parsed.
const MARK: &str = "ckptfs number ";

/// The text of a configuration with other fields, or what is wrong with it.
pub fn set_fields(text: &[u8], fields: &Map<String, Value>) -> Result<String, String> {
    let invalid = |error: &dyn Display| format!("is not valid JSON: {error}");
    let text = std::str::from_utf8(text).map_err(|error| invalid(&error))?;
    // A configuration that has the mark itself must be plain JSON.
    let mut numbers =
        if text.contains(MARK) { Vec::new() } else { python_numbers(text.as_bytes()) };
    // A number is no key.
    numbers.retain(|range| !text[range.end..].trim_start().starts_with(':'));
    let quoted = quote(text, &numbers);
    let config: Value = serde_json::from_str(&quoted).map_err(|error| invalid(&error))?;
    let Value::Object(mut config) = config else { return Err("is no JSON object".to_owned()) };
    config.extend(fields.clone());
    let set = serde_json::to_string_pretty(&config).map_err(|error| invalid(&error))?;
    let numbers: BTreeSet<&str> = numbers.into_iter().map(|range| &text[range]).collect();
    let unquote = |set: String, number| set.replace(&format!("\"{MARK}{number}\""), number);
    Ok(numbers.into_iter().fold(set, unquote))
}

/// Makes marked strings of these ranges of a text.
fn quote(text: &str, ranges: &[Range<usize>]) -> String {
    let (mut quoted, mut done) = (String::with_capacity(text.len()), 0);
    for range in ranges {
        quoted.extend([&text[done..range.start], "\"", MARK, &text[range.clone()], "\""]);
        done = range.end;
    }
    quoted + &text[done..]
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
    fn numbers_of_python_are_kept() {
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
        for text in
            ["{", r#"{"a": Infinit}"#, r#"{"a": NaNNaN}"#, "{NaN: 1}", "\"\\", "", r#"{"a": -NaN}"#]
        {
            assert!(with_dtype(text).unwrap_err().starts_with("is not valid JSON: "), "{text}");
        }
        // Text that looks like ours stays as it is.
        let set = with_dtype(r#"{"a": "ckptfs number NaN"}"#).unwrap();
        assert!(set.contains(r#""a":"ckptfsnumberNaN""#), "{set}");
    }
}
