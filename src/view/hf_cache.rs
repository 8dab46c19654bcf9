//! The cache of a model hub: what its own notes say of files that the view shows otherwise.
//!
//! `.no_exist/<revision>/NAME` notes that a file is not there, and loaders believe it although an
//! image now is. `trees/<revision>.json` lists the originals, and a loader that misses one gives up.

use std::path::{Component, Path, PathBuf};

use crate::source::is_hub_repository;

/// A directory that holds notes.
#[derive(Debug, PartialEq, Eq)]
pub enum HubNotes {
    /// Of files that are not there: in the folder of a revision.
    Absent {
        /// The way to that folder.
        revision: PathBuf,
    },
    /// Of all files of each revision, as `<revision>.json`.
    Trees {
        /// The way to the folder of the revisions.
        revisions: PathBuf,
    },
}

/// What notes the directory at a way from a root holds, if any.
pub fn find_hub_notes(root: &Path, way: &Path) -> Option<HubNotes> {
    let whole = root.join(way);
    let repository = whole
        .ancestors()
        .skip(1)
        .find(|folder| folder.file_name().is_some_and(is_hub_repository))?;
    let inside = whole.strip_prefix(repository).ok()?;
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
        let absent = |way: &str| Some(HubNotes::Absent { revision: way.into() });
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
