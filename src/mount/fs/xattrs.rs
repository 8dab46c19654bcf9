//! Extended attributes by which a mounted file tells where its bytes lie, and what identifies them.

use std::ffi::OsStr;
use std::os::fd::AsRawFd;
use std::path::Path;
#[cfg(debug_assertions)]
use std::sync::atomic::Ordering;

use crate::checkpoint::ParseOptions;
use crate::mount::stats::STATS_ATTRIBUTE;
use crate::mount_info::{
    IDENTITY_XATTR, LAYOUT_XATTR, MAX_XATTR_BYTES, RecordedOptions, SOURCE_FORMAT_VERSION,
    SOURCE_XATTR, SourceAttribute,
};
use crate::source::shown_path;

use super::inodes::{Inode, InodeKind, ROOT};
#[cfg(debug_assertions)]
use super::outcomes::PANICS_ON_READ;
use super::state::FilesystemState;

/// Reading this attribute makes a debug build panic, which tests use.
#[cfg(debug_assertions)]
const PANIC_ATTRIBUTE: &str = "user.ckptfs.panic";

/// Reading this attribute makes the next read of a debug build panic.
#[cfg(debug_assertions)]
const READ_PANIC_ATTRIBUTE: &str = "user.ckptfs.panic-on-read";

/// The value of an attribute; `None` if the inode has none of that name.
pub fn value(state: &FilesystemState, number: u64, inode: &Inode, name: &OsStr) -> Option<Vec<u8>> {
    #[cfg(debug_assertions)]
    assert!(name != PANIC_ATTRIBUTE, "asked to");
    #[cfg(debug_assertions)]
    if name == READ_PANIC_ATTRIBUTE {
        PANICS_ON_READ.store(true, Ordering::Relaxed);
    }
    match (name.to_str()?, &inode.kind) {
        (STATS_ATTRIBUTE, _) if number == ROOT => Some(state.stats().to_json()),
        // An index or a configuration is written by the view: its bytes lie nowhere.
        (_, InodeKind::VirtualFile(shown)) if shown.is_written() => None,
        (LAYOUT_XATTR, InodeKind::VirtualFile(shown)) => {
            Some(shown.layout_hash().to_string().into_bytes())
        }
        (IDENTITY_XATTR, InodeKind::VirtualFile(shown)) => {
            Some(shown.identity().to_string().into_bytes())
        }
        (SOURCE_XATTR, InodeKind::VirtualFile(_) | InodeKind::Source) => source_json(state, inode),
        _ => None,
    }
}

/// The descriptor of a source that is not on this machine, and is found by its URL alone.
const NO_DESCRIPTOR: i32 = -1;

fn source_json(state: &FilesystemState, inode: &Inode) -> Option<Vec<u8>> {
    let view = &state.view;
    let (path, is_virtual_file, options, recipe) = match &inode.kind {
        InodeKind::VirtualFile(shown) => match shown.recipe() {
            Some(recipe) => {
                let text = String::from_utf8(recipe.to_json()).ok()?;
                (view.source_path(Path::new("")), true, shown.options(), Some(text))
            }
            None => (shown.source(), true, shown.options(), None),
        },
        _ => (view.source_path(&inode.path.to_path()), false, &view.options().parse, None),
    };
    let ParseOptions { root_key, allow_partial, follow_symlinks, ranks, delta_base } = options;
    let attribute = SourceAttribute {
        version: SOURCE_FORMAT_VERSION,
        source: state.about.source.to_string_lossy().into_owned().into(),
        // JSON cannot hold a path that is not UTF-8.
        path: path.to_str()?.into(),
        is_virtual_file,
        options: RecordedOptions {
            root: root_key.clone(),
            allow_partial: *allow_partial,
            follow_symlinks: *follow_symlinks,
            ranks: *ranks,
            delta_base: delta_base.as_deref().map(|base| shown_path(base).into_owned()),
        },
        pid: std::process::id(),
        rootfd: view.root().descriptor().map_or(NO_DESCRIPTOR, |fd| fd.as_raw_fd()),
        recipe,
    };
    // A recipe may be longer than an attribute: its file is then read through the mount.
    serde_json::to_vec(&attribute).ok().filter(|json| json.len() <= MAX_XATTR_BYTES)
}
