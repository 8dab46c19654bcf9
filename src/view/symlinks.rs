//! What a symbolic link is shown as.
//!
//! A link that works inside the view stays a link. One that would come out elsewhere than in its source is shown as its
//! target. Such a link leads out of what is shown, or to an original that a virtual file replaces. One that leads out
//! of the root is a link that cannot be followed.

use std::ffi::OsStr;
use std::path::{Component, Path, PathBuf};

use crate::source::{FileKind, FileMetadata, LinkPolicy, SourceError};

use super::directory_store::DirectoryStore;
use super::entry::ViewEntry;
use super::relative_path::relative_path;

/// What a link in a directory is shown as; `None` if it is no longer there.
pub fn link_entry(
    store: &DirectoryStore,
    directory: &Path,
    name: &OsStr,
    link: FileMetadata,
) -> Option<ViewEntry> {
    let context = &store.context;
    let root = &context.root;
    let path = directory.join(name);
    let target = match root.link_target(&path) {
        Ok(target) => target,
        // A mount of ours says so of a link that leads out of what it shows.
        Err(SourceError::Io { source, .. })
            if source.kind() == std::io::ErrorKind::PermissionDenied =>
        {
            return Some(ViewEntry::Link(link, None));
        }
        Err(_) => return None,
    };
    let leads_to = |target| Some(link_with_target(link, target));
    // Cached metadata will do: what counts is where the link leads.
    let found = match root.cached_metadata(&path) {
        Ok(found) => Some(found),
        Err(SourceError::OutsideRoot { .. }) => return Some(ViewEntry::Link(link, None)),
        // It leads nowhere, here as there.
        Err(_) => None,
    };
    let Some(destination) = root.resolve_by_name(&path) else {
        // The options allow targets outside; an absolute one is the same from everywhere.
        let is_inside_only = context.options.parse.link_policy() == LinkPolicy::Inside;
        return match found {
            Some(found) if target.is_relative() || is_inside_only => {
                Some(destination_entry(store, directory, &path, link, found))
            }
            _ => leads_to(target),
        };
    };
    let end = &destination.path;
    match found {
        Some(found) if !is_shown_as_is(store, end, &found) => {
            return Some(destination_entry(store, directory, &path, link, found));
        }
        Some(_) if leads_to_same_end(store, directory, &target, end) => return leads_to(target),
        None if target.is_relative() || !end.starts_with(&context.base) => return leads_to(target),
        _ => {}
    }
    // The absolute target would lead to the source itself, another relative one astray.
    leads_to(relative_path(directory, end))
}

/// A link with the size of its target, as everywhere.
fn link_with_target(mut link: FileMetadata, target: PathBuf) -> ViewEntry {
    link.size = target.as_os_str().len() as u64;
    ViewEntry::Link(link, Some(target))
}

/// What a link leads to, in the link's place. A link to a directory that it is in stays a link, since a walk
/// of the view would never end otherwise.
fn destination_entry(
    store: &DirectoryStore,
    directory: &Path,
    path: &Path,
    link: FileMetadata,
    found: FileMetadata,
) -> ViewEntry {
    let root = &store.context.root;
    if found.kind == FileKind::Directory {
        let is_found = |above: &&Path| {
            let above = root.metadata(above);
            above.is_ok_and(|above| (above.dev, above.ino) == (found.dev, found.ino))
        };
        let mut above =
            directory.ancestors().take_while(|above| above.starts_with(&store.context.base));
        if let Some(above) = above.find(is_found) {
            return link_with_target(link, relative_path(directory, above));
        }
    }
    ViewEntry::Source(match found.kind {
        // Another filesystem may hang, so it is not asked.
        FileKind::Directory if found.dev != link.dev => found,
        FileKind::Directory => store.with_change_time(path, found),
        _ => root.metadata(path).unwrap_or(found),
    })
}

/// Whether the view shows, as it is, what lies at a path from the root that passes no link.
fn is_shown_as_is(store: &DirectoryStore, path: &Path, found: &FileMetadata) -> bool {
    if !path.starts_with(&store.context.base) {
        return false;
    }
    if found.kind == FileKind::Directory {
        return store.context.target.is_none();
    }
    is_name_shown(store, path)
}

fn is_name_shown(store: &DirectoryStore, path: &Path) -> bool {
    match (path.parent(), path.file_name()) {
        (Some(parent), Some(name)) => store.shows_as_is(parent, name),
        _ => false,
    }
}

/// Whether a relative target comes out at the same end inside the view as well. It must not step out of the view, nor
/// use a link that the view does not show.
fn leads_to_same_end(store: &DirectoryStore, directory: &Path, target: &Path, end: &Path) -> bool {
    let context = &store.context;
    let mut path = directory.to_path_buf();
    for part in target.components() {
        match part {
            Component::ParentDir if path == context.base || !path.pop() => return false,
            Component::ParentDir | Component::CurDir => {}
            Component::Normal(name) => path.push(name),
            Component::RootDir | Component::Prefix(_) => return false,
        }
    }
    let resolved = context.root.resolve_by_name(&path);
    resolved.is_some_and(|resolved| {
        resolved.path == end && resolved.links.iter().all(|link| is_name_shown(store, link))
    })
}

/// A link from a directory to a file or directory elsewhere in the view.
pub fn relative_link(directory: &Path, path: &Path, found: FileMetadata) -> ViewEntry {
    let mut link = found;
    (link.kind, link.mode, link.links) = (FileKind::Link, 0o777, 1);
    link_with_target(link, relative_path(directory, path))
}
