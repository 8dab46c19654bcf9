//! What `ckptfs ls` tells of a directory, as docs/formats.md documents it.

use std::collections::HashMap;
use std::ffi::{OsStr, OsString};
use std::path::Path;

use serde::Serialize;
use serde::ser::{SerializeMap, Serializer};

use crate::checkpoint::Format;
use crate::source::Kind;
use crate::view::{self, Entry, Header, Shown};

/// A directory of the view.
#[derive(Debug, Serialize)]
pub struct Directory {
    /// From the path that was given.
    #[serde(flatten, serialize_with = "as_path")]
    pub path: Name,
    pub entries: Vec<Named>,
    pub hidden: Vec<Why>,
    pub left: Vec<Why>,
    pub refused: Vec<Refused>,
    pub unreadable: Vec<Why>,
    /// Why nothing is known of it.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub error: Option<String>,
}

#[derive(Debug, Serialize)]
pub struct Named {
    #[serde(flatten, serialize_with = "as_name")]
    pub name: Name,
    pub kind: &'static str,
    pub size: u64,
    /// Of a real safetensors file.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub tensors: Option<usize>,
    #[serde(flatten, serialize_with = "as_target")]
    pub target: Option<Name>,
    /// Why a link has no target.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub refused: Option<&'static str>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub image: Option<Image>,
}

#[derive(Debug, Serialize)]
pub struct Image {
    pub from: Vec<String>,
    pub format: Format,
    pub tensors: usize,
    layout: String,
    identity: String,
    pub notes: Vec<String>,
}

#[derive(Debug, Serialize)]
pub struct Why {
    #[serde(flatten, serialize_with = "as_name")]
    pub name: Name,
    pub reason: String,
}

#[derive(Debug, Serialize)]
pub struct Refused {
    names: Vec<String>,
    pub reason: String,
    pub remedy: String,
}

/// A name or path: as text, and exactly where it is none.
#[derive(Debug)]
pub struct Name {
    pub text: String,
    /// Its bytes, in hexadecimal digits.
    bytes: Option<String>,
}

impl Name {
    fn of(name: impl AsRef<OsStr>) -> Name {
        let name = name.as_ref();
        let hex = |byte: &u8| format!("{byte:02x}");
        let bytes = match name.to_str() {
            Some(_) => None,
            None => Some(name.as_encoded_bytes().iter().map(hex).collect()),
        };
        Name { text: name.to_string_lossy().into_owned(), bytes }
    }

    fn fields<S: Serializer>(&self, fields: [&str; 2], to: S) -> Result<S::Ok, S::Error> {
        let mut map = to.serialize_map(None)?;
        map.serialize_entry(fields[0], &self.text)?;
        if let Some(bytes) = &self.bytes {
            map.serialize_entry(fields[1], bytes)?;
        }
        map.end()
    }
}

fn as_name<S: Serializer>(name: &Name, to: S) -> Result<S::Ok, S::Error> {
    name.fields(["name", "name_bytes"], to)
}

fn as_path<S: Serializer>(path: &Name, to: S) -> Result<S::Ok, S::Error> {
    path.fields(["path", "path_bytes"], to)
}

fn as_target<S: Serializer>(target: &Option<Name>, to: S) -> Result<S::Ok, S::Error> {
    match target {
        Some(target) => target.fields(["target", "target_bytes"], to),
        None => to.serialize_map(Some(0))?.end(),
    }
}

impl Directory {
    /// What was listed, but for names that nothing can be found at, for a reason.
    pub fn of(
        place: &Path,
        mut listing: view::Listing,
        headers: Vec<(OsString, Header)>,
        unreachable: Vec<(OsString, String)>,
    ) -> Directory {
        let is_reachable = |name: &OsStr| unreachable.iter().all(|(other, _)| other != name);
        listing.entries.retain(|named| is_reachable(&named.name));
        listing.unreadable.retain(|(name, ..)| is_reachable(name));
        let mut tensors = HashMap::new();
        let mut left: Vec<Why> = listing.left.into_iter().map(Why::of).collect();
        for (name, header) in headers {
            match header {
                Header::Tensors(n) => drop(tensors.insert(name, n)),
                Header::Other(reason) => left.push(Why::of((name, reason))),
            }
        }
        let (other, refused): (Vec<_>, Vec<_>) =
            listing.refused.into_iter().partition(|refusal| refusal.is_other);
        for refusal in other {
            let path = format!("{}: ", refusal.path.display());
            let reason = refusal.reason.strip_prefix(&path).unwrap_or(&refusal.reason);
            let names = refusal.originals.iter();
            left.extend(names.map(|name| Why::of((name.into(), reason.to_owned()))));
        }
        left.sort_by(|a, b| a.name.text.cmp(&b.name.text));
        let named = |named: &view::Named| Named::of(named, tensors.get(&named.name).copied());
        let unreadable = listing.unreadable.into_iter();
        let unreadable =
            unreadable.map(|(name, _, error)| (name, in_words(&error, error.remedy())));
        Directory {
            path: Name::of(place),
            entries: listing.entries.iter().map(named).collect(),
            hidden: listing.hidden.into_iter().map(Why::of).collect(),
            left,
            refused: refused
                .into_iter()
                .map(|refusal| Refused {
                    names: refusal.originals.clone(),
                    reason: refusal.reason.clone(),
                    remedy: refusal.remedy.clone(),
                })
                .collect(),
            unreadable: unreadable.chain(unreachable).map(Why::of).collect(),
            error: None,
        }
    }

    /// One that could not be listed.
    pub fn unreadable(place: &Path, error: &view::Error) -> Directory {
        let nothing = Directory::of(place, view::Listing::default(), Vec::new(), Vec::new());
        Directory { error: Some(in_words(error, error.remedy())), ..nothing }
    }
}

/// What is wrong with a name, in a line.
pub fn in_words(error: &dyn std::error::Error, remedy: &str) -> String {
    format!("{error}; what to do: {remedy}")
}

impl Why {
    fn of((name, reason): (OsString, String)) -> Why {
        Why { name: Name::of(name), reason }
    }
}

/// Of a link that cannot be followed.
const LEADS_OUT: &str = "leads out of the directory (--follow-symlinks)";

impl Named {
    fn of(named: &view::Named, tensors: Option<usize>) -> Named {
        let (kind, size) = match &named.entry {
            Entry::Image(shown) => ("image", shown.attributes().size),
            Entry::Index(shown) => ("index", shown.attributes().size),
            Entry::Source(attributes) => (word(attributes.kind), attributes.size),
            Entry::Link(attributes, _) => ("link", attributes.size),
        };
        let (target, refused) = match &named.entry {
            Entry::Link(_, Some(target)) => (Some(Name::of(target)), None),
            Entry::Link(_, None) => (None, Some(LEADS_OUT)),
            _ => (None, None),
        };
        let image = match &named.entry {
            Entry::Image(shown) => Some(Image::of(shown)),
            _ => None,
        };
        Named { name: Name::of(&named.name), kind, size, tensors, target, refused, image }
    }
}

impl Image {
    fn of(shown: &Shown) -> Image {
        Image {
            from: shown.originals(),
            format: shown.format(),
            tensors: shown.tensors(),
            layout: shown.layout().to_string(),
            identity: shown.identity().to_string(),
            notes: shown.notes().to_vec(),
        }
    }
}

fn word(kind: Kind) -> &'static str {
    match kind {
        Kind::File => "file",
        Kind::Directory => "directory",
        Kind::Link => "link",
        Kind::Pipe => "pipe",
        Kind::Socket => "socket",
        Kind::CharDevice | Kind::BlockDevice => "device",
    }
}
