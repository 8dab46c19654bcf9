//! Headers of real safetensors files, which a view shows without a look inside.
//!
//! Commands that describe a directory ask for them: for each file that is called safetensors, its number of
//! tensors, or why it is no such file.

use std::ffi::{OsStr, OsString};
use std::path::Path;

use crate::checkpoint::{self, Candidate, Format};
use crate::shell_word::shell_word;
use crate::source::FileKind;
use crate::threads::parallel_map;

use super::directory_query::MAX_PARSER_THREADS;
use super::directory_store::DirectoryStore;
use super::entry::{NamedEntry, ViewEntry};

/// What is in a file that is called safetensors.
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

/// Reads the headers of those listed names that are called safetensors and stand for themselves.
pub fn read_headers(
    store: &DirectoryStore,
    directory: &Path,
    entries: &[NamedEntry],
) -> Vec<(OsString, SafetensorsHeader)> {
    let is_read = |named: &&NamedEntry| match &named.entry {
        ViewEntry::Source(found) => {
            found.kind == FileKind::File && has_safetensors_extension(&named.name)
        }
        // A link that cannot be followed says so itself; a virtual file's sources are listed with that.
        ViewEntry::Link(_, target) => {
            target.is_some()
                && has_safetensors_extension(&named.name)
                && !leads_to_virtual_file(store, directory, &named.name)
        }
        ViewEntry::VirtualFile(_) | ViewEntry::Index(_) => false,
    };
    let names: Vec<&str> =
        entries.iter().filter(is_read).filter_map(|named| named.name.to_str()).collect();
    let headers =
        parallel_map(&names, MAX_PARSER_THREADS, |name| read_header(store, directory, name));
    names.iter().map(OsString::from).zip(headers).collect()
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
            remedy: rename_remedy(&context.root.path().join(directory).join(name)),
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
