//! Options of a view, and the names that it never turns into virtual files.

use glob::{MatchOptions, Pattern};

use crate::checkpoint::{self, ParseOptions};

/// How a view is made.
#[derive(Clone, Debug, Default)]
pub struct ViewOptions {
    /// How checkpoints are parsed.
    pub parse: ParseOptions,
    /// Show the originals beside their virtual files.
    pub show_originals: bool,
    /// Names that never become a virtual file.
    pub keep: KeepRules,
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
