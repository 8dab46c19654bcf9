//! The bounds of a recipe, checked before its patterns are compiled: that takes much longer than to read them.

use serde::Deserialize;
use serde::de::IgnoredAny;

use super::transform::MAX_RULE_COUNT;

/// Maximum number of files of a recipe.
const MAX_FILE_COUNT: usize = 1024;

/// The lists of a recipe, without what is in them.
#[derive(Deserialize)]
pub struct RecipeShape {
    #[serde(default)]
    file: Vec<FileShape>,
}

#[derive(Default, Deserialize)]
#[serde(default)]
struct FileShape {
    only: Vec<IgnoredAny>,
    drop: Vec<IgnoredAny>,
    rename: Vec<IgnoredAny>,
    slice: Vec<IgnoredAny>,
    split: Vec<IgnoredAny>,
    stack: Vec<IgnoredAny>,
    cast: Vec<IgnoredAny>,
    beside: Vec<IgnoredAny>,
}

impl RecipeShape {
    /// Fails if the recipe has too many files, or too many rules in all.
    pub fn check(&self) -> Result<(), String> {
        if self.file.len() > MAX_FILE_COUNT {
            return Err(format!("more than {MAX_FILE_COUNT} files"));
        }
        let rules = self.file.iter().flat_map(|file| {
            let FileShape { only, drop, rename, slice, split, stack, cast, beside } = file;
            [only, drop, rename, slice, split, stack, cast, beside].map(Vec::len)
        });
        match rules.sum::<usize>() > MAX_RULE_COUNT {
            true => Err(format!("more than {MAX_RULE_COUNT} rules")),
            false => Ok(()),
        }
    }
}

/// The value in the `config` of a file that JSON cannot have, if there is one.
pub fn find_value_outside_json(toml: &toml::Table) -> Option<&'static str> {
    let files = toml.get("file")?.as_array()?;
    files.iter().filter_map(|file| file.get("config")).find_map(find_in_value)
}

fn find_in_value(value: &toml::Value) -> Option<&'static str> {
    match value {
        toml::Value::Datetime(_) => Some("a date"),
        toml::Value::Float(number) if !number.is_finite() => Some("inf or nan"),
        toml::Value::Array(values) => values.iter().find_map(find_in_value),
        toml::Value::Table(table) => table.values().find_map(find_in_value),
        _ => None,
    }
}
