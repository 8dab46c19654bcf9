//! The bounds of a recipe, checked before its patterns are compiled: that takes much longer than to read them.

use std::path::Path;

use serde::Deserialize;
use serde::de::IgnoredAny;
use toml::de::{DeTable, DeValue};

use super::error::RecipeError;

/// Maximum bytes of a recipe: a hundred times one that names each layer of a large model.
pub const MAX_RECIPE_BYTES: u64 = 1 << 20;

/// Maximum number of rules of a recipe: each is tried on every name.
pub const MAX_RULE_COUNT: usize = 1024;

/// Maximum number of files of a recipe.
const MAX_FILE_COUNT: usize = 1024;

/// Fails if a text is longer than a recipe may be.
pub fn check_length(text: &[u8], path: &Path) -> Result<(), RecipeError> {
    if text.len() as u64 > MAX_RECIPE_BYTES {
        let path = path.to_path_buf();
        return Err(RecipeError::TooLong { path, limit: MAX_RECIPE_BYTES });
    }
    Ok(())
}

/// The lists of a recipe in JSON, without what is in them.
#[derive(Deserialize)]
pub struct RecipeShape {
    #[serde(default)]
    file: Vec<FileShape>,
}

/// The lists of one file, or of steps by themselves.
#[derive(Default, Deserialize)]
#[serde(default)]
pub struct FileShape {
    only: ListShape,
    drop: ListShape,
    rename: ListShape,
    slice: ListShape,
    split: ListShape,
    stack: ListShape,
    cast: ListShape,
    beside: ListShape,
}

/// A list, or a value that is refused later.
#[derive(Deserialize)]
#[serde(untagged)]
enum ListShape {
    List(Vec<IgnoredAny>),
    Other(IgnoredAny),
}

impl Default for ListShape {
    fn default() -> ListShape {
        ListShape::List(Vec::new())
    }
}

impl ListShape {
    fn len(&self) -> usize {
        match self {
            ListShape::List(values) => values.len(),
            ListShape::Other(_) => 0,
        }
    }
}

impl FileShape {
    fn rule_count(&self) -> usize {
        let FileShape { only, drop, rename, slice, split, stack, cast, beside } = self;
        [only, drop, rename, slice, split, stack, cast, beside].map(ListShape::len).iter().sum()
    }

    /// Fails if there are too many rules.
    pub fn check(&self) -> Result<(), String> {
        check_counts(1, self.rule_count())
    }
}

impl RecipeShape {
    /// Fails if the recipe has too many files, or too many rules in all.
    pub fn check(&self) -> Result<(), String> {
        check_counts(self.file.len(), self.file.iter().map(FileShape::rule_count).sum())
    }
}

fn check_counts(files: usize, rules: usize) -> Result<(), String> {
    if files > MAX_FILE_COUNT {
        return Err(format!("more than {MAX_FILE_COUNT} files"));
    }
    match rules > MAX_RULE_COUNT {
        true => Err(format!("more than {MAX_RULE_COUNT} rules")),
        false => Ok(()),
    }
}

/// The keys of a file whose lists are rules.
const RULE_KEYS: [&str; 8] =
    ["only", "drop", "rename", "slice", "split", "stack", "cast", "beside"];

/// Fails if a recipe in TOML has too many files or rules, or a value of `config` that JSON cannot have.
pub fn check_toml_shape(table: &DeTable<'_>) -> Result<(), String> {
    let Some(DeValue::Array(files)) = find(table, "file") else { return Ok(()) };
    let tables = files.iter().filter_map(|file| match file.get_ref() {
        DeValue::Table(file) => Some(file),
        _ => None,
    });
    let rules_of = |file: &DeTable<'_>| -> usize {
        let lists = RULE_KEYS.iter().filter_map(|key| match find(file, key) {
            Some(DeValue::Array(rules)) => Some(rules.len()),
            _ => None,
        });
        lists.sum()
    };
    check_counts(files.len(), tables.clone().map(rules_of).sum())?;
    match tables.filter_map(|file| find(file, "config")).find_map(find_outside_json) {
        Some(value) => Err(format!("`config` has {value}, which JSON has not")),
        None => Ok(()),
    }
}

fn find<'t, 'i>(table: &'t DeTable<'i>, key: &str) -> Option<&'t DeValue<'i>> {
    table.get(key).map(|value| value.get_ref())
}

/// What a value has that JSON cannot have, if anything.
fn find_outside_json(value: &DeValue<'_>) -> Option<&'static str> {
    match value {
        DeValue::Datetime(_) => Some("a date"),
        DeValue::Float(number) => {
            let text = number.as_str().trim_start_matches(['+', '-']);
            matches!(text, "inf" | "nan").then_some("inf or nan")
        }
        DeValue::Array(values) => {
            values.iter().find_map(|value| find_outside_json(value.get_ref()))
        }
        DeValue::Table(table) => {
            table.values().find_map(|value| find_outside_json(value.get_ref()))
        }
        _ => None,
    }
}
