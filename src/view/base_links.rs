//! The files beside the base of a delta, such as its config and tokenizer. The folder of the delta shows them as links.

use std::collections::BTreeMap;
use std::ffi::{OsStr, OsString};
use std::path::{Path, PathBuf};
use std::sync::Arc;

use crate::checkpoint::{
    CHECKPOINT_EXTENSIONS, Candidate, CandidateFiles, unsharded_name_of_index,
};
use crate::source::{FileKind, FileMetadata, Root, absolute_path, is_directory, is_source_url};

use super::context::ViewContext;
use super::names::SortedNames;
use super::relative_path::relative_path;

/// Links by their names: the metadata of each, and its target.
pub type BaseLinks = BTreeMap<OsString, (FileMetadata, PathBuf)>;

/// The links of a directory with these names and candidates.
pub fn find_base_links<'a>(
    context: &ViewContext,
    directory: &Path,
    names: &SortedNames,
    mut candidates: impl Iterator<Item = &'a Candidate>,
) -> BaseLinks {
    let base = candidates.find_map(|candidate| match &candidate.files {
        CandidateFiles::Delta { base, .. } => base.as_ref(),
        _ => None,
    });
    let Some(base) = base else { return BaseLinks::new() };
    let named = context.options.parse.delta_base.as_deref().filter(|_| base.version == 0);
    // A mount may lie over the root: opened by its path, its daemon would ask itself.
    let folder = match named {
        Some(named) => context.root.path_inside(named),
        None => Some(&*base.folder),
    };
    let mut links = match (folder, named) {
        (Some(folder), _) if folder.starts_with(&context.base) && context.target.is_none() => {
            links_to(&context.root, folder, |path| relative_path(directory, path))
        }
        (None, Some(named)) => links_to_named_base(context, named),
        _ => BaseLinks::new(),
    };
    links.retain(|name, _| names.find(name).is_err());
    links
}

/// Links to the files of the base that the user named, wherever it lies on this machine.
fn links_to_named_base(context: &ViewContext, base: &Path) -> BaseLinks {
    if is_source_url(base) || !is_directory(base).unwrap_or(false) {
        return BaseLinks::new();
    }
    let links = context.options.parse.link_policy();
    let Ok((root, inside)) = Root::for_directory(base, links) else { return BaseLinks::new() };
    // The mount shows the link elsewhere, so its target must be absolute.
    let base = absolute_path(base);
    links_to(&root, &inside, |path| base.join(path.file_name().unwrap_or_default()))
}

/// Links to the files of a folder that belong to no checkpoint.
fn links_to(root: &Arc<Root>, folder: &Path, to_target: impl Fn(&Path) -> PathBuf) -> BaseLinks {
    let entries = root.entries(folder).unwrap_or_default().into_iter();
    let files = entries.filter(|entry| {
        !is_of_checkpoint(&entry.name) && root.may_be_file(folder, &entry.name, entry.kind)
    });
    let link = |name: OsString| {
        let path = folder.join(&name);
        let target = to_target(&path);
        let mut link = root.metadata(&path).ok()?;
        (link.kind, link.mode, link.links) = (FileKind::Link, 0o777, 1);
        (link.size, link.blocks) = (target.as_os_str().len() as u64, 0);
        Some((name, (link, target)))
    };
    files.filter_map(|entry| link(entry.name)).collect()
}

/// Whether a file is a checkpoint, a part of one, or an index, by its name.
fn is_of_checkpoint(name: &OsStr) -> bool {
    let name = name.to_str().unwrap_or_default();
    let extension = name.rsplit_once('.').map_or("", |(_, extension)| extension);
    CHECKPOINT_EXTENSIONS.contains(&extension)
        || unsharded_name_of_index(name).is_some()
        || name.starts_with('.')
}
