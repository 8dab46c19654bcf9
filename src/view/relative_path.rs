//! Targets of links as paths from their own directory.

use std::path::{Component, Path, PathBuf};

/// The path from a directory to another path, both from the root.
pub fn relative_path(from: &Path, to: &Path) -> PathBuf {
    let common = from.components().zip(to.components()).take_while(|(a, b)| a == b).count();
    let up = from.components().skip(common).map(|_| Component::ParentDir);
    let path: PathBuf = up.chain(to.components().skip(common)).collect();
    if path.as_os_str().is_empty() { PathBuf::from(".") } else { path }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_path_from_one_place_to_another() {
        let path = |from: &str, to: &str| relative_path(Path::new(from), Path::new(to));
        assert_eq!(path("a/b", "a/c/file"), Path::new("../c/file"));
        assert_eq!(path("", "file"), Path::new("file"));
        assert_eq!(path("a", "a"), Path::new("."));
        assert_eq!(path("a/b", ""), Path::new("../.."));
    }
}
