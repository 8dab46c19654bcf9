//! The first bytes of files that a view shows as they are, without a look inside.
//!
//! Commands that describe a directory ask for them. For each file that is called safetensors they report its number of
//! tensors, or why it is no such file. Of each file that a rule keeps as it is, they report whether a failed download
//! left it.

use std::collections::HashSet;
use std::ffi::{OsStr, OsString};
use std::path::Path;

use crate::checkpoint::{self, Candidate, Format, UnreadFormat};
use crate::shell_word::shell_word;
use crate::source::{FileKind, OpenFile};
use crate::threads::parallel_map;

use super::directory_query::MAX_PARSER_THREADS;
use super::directory_store::DirectoryStore;
use super::entry::{Listing, NamedEntry, ViewEntry};

/// What is in a file that is called safetensors, or stands where a checkpoint should be.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum SafetensorsHeader {
    /// A safetensors header of so many tensors.
    Tensors(usize),
    /// Something else, or nothing that can be read.
    Other {
        /// What it is, in words.
        reason: String,
        /// What the user can do about it.
        remedy: String,
    },
}

/// Reads the headers of the listed safetensors files that stand for themselves. Of those that stay as they are by a
/// rule it reads the first bytes.
pub fn read_headers(
    store: &DirectoryStore,
    directory: &Path,
    listing: &Listing,
) -> Vec<(OsString, SafetensorsHeader)> {
    let Listing { entries, skipped, .. } = listing;
    let skipped: HashSet<&OsStr> = skipped.iter().map(|(name, _)| &**name).collect();
    let is_candidate = |name: &OsStr| has_safetensors_extension(name) || skipped.contains(name);
    let is_read = |named: &&NamedEntry| match &named.entry {
        ViewEntry::Source(found) => found.kind == FileKind::File && is_candidate(&named.name),
        // A link that cannot be followed says so itself; a virtual file's sources are listed with that.
        ViewEntry::Link(_, target) => {
            target.is_some()
                && is_candidate(&named.name)
                && !leads_to_virtual_file(store, directory, &named.name)
        }
        ViewEntry::VirtualFile(_) | ViewEntry::Index(_) | ViewEntry::Config(_) => false,
    };
    let names: Vec<&str> =
        entries.iter().filter(is_read).filter_map(|named| named.name.to_str()).collect();
    let headers =
        parallel_map(&names, MAX_PARSER_THREADS, |name| {
            match has_safetensors_extension(name.as_ref()) {
                true => Some(read_header(store, directory, name)),
                false => failed_download(store, &directory.join(name)),
            }
        });
    let headers = names.iter().map(OsString::from).zip(headers);
    headers.filter_map(|(name, header)| Some((name, header?))).collect()
}

/// What a failed download left at a path, if that is there.
fn failed_download(store: &DirectoryStore, path: &Path) -> Option<SafetensorsHeader> {
    let format = unread_format(store, path).filter(UnreadFormat::is_failed_download)?;
    let remedy = format.remedy(&store.context.root.shown_path(path));
    Some(SafetensorsHeader::Other { reason: format.to_string(), remedy })
}

/// The format of a file, if it is none of a checkpoint. `None` also if it cannot be read.
pub fn unread_format(store: &DirectoryStore, path: &Path) -> Option<UnreadFormat> {
    let file = OpenFile::open_in_root(&store.context.root, path).ok()?;
    checkpoint::detect_unread(&file, path).ok()?
}

fn has_safetensors_extension(name: &OsStr) -> bool {
    Path::new(name).extension().is_some_and(|e| e == "safetensors" || e == "sft")
}

/// Whether a link comes out at a name that the view has and its source has not.
fn leads_to_virtual_file(store: &DirectoryStore, directory: &Path, link: &OsStr) -> bool {
    let Some(end) = store.context.root.resolve_by_name(&directory.join(link)) else { return false };
    match (end.path.parent(), end.path.file_name()) {
        (Some(parent), Some(name)) => store.has_virtual_file(parent, name),
        _ => false,
    }
}

fn read_header(store: &DirectoryStore, directory: &Path, name: &str) -> SafetensorsHeader {
    let candidate = Candidate::single(name.to_owned());
    let context = &store.context;
    // A key is for torch files.
    let options = context.options.parse.without_root_key();
    match checkpoint::open_candidate(&context.root, directory, &candidate, &options) {
        Ok(found) if found.format == Format::Safetensors => {
            SafetensorsHeader::Tensors(found.tensors.len())
        }
        Ok(found) => SafetensorsHeader::Other {
            reason: format!("is a {} file with the extension .safetensors", found.format.name()),
            remedy: rename_remedy(&context.root.shown_path(&directory.join(name))),
        },
        Err(error) => {
            let text = error.to_string();
            let path = format!("{}: ", error.path().display());
            let reason = text.strip_prefix(&path).unwrap_or(&text).to_owned();
            SafetensorsHeader::Other { reason, remedy: error.remedy().into_owned() }
        }
    }
}

/// What to do about a torch file with the extension of safetensors.
fn rename_remedy(path: &Path) -> String {
    format!("rename it: mv {} {}", shell_word(path), shell_word(&path.with_extension("pt")))
}
