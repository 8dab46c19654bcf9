//! Options of a view, and the names that it never turns into virtual files.

use std::path::{Path, PathBuf};
use std::sync::Arc;

use glob::{MatchOptions, Pattern};

use crate::checkpoint::{self, ParseOptions};
use crate::recipe::{Recipe, RecipeError};

/// How a view is made.
#[derive(Clone, Debug, Default)]
pub struct ViewOptions {
    /// How checkpoints are parsed.
    pub parse: ParseOptions,
    /// Show the originals beside their virtual files.
    pub show_originals: bool,
    /// Names that never become a virtual file.
    pub keep: KeepRules,
    /// Files that are shown in addition to those of the source.
    pub recipe: Option<RecipeSource>,
}

/// Where a recipe comes from.
#[derive(Clone, Debug)]
pub enum RecipeSource {
    /// A file, which may change.
    File(PathBuf),
    /// The file `.ckptfs.toml` of the source, if it has one.
    Auto,
    /// A recipe that does not change.
    Fixed(Arc<Recipe>),
}

impl RecipeSource {
    /// Whether an option is a recipe itself, in JSON.
    pub fn is_json(option: &Path) -> bool {
        option.as_os_str().as_encoded_bytes().starts_with(b"{")
    }

    /// The source that an option names: `auto`, a file, or a recipe itself in JSON.
    pub fn from_option(option: &Path) -> Result<RecipeSource, RecipeError> {
        let text = option.as_os_str().as_encoded_bytes();
        if text == b"auto" {
            return Ok(RecipeSource::Auto);
        }
        if RecipeSource::is_json(option) {
            let recipe = Recipe::parse_json(text, Path::new("the recipe"))?;
            return Ok(RecipeSource::Fixed(Arc::new(recipe)));
        }
        // A daemon works in another directory.
        let absolute = std::path::absolute(option).unwrap_or_else(|_| option.to_path_buf());
        // An invalid recipe at the start is an error of the call.
        Recipe::read(&absolute)?;
        Ok(RecipeSource::File(absolute))
    }
}

/// Which names stay as they are: optimizer state and the like, always, and the user's patterns.
#[derive(Clone, Debug, Default)]
pub struct KeepRules {
    patterns: Vec<Pattern>,
}

/// A malformed pattern.
#[derive(Debug, thiserror::Error)]
#[error("`{pattern}` is not a pattern for names: {message}")]
pub struct KeepPatternError {
    pattern: String,
    message: &'static str,
}

/// Patterns match names, not paths, and distinguish case.
const MATCH_OPTIONS: MatchOptions = MatchOptions {
    case_sensitive: true,
    require_literal_separator: false,
    require_literal_leading_dot: false,
};

impl KeepRules {
    /// Rules for names that match any of these shell patterns, beside those always kept.
    pub fn new<S: AsRef<str>>(
        patterns: impl IntoIterator<Item = S>,
    ) -> Result<KeepRules, KeepPatternError> {
        let parse = |pattern: S| {
            let pattern = pattern.as_ref();
            Pattern::new(pattern).map_err(|error| KeepPatternError {
                pattern: pattern.to_owned(),
                message: error.msg,
            })
        };
        Ok(KeepRules { patterns: patterns.into_iter().map(parse).collect::<Result<_, _>>()? })
    }

    /// Whether a name stays as it is.
    pub fn matches(&self, name: &str) -> bool {
        checkpoint::is_training_file(name) || self.matching_pattern(name).is_some()
    }

    /// Why a name stays as it is, in words; `None` if no rule matches.
    pub fn reason(&self, name: &str) -> Option<String> {
        let (pattern, origin) = match checkpoint::training_pattern(name) {
            Some(pattern) => (pattern, "training state"),
            None => (self.matching_pattern(name)?.as_str(), "--keep"),
        };
        Some(format!("kept as it is: matches {pattern} ({origin})"))
    }

    fn matching_pattern(&self, name: &str) -> Option<&Pattern> {
        self.patterns.iter().find(|pattern| pattern.matches_with(name, MATCH_OPTIONS))
    }
}
