//! Parses rules from options of the command line.

use super::name_glob::{GlobRule, NameGlob};
use super::steps::{CastRule, RenameRule};

/// An argument that is no rule.
#[derive(Debug, thiserror::Error)]
#[error("{0}")]
pub struct ArgumentError(String);

/// Parses a cast, `GLOB=DTYPE`, which is cut at the last `=`.
pub fn cast_argument(text: &str) -> Result<CastRule, ArgumentError> {
    let (glob, to) = cut(text, "GLOB=DTYPE")?;
    CastRule::new(glob, to, false).map_err(ArgumentError)
}

/// Parses a rename, `REGEX=TO`, which is cut at the last `=`.
pub fn rename_argument(text: &str) -> Result<RenameRule, ArgumentError> {
    let (pattern, to) = cut(text, "REGEX=TO")?;
    RenameRule::new(pattern, to, false).map_err(ArgumentError)
}

/// Parses a glob, which must match a name.
pub fn glob_argument(text: &str) -> Result<GlobRule, ArgumentError> {
    let tensors = NameGlob::try_from(text.to_owned()).map_err(ArgumentError)?;
    Ok(GlobRule { tensors, optional: false })
}

fn cut<'a>(text: &'a str, form: &str) -> Result<(&'a str, &'a str), ArgumentError> {
    text.rsplit_once('=').ok_or_else(|| ArgumentError(format!("`{text}` has no `=`: write {form}")))
}
