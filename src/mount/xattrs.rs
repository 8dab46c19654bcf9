//! What files of a mount say of themselves to programs that know ckptfs: where their bytes lie, and
//! how to see that they are the same.

use std::ffi::OsStr;

use crate::mount_info::{IDENTITY, LAYOUT, Options, SOURCE, Source, VERSION};

use super::Context;
use super::inodes::{Node, ROOT, What};
use super::stats::ATTRIBUTE as STATS;

/// Whoever asks for it makes a build for tests panic: what becomes of that is tested with it.
#[cfg(debug_assertions)]
const PANIC: &str = "user.ckptfs.panic";

/// The value of an attribute; nothing if there is none of that name.
pub fn value(context: &Context, number: u64, node: &Node, name: &OsStr) -> Option<Vec<u8>> {
    #[cfg(debug_assertions)]
    assert!(name != PANIC, "asked to");
    match (name.to_str()?, &node.what) {
        (STATS, _) if number == ROOT => Some((context.numbers)().to_json()),
        // What is made by the view lies nowhere.
        (_, What::Image(shown)) if shown.is_index() => None,
        (LAYOUT, What::Image(shown)) => Some(shown.layout().to_string().into_bytes()),
        (IDENTITY, What::Image(shown)) => Some(shown.identity().to_string().into_bytes()),
        (SOURCE, What::Image(_) | What::Source) => source(context, node),
        _ => None,
    }
}

fn source(context: &Context, node: &Node) -> Option<Vec<u8>> {
    let view = &context.view;
    let (way, image, options) = match &node.what {
        What::Image(shown) => (shown.source(), true, shown.options()),
        _ => (view.way(&node.path.to_path()), false, &view.options().checkpoint),
    };
    let source = Source {
        version: VERSION,
        source: context.source.to_string_lossy().into_owned().into(),
        // Another program could not find a path that is no text.
        path: way.to_str()?.into(),
        image,
        options: Options {
            root: options.root_key.clone(),
            allow_partial: options.allow_partial,
            follow_symlinks: options.follow_symlinks,
        },
        pid: std::process::id(),
        rootfd: std::os::fd::AsRawFd::as_raw_fd(&std::os::fd::AsFd::as_fd(&**view.root())),
    };
    serde_json::to_vec(&source).ok()
}
