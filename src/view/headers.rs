//! Real safetensors files: what their headers say. A mount shows them without a look inside; who
//! tells people what a directory holds wants to know.
//!
//! In: what was listed. Out: for each file that calls itself safetensors, how many tensors it has, or
//! why it is no such file.

use std::ffi::{OsStr, OsString};
use std::path::Path;

use crate::checkpoint::{self, Candidate, CandidateFiles, Format};
use crate::source::FileKind;
use crate::threads::parallel_map;

use super::directory::MAX_PARSER_THREADS;
use super::{NamedEntry, View, ViewEntry};

/// What is in a file that calls itself safetensors.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum SafetensorsHeader {
    /// What it says, and so many tensors.
    Tensors(usize),
    /// Something else, or nothing that can be read; in words.
    Other(String),
}

/// Looks at those of the listed names that call themselves safetensors and stand for themselves.
pub fn read_headers(
    view: &View,
    way: &Path,
    entries: &[NamedEntry],
) -> Vec<(OsString, SafetensorsHeader)> {
    let is_one = |named: &&NamedEntry| match &named.entry {
        ViewEntry::Source(found) => {
            found.kind == FileKind::File && has_safetensors_extension(&named.name)
        }
        // What cannot be followed says so itself, and what an image is made of stands with that.
        ViewEntry::Link(_, target) => {
            target.is_some()
                && has_safetensors_extension(&named.name)
                && !leads_to_virtual_file(view, way, &named.name)
        }
        ViewEntry::VirtualFile(_) | ViewEntry::Index(_) => false,
    };
    let names: Vec<&str> =
        entries.iter().filter(is_one).filter_map(|named| named.name.to_str()).collect();
    let headers = parallel_map(&names, MAX_PARSER_THREADS, |name| read_header(view, way, name));
    names.iter().map(OsString::from).zip(headers).collect()
}

fn has_safetensors_extension(name: &OsStr) -> bool {
    Path::new(name).extension().is_some_and(|e| e == "safetensors" || e == "sft")
}

/// Whether a link comes out at a name that the view has and its source has not.
fn leads_to_virtual_file(view: &View, way: &Path, link: &OsStr) -> bool {
    let Some(end) = view.root.resolve_by_name(&way.join(link)).map(|end| end.path) else {
        return false;
    };
    match (end.parent(), end.file_name()) {
        (Some(parent), Some(name)) => view.has_virtual_file(parent, name).unwrap_or(false),
        _ => false,
    }
}

fn read_header(view: &View, way: &Path, name: &str) -> SafetensorsHeader {
    let candidate =
        Candidate { name: name.into(), unsharded_name: name.into(), files: CandidateFiles::Single };
    // A key is for torch files.
    let options = view.options.parse.without_root_key();
    match checkpoint::open_candidate(&view.root, way, &candidate, &options) {
        Ok(found) if found.format == Format::Safetensors => {
            SafetensorsHeader::Tensors(found.tensors.len())
        }
        Ok(found) => SafetensorsHeader::Other(format!(
            "is a {} file that is called safetensors; give it the extension of one, such as .pt",
            found.format.name()
        )),
        Err(error) => {
            let words = error.to_string();
            let path = format!("{}: ", error.path().display());
            SafetensorsHeader::Other(words.strip_prefix(&path).unwrap_or(&words).to_owned())
        }
    }
}
