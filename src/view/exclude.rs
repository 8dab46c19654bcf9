//! Names that never become an image: training state, and what the user says.

use glob::{MatchOptions, Pattern};

use crate::checkpoint;

/// A pattern that is none.
#[derive(Debug, thiserror::Error)]
#[error("`{pattern}` is not a pattern for names: {why}")]
pub struct KeepError {
    pattern: String,
    why: &'static str,
}

/// Which names are kept as they are: optimizer state and the like, always, and the user's patterns.
#[derive(Clone, Debug, Default)]
pub struct Keep {
    patterns: Vec<Pattern>,
}

/// Names, not paths, and as they are written.
const MATCHING: MatchOptions = MatchOptions {
    case_sensitive: true,
    require_literal_separator: false,
    require_literal_leading_dot: false,
};

impl Keep {
    /// The names that match any of these shell patterns, beside those always kept.
    pub fn new<S: AsRef<str>>(patterns: impl IntoIterator<Item = S>) -> Result<Keep, KeepError> {
        let parse = |pattern: S| {
            let pattern = pattern.as_ref();
            Pattern::new(pattern).map_err(|e| KeepError { pattern: pattern.to_owned(), why: e.msg })
        };
        Ok(Keep { patterns: patterns.into_iter().map(parse).collect::<Result<_, _>>()? })
    }

    /// Whether a name stays as it is.
    pub fn keeps(&self, name: &str) -> bool {
        checkpoint::is_kept(name) || self.pattern(name).is_some()
    }

    /// The same, in words.
    pub fn why(&self, name: &str) -> Option<String> {
        let (pattern, whose) = match checkpoint::kept_by(name) {
            Some(pattern) => (pattern, "what training leaves"),
            None => (self.pattern(name)?.as_str(), "--keep"),
        };
        Some(format!("kept as it is: matches {pattern} ({whose})"))
    }

    fn pattern(&self, name: &str) -> Option<&Pattern> {
        self.patterns.iter().find(|pattern| pattern.matches_with(name, MATCHING))
    }
}
