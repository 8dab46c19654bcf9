//! Names that never become an image: training state, and what the user says.

use glob::{MatchOptions, Pattern};

use crate::checkpoint;

/// A pattern that is none.
#[derive(Debug, thiserror::Error)]
#[error("`{pattern}` is not a pattern for names: {why}")]
pub struct KeepPatternError {
    pattern: String,
    why: &'static str,
}

/// Which names are kept as they are: optimizer state and the like, always, and the user's patterns.
#[derive(Clone, Debug, Default)]
pub struct KeepRules {
    patterns: Vec<Pattern>,
}

/// Names, not paths, and as they are written.
const MATCH_OPTIONS: MatchOptions = MatchOptions {
    case_sensitive: true,
    require_literal_separator: false,
    require_literal_leading_dot: false,
};

impl KeepRules {
    /// The names that match any of these shell patterns, beside those always kept.
    pub fn new<S: AsRef<str>>(
        patterns: impl IntoIterator<Item = S>,
    ) -> Result<KeepRules, KeepPatternError> {
        let parse = |pattern: S| {
            let pattern = pattern.as_ref();
            Pattern::new(pattern)
                .map_err(|e| KeepPatternError { pattern: pattern.to_owned(), why: e.msg })
        };
        Ok(KeepRules { patterns: patterns.into_iter().map(parse).collect::<Result<_, _>>()? })
    }

    /// Whether a name stays as it is.
    pub fn matches(&self, name: &str) -> bool {
        checkpoint::is_training_file(name) || self.matching_pattern(name).is_some()
    }

    /// The same, in words.
    pub fn reason(&self, name: &str) -> Option<String> {
        let (pattern, whose) = match checkpoint::training_pattern(name) {
            Some(pattern) => (pattern, "what training leaves"),
            None => (self.matching_pattern(name)?.as_str(), "--keep"),
        };
        Some(format!("kept as it is: matches {pattern} ({whose})"))
    }

    fn matching_pattern(&self, name: &str) -> Option<&Pattern> {
        self.patterns.iter().find(|pattern| pattern.matches_with(name, MATCH_OPTIONS))
    }
}
