//! Paths in a recipe, from the root of a view.

use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};

/// The longest path that Linux opens.
const MAX_PATH_BYTES: usize = 4095;

/// The longest name that filesystems take.
const MAX_NAME_BYTES: usize = 255;

/// A path from the root of a view that does not lead out of it.
#[derive(Clone, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub struct RelativePath(String);

impl RelativePath {
    /// The path, empty for the root of the view.
    pub fn as_path(&self) -> &Path {
        Path::new(&self.0)
    }

    /// The path as text.
    pub fn as_str(&self) -> &str {
        &self.0
    }

    /// The name at its end.
    pub fn name(&self) -> &str {
        self.0.rsplit('/').next().unwrap_or_default()
    }

    /// The directory that it lies in.
    pub fn directory(&self) -> PathBuf {
        self.as_path().parent().map(Path::to_path_buf).unwrap_or_default()
    }
}

impl TryFrom<String> for RelativePath {
    type Error = String;

    fn try_from(text: String) -> Result<RelativePath, String> {
        if text == "." {
            return Ok(RelativePath(String::new()));
        }
        match find_fault(&text) {
            Some(fault) => Err(format!("the path `{}` {fault}", shortened(&text))),
            None => Ok(RelativePath(text)),
        }
    }
}

impl From<RelativePath> for String {
    fn from(path: RelativePath) -> String {
        if path.0.is_empty() { ".".to_owned() } else { path.0 }
    }
}

/// What is wrong with a path, and what to write instead.
fn find_fault(text: &str) -> Option<String> {
    if text.is_empty() {
        return Some("is empty: write a path from the mounted directory".to_owned());
    }
    if text.starts_with('/') {
        return Some(
            "is absolute: write it from the mounted directory, without / first".to_owned(),
        );
    }
    if text.contains(char::is_control) {
        return Some("has a control character".to_owned());
    }
    if text.split('/').any(|part| matches!(part, "." | "..")) {
        return Some("has . or .. in it: write a path without . or ..".to_owned());
    }
    if text.split('/').any(str::is_empty) {
        return Some("has an empty name between or after its slashes".to_owned());
    }
    if text.split('/').any(|part| part.len() > MAX_NAME_BYTES) {
        return Some(format!("has a name of more than {MAX_NAME_BYTES} bytes"));
    }
    (text.len() > MAX_PATH_BYTES).then(|| format!("is longer than {MAX_PATH_BYTES} bytes"))
}

/// The text with control characters escaped, cut where it is longer than a message should be.
fn shortened(text: &str) -> String {
    const MAX_SHOWN_CHARACTERS: usize = 200;
    let mut characters = text.chars();
    let shown: String = characters.by_ref().take(MAX_SHOWN_CHARACTERS).map(escaped).collect();
    if characters.next().is_some() { shown + "..." } else { shown }
}

fn escaped(c: char) -> String {
    if c.is_control() { c.escape_default().to_string() } else { c.to_string() }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_fault_of_a_path_is_named() {
        for (text, fault) in [
            ("", "is empty"),
            ("/a", "is absolute"),
            ("a/../b", ". or .."),
            ("./a", ". or .."),
            ("a//b", "an empty name"),
            ("a/", "an empty name"),
            ("a\nb", "`a\\nb` has a control character"),
            ("a\0b", "a control character"),
            (&"a".repeat(256), "more than 255 bytes"),
            (&"a/".repeat(2048).trim_end_matches('/').to_owned().repeat(2), "4095 bytes"),
        ] {
            let error = RelativePath::try_from(text.to_owned()).unwrap_err();
            assert!(error.contains(fault) && error.len() < 400, "{error}");
        }
        assert_eq!(RelativePath::try_from(".".to_owned()).unwrap().as_str(), "");
        assert_eq!(RelativePath::try_from("a/..b".to_owned()).unwrap().name(), "..b");
    }
}
