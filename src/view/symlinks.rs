//! What a symbolic link is shown as.
//!
//! A link that works inside the view stays a link. One that would come out elsewhere than in its
//! source, because it leads out of what is shown or to an original that an image replaces, is shown as
//! what it leads to. One that leads out of the root is a link that cannot be followed.

use std::ffi::OsStr;
use std::path::{Component, Path, PathBuf};

use crate::source::{self, FileKind, FileMetadata, LinkPolicy};

use super::{View, ViewEntry};

/// What a link in a directory is shown as; nothing if it is no longer there.
pub fn link_entry(view: &View, way: &Path, name: &OsStr, link: FileMetadata) -> Option<ViewEntry> {
    let root = &view.root;
    let path = way.join(name);
    let target = match root.link_target(&path) {
        Ok(target) => target,
        // So says a mount of ours of a link that leads out of what it shows.
        Err(source::SourceError::Io { source, .. })
            if source.kind() == std::io::ErrorKind::PermissionDenied =>
        {
            return Some(ViewEntry::Link(link, None));
        }
        Err(_) => return None,
    };
    let leads_to = |target| Some(link_with_target(link, target));
    // Where it leads is what counts; nobody is waited for to say more.
    let found = match root.cached_metadata(&path) {
        Ok(found) => Some(found),
        Err(source::SourceError::OutsideRoot { .. }) => return Some(ViewEntry::Link(link, None)),
        // It leads nowhere, here as there.
        Err(_) => None,
    };
    let Some(destination) = root.resolve_by_name(&path) else {
        // Anywhere outside, which the user allows; an absolute name is the same from everywhere.
        return match found {
            Some(found) if target.is_relative() || view.link_policy() == LinkPolicy::Inside => {
                Some(destination_entry(view, way, &path, link, found))
            }
            _ => leads_to(target),
        };
    };
    let end = &destination.path;
    match found {
        Some(found) if !is_shown_as_is(view, end, &found) => {
            return Some(destination_entry(view, way, &path, link, found));
        }
        Some(_) if leads_to_same_end(view, way, &target, end) => return leads_to(target),
        None if target.is_relative() || !end.starts_with(&view.base) => return leads_to(target),
        _ => {}
    }
    // An absolute name would lead to the source itself, another relative one astray.
    leads_to(relative_path(way, end))
}

/// A link whose size is that of what it says, as everywhere.
fn link_with_target(mut link: FileMetadata, target: PathBuf) -> ViewEntry {
    link.size = target.as_os_str().len() as u64;
    ViewEntry::Link(link, Some(target))
}

/// What a link leads to, in the link's place. A directory that the link is in stays a link: there
/// must be no end to nothing.
fn destination_entry(
    view: &View,
    way: &Path,
    path: &Path,
    link: FileMetadata,
    found: FileMetadata,
) -> ViewEntry {
    if found.kind == FileKind::Directory {
        let is_it = |above: &&Path| {
            let above = view.root.metadata(above);
            above.is_ok_and(|above| (above.dev, above.ino) == (found.dev, found.ino))
        };
        let mut above = way.ancestors().take_while(|above| above.starts_with(&view.base));
        if let Some(above) = above.find(is_it) {
            return link_with_target(link, relative_path(way, above));
        }
    }
    ViewEntry::Source(match found.kind {
        // Another filesystem is not waited for.
        FileKind::Directory if found.dev != link.dev => found,
        FileKind::Directory => view.with_change_time(path, found),
        _ => view.root.metadata(path).unwrap_or(found),
    })
}

/// Whether the view shows, as it is, what lies at a way from the root that passes no link.
fn is_shown_as_is(view: &View, way: &Path, found: &FileMetadata) -> bool {
    if !way.starts_with(&view.base) {
        return false;
    }
    match (way.parent(), way.file_name()) {
        _ if found.kind == FileKind::Directory => view.target.is_none(),
        (Some(parent), Some(name)) => view.shows_as_is(parent, name).unwrap_or(false),
        _ => false,
    }
}

/// Whether a relative target comes out there inside the view as well: without a step out of it, and
/// by no link that the view does not show.
fn leads_to_same_end(view: &View, way: &Path, target: &Path, end: &Path) -> bool {
    let mut place = way.to_path_buf();
    for part in target.components() {
        match part {
            Component::ParentDir if place == view.base || !place.pop() => return false,
            Component::ParentDir | Component::CurDir => {}
            Component::Normal(name) => place.push(name),
            Component::RootDir | Component::Prefix(_) => return false,
        }
    }
    let is_shown = |link: &PathBuf| match (link.parent(), link.file_name()) {
        (Some(parent), Some(name)) => view.shows_as_is(parent, name).unwrap_or(false),
        _ => false,
    };
    view.root
        .resolve_by_name(&place)
        .is_some_and(|there| there.path == end && there.links.iter().all(is_shown))
}

/// The way from one directory to a place, both from the root.
fn relative_path(from: &Path, to: &Path) -> PathBuf {
    let common = from.components().zip(to.components()).take_while(|(a, b)| a == b).count();
    let up = from.components().skip(common).map(|_| Component::ParentDir);
    let way: PathBuf = up.chain(to.components().skip(common)).collect();
    if way.as_os_str().is_empty() { PathBuf::from(".") } else { way }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_way_from_here_to_there() {
        let way = |from: &str, to: &str| relative_path(Path::new(from), Path::new(to));
        assert_eq!(way("a/b", "a/c/file"), Path::new("../c/file"));
        assert_eq!(way("", "file"), Path::new("file"));
        assert_eq!(way("a", "a"), Path::new("."));
        assert_eq!(way("a/b", ""), Path::new("../.."));
    }
}
