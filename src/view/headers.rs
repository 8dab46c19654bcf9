//! Real safetensors files: what their headers say. A mount shows them without a look inside; who
//! tells people what a directory holds wants to know.
//!
//! In: what was listed. Out: for each file that calls itself safetensors, how many tensors it has, or
//! why it is no such file.

use std::ffi::{OsStr, OsString};
use std::path::Path;

use crate::checkpoint::{self, Candidate, Format, Members, Options};
use crate::source::Kind;
use crate::threads::together;

use super::directory::PARSERS;
use super::{Entry, Named, View};

/// What is in a file that calls itself safetensors.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Header {
    /// What it says, and so many tensors.
    Tensors(usize),
    /// Something else, or nothing that can be read; in words.
    Other(String),
}

/// Looks at those of the listed names that call themselves safetensors and stand for themselves.
pub fn of(view: &View, way: &Path, entries: &[Named]) -> Vec<(OsString, Header)> {
    let is_one = |named: &&Named| match &named.entry {
        Entry::Source(found) => found.kind == Kind::File && is_called_so(&named.name),
        // What cannot be followed says so itself, and what an image is made of stands with that.
        Entry::Link(_, target) => {
            target.is_some() && is_called_so(&named.name) && !leads_to_image(view, way, &named.name)
        }
        Entry::Image(_) | Entry::Index(_) => false,
    };
    let names: Vec<&str> =
        entries.iter().filter(is_one).filter_map(|named| named.name.to_str()).collect();
    let headers = together(&names, PARSERS, |name| header(view, way, name));
    names.iter().map(OsString::from).zip(headers).collect()
}

fn is_called_so(name: &OsStr) -> bool {
    Path::new(name).extension().is_some_and(|e| e == "safetensors" || e == "sft")
}

/// Whether a link comes out at a name that the view has and its source has not.
fn leads_to_image(view: &View, way: &Path, link: &OsStr) -> bool {
    let Some(end) = view.root.destination(&way.join(link)).map(|end| end.way) else { return false };
    match (end.parent(), end.file_name()) {
        (Some(parent), Some(name)) => view.has_image(parent, name).unwrap_or(false),
        _ => false,
    }
}

fn header(view: &View, way: &Path, name: &str) -> Header {
    let candidate = Candidate { name: name.into(), whole: name.into(), members: Members::File };
    // A key is for torch files.
    let options = Options { root_key: None, ..view.options.checkpoint.clone() };
    match checkpoint::open_candidate(&view.root, way, &candidate, &options) {
        Ok(found) if found.format == Format::Safetensors => Header::Tensors(found.tensors.len()),
        Ok(found) => Header::Other(format!(
            "is a {} file that is called safetensors; give it the extension of one, such as .pt",
            found.format.name()
        )),
        Err(error) => {
            let words = error.to_string();
            let path = format!("{}: ", error.path().display());
            Header::Other(words.strip_prefix(&path).unwrap_or(&words).to_owned())
        }
    }
}
