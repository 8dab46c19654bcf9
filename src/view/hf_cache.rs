//! Notes in the cache of a model hub about files that the view shows otherwise.
//!
//! `.no_exist/<revision>/NAME` notes that a file is absent, and loaders believe it although a virtual file of
//! that name now exists. `trees/<revision>.json` lists the originals, and a loader that misses one gives up.

use std::path::{Component, Path, PathBuf};

use crate::source::is_hub_repository;

/// The notes that a directory holds.
#[derive(Debug, PartialEq, Eq)]
pub enum HubNotes {
    /// Notes of absent files, one a file.
    Absent {
        /// The path of the revision's folder from the root.
        revision: PathBuf,
    },
    /// Lists of all files of each revision, as `<revision>.json`.
    Trees {
        /// The path of the revisions' folder from the root.
        revisions: PathBuf,
    },
}

/// The notes that the directory at a path from a root holds, if any.
pub fn find_hub_notes(root: &Path, path: &Path) -> Option<HubNotes> {
    let absolute = root.join(path);
    let is_repository = |folder: &&Path| folder.file_name().is_some_and(is_hub_repository);
    let repository = absolute.ancestors().skip(1).find(is_repository)?;
    let inside = absolute.strip_prefix(repository).ok()?;
    let revisions = repository.strip_prefix(root).ok()?.join("snapshots");
    let mut parts = inside.components().map(Component::as_os_str);
    match parts.next()?.to_str()? {
        ".no_exist" => {
            let rest: PathBuf = parts.collect();
            let revision = revisions.join(&rest);
            (!rest.as_os_str().is_empty()).then_some(HubNotes::Absent { revision })
        }
        "trees" if parts.next().is_none() => Some(HubNotes::Trees { revisions }),
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_folders_with_notes() {
        let absent = |path: &str| Some(HubNotes::Absent { revision: path.into() });
        let repository = "models--org--name";
        let root = Path::new("/hub");
        assert_eq!(
            find_hub_notes(root, &Path::new(repository).join(".no_exist/abc/unet")),
            absent("models--org--name/snapshots/abc/unet")
        );
        let inside = Path::new("/hub/models--org--name");
        assert_eq!(find_hub_notes(inside, Path::new(".no_exist/abc")), absent("snapshots/abc"));
        assert_eq!(
            find_hub_notes(inside, Path::new("trees")),
            Some(HubNotes::Trees { revisions: "snapshots".into() })
        );
        assert_eq!(find_hub_notes(inside, Path::new("snapshots/abc")), None);
        assert_eq!(find_hub_notes(inside, Path::new(".no_exist")), None);
        assert_eq!(find_hub_notes(Path::new("/models"), Path::new("trees")), None);
    }
}
