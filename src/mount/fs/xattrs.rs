//! What files of a mount say of themselves to programs that know ckptfs: where their bytes lie, and
//! how to see that they are the same.

use std::ffi::OsStr;

use crate::mount_info::{
    IDENTITY_XATTR, LAYOUT_XATTR, RecordedOptions, SOURCE_FORMAT_VERSION, SOURCE_XATTR,
    SourceAttribute,
};

use super::inodes::{Inode, InodeKind, ROOT};
use crate::mount::MountContext;
use crate::mount::stats::STATS_ATTRIBUTE as STATS;

/// Whoever asks for it makes a build for tests panic: what becomes of that is tested with it.
#[cfg(debug_assertions)]
const PANIC_ATTRIBUTE: &str = "user.ckptfs.panic";

/// The value of an attribute; nothing if there is none of that name.
pub fn value(context: &MountContext, number: u64, node: &Inode, name: &OsStr) -> Option<Vec<u8>> {
    #[cfg(debug_assertions)]
    assert!(name != PANIC_ATTRIBUTE, "asked to");
    match (name.to_str()?, &node.kind) {
        (STATS, _) if number == ROOT => Some((context.stats)().to_json()),
        // What is made by the view lies nowhere.
        (_, InodeKind::VirtualFile(shown)) if shown.is_index() => None,
        (LAYOUT_XATTR, InodeKind::VirtualFile(shown)) => {
            Some(shown.layout_hash().to_string().into_bytes())
        }
        (IDENTITY_XATTR, InodeKind::VirtualFile(shown)) => {
            Some(shown.identity().to_string().into_bytes())
        }
        (SOURCE_XATTR, InodeKind::VirtualFile(_) | InodeKind::Source) => source_json(context, node),
        _ => None,
    }
}

fn source_json(context: &MountContext, node: &Inode) -> Option<Vec<u8>> {
    let view = &context.view;
    let (way, is_virtual_file, options) = match &node.kind {
        InodeKind::VirtualFile(shown) => (shown.source(), true, shown.options()),
        _ => (view.source_path(&node.path.to_path()), false, &view.options().parse),
    };
    let source = SourceAttribute {
        version: SOURCE_FORMAT_VERSION,
        source: context.source.to_string_lossy().into_owned().into(),
        // Another program could not find a path that is no text.
        path: way.to_str()?.into(),
        is_virtual_file,
        options: RecordedOptions {
            root: options.root_key.clone(),
            allow_partial: options.allow_partial,
            follow_symlinks: options.follow_symlinks,
        },
        pid: std::process::id(),
        rootfd: std::os::fd::AsRawFd::as_raw_fd(&std::os::fd::AsFd::as_fd(&**view.root())),
    };
    serde_json::to_vec(&source).ok()
}
