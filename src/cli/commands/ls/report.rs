//! The report of `ckptfs ls` on a directory: its JSON (docs/formats.md), and the source of its text.

use std::collections::{HashMap, HashSet};
use std::ffi::{OsStr, OsString};
use std::path::Path;

use serde::Serialize;
use serde::ser::{SerializeMap, Serializer};

use crate::checkpoint::Format;
use crate::source::FileKind;
use crate::view::{self, SafetensorsHeader, ShownFile, ViewEntry};

/// A directory of the view.
#[derive(Debug, Serialize)]
pub struct DirectoryReport {
    /// The path of the command that it was listed for.
    #[serde(flatten, serialize_with = "serialize_root")]
    pub root: NameText,
    /// Relative to that path.
    #[serde(flatten, serialize_with = "serialize_path")]
    pub path: NameText,
    pub entries: Vec<EntryReport>,
    pub hidden: Vec<NameReason>,
    pub left: Vec<NameReason>,
    pub refused: Vec<RefusedCheckpoint>,
    pub unreadable: Vec<NameReason>,
    /// Why the directory could not be listed.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub error: Option<String>,
}

#[derive(Debug, Serialize)]
pub struct EntryReport {
    #[serde(flatten, serialize_with = "serialize_name")]
    pub name: NameText,
    pub kind: &'static str,
    pub size: u64,
    /// The number of tensors in a real safetensors file.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub tensors: Option<usize>,
    #[serde(flatten, serialize_with = "serialize_target")]
    pub target: Option<NameText>,
    /// Why a link has no target.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub refused: Option<&'static str>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub virtual_file: Option<VirtualEntryReport>,
}

#[derive(Debug, Serialize)]
pub struct VirtualEntryReport {
    pub from: Vec<String>,
    pub format: Format,
    pub tensors: usize,
    layout: String,
    identity: String,
    pub notes: Vec<String>,
}

#[derive(Debug, Serialize)]
pub struct NameReason {
    #[serde(flatten, serialize_with = "serialize_name")]
    pub name: NameText,
    pub reason: String,
    /// What the user can do, where something stands in the place of a checkpoint.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub remedy: Option<String>,
}

#[derive(Debug, Serialize)]
pub struct RefusedCheckpoint {
    names: Vec<String>,
    pub reason: String,
    pub remedy: String,
}

/// A name or path as text, and as bytes if it is not UTF-8.
#[derive(Debug)]
pub struct NameText {
    pub text: String,
    /// Its bytes, in hexadecimal digits.
    bytes: Option<String>,
}

impl NameText {
    fn of(name: impl AsRef<OsStr>) -> NameText {
        let name = name.as_ref();
        let hex = |byte: &u8| format!("{byte:02x}");
        let bytes = match name.to_str() {
            Some(_) => None,
            None => Some(name.as_encoded_bytes().iter().map(hex).collect()),
        };
        NameText { text: name.to_string_lossy().into_owned(), bytes }
    }

    fn serialize_fields<S: Serializer>(&self, fields: [&str; 2], to: S) -> Result<S::Ok, S::Error> {
        let mut map = to.serialize_map(None)?;
        map.serialize_entry(fields[0], &self.text)?;
        if let Some(bytes) = &self.bytes {
            map.serialize_entry(fields[1], bytes)?;
        }
        map.end()
    }
}

fn serialize_name<S: Serializer>(name: &NameText, to: S) -> Result<S::Ok, S::Error> {
    name.serialize_fields(["name", "name_bytes"], to)
}

fn serialize_root<S: Serializer>(root: &NameText, to: S) -> Result<S::Ok, S::Error> {
    root.serialize_fields(["root", "root_bytes"], to)
}

fn serialize_path<S: Serializer>(path: &NameText, to: S) -> Result<S::Ok, S::Error> {
    path.serialize_fields(["path", "path_bytes"], to)
}

fn serialize_target<S: Serializer>(target: &Option<NameText>, to: S) -> Result<S::Ok, S::Error> {
    match target {
        Some(target) => target.serialize_fields(["target", "target_bytes"], to),
        None => to.serialize_map(Some(0))?.end(),
    }
}

impl DirectoryReport {
    /// The report on a listing. Names of `unreachable` mounts move to the unreadable ones, with their reasons.
    pub fn new(
        root: &Path,
        path: &Path,
        mut listing: view::Listing,
        headers: Vec<(OsString, SafetensorsHeader)>,
        unreachable: Vec<(OsString, String)>,
    ) -> DirectoryReport {
        let is_reachable = |name: &OsStr| unreachable.iter().all(|(other, _)| other != name);
        listing.entries.retain(|named| is_reachable(&named.name));
        listing.unreadable.retain(|(name, ..)| is_reachable(name));
        let mut tensors = HashMap::new();
        // What a file holds says more than the rule by which it stays.
        let is_explained = |(_, header): &&(OsString, SafetensorsHeader)| {
            matches!(header, SafetensorsHeader::Other { .. })
        };
        let explained: HashSet<&OsString> =
            headers.iter().filter(is_explained).map(|(name, _)| name).collect();
        let skipped = listing.skipped.into_iter().filter(|(name, _)| !explained.contains(name));
        let mut left: Vec<NameReason> = skipped.map(NameReason::of).collect();
        let originals = listing.refused.iter().flat_map(|refusal| &refusal.originals);
        let originals: HashSet<OsString> = originals.map(OsString::from).collect();
        for (name, header) in headers {
            match header {
                SafetensorsHeader::Other { .. } if originals.contains(&name) => {}
                SafetensorsHeader::Tensors(n) => drop(tensors.insert(name, n)),
                SafetensorsHeader::Other { reason, remedy } => {
                    left.push(NameReason::with_remedy(name, reason, remedy));
                }
            }
        }
        let (other, refused): (Vec<_>, Vec<_>) =
            listing.refused.into_iter().partition(|refusal| refusal.is_not_checkpoint);
        for refusal in other {
            let path = format!("{}: ", refusal.path.display());
            let reason = refusal.reason.strip_prefix(&path).unwrap_or(&refusal.reason);
            let names = refusal.originals.iter();
            left.extend(names.map(|name| {
                NameReason::with_remedy(name.into(), reason.to_owned(), refusal.remedy.clone())
            }));
        }
        left.sort_by(|a, b| a.name.text.cmp(&b.name.text));
        let report =
            |named: &view::NamedEntry| EntryReport::of(named, tensors.get(&named.name).copied());
        let unreadable = listing.unreadable.into_iter();
        let unreadable =
            unreadable.map(|(name, _, error)| (name, error_text(&error, &error.remedy())));
        DirectoryReport {
            root: NameText::of(root),
            path: NameText::of(path),
            entries: listing.entries.iter().map(report).collect(),
            hidden: listing.hidden.into_iter().map(NameReason::of).collect(),
            left,
            refused: refused
                .into_iter()
                .map(|refusal| RefusedCheckpoint {
                    names: refusal.originals.clone(),
                    reason: refusal.reason.clone(),
                    remedy: refusal.remedy.clone(),
                })
                .collect(),
            unreadable: unreadable.chain(unreachable).map(NameReason::of).collect(),
            error: None,
        }
    }

    /// The report on a directory that could not be listed.
    pub fn unreadable(root: &Path, path: &Path, why: String) -> DirectoryReport {
        let nothing = view::Listing::default();
        let empty = DirectoryReport::new(root, path, nothing, Vec::new(), Vec::new());
        DirectoryReport { error: Some(why), ..empty }
    }
}

/// An error and its remedy in one line.
pub fn error_text(error: &dyn std::error::Error, remedy: &str) -> String {
    format!("{error}; what to do: {remedy}")
}

impl NameReason {
    fn of((name, reason): (OsString, String)) -> NameReason {
        NameReason { name: NameText::of(name), reason, remedy: None }
    }

    fn with_remedy(name: OsString, reason: String, remedy: String) -> NameReason {
        NameReason { name: NameText::of(name), reason, remedy: Some(remedy) }
    }
}

/// Why a link is not followed.
const LEADS_OUT_REASON: &str = "leads out of the directory (--follow-symlinks)";

impl EntryReport {
    fn of(named: &view::NamedEntry, tensors: Option<usize>) -> EntryReport {
        let (kind, size) = match &named.entry {
            ViewEntry::VirtualFile(shown) => ("virtual_file", shown.metadata().size),
            ViewEntry::Index(shown) => ("index", shown.metadata().size),
            ViewEntry::Config(shown) => ("config", shown.metadata().size),
            ViewEntry::Source(attributes) => (kind_name(attributes.kind), attributes.size),
            ViewEntry::Link(attributes, _) => ("link", attributes.size),
        };
        let (target, refused) = match &named.entry {
            ViewEntry::Link(_, Some(target)) => (Some(NameText::of(target)), None),
            ViewEntry::Link(_, None) => (None, Some(LEADS_OUT_REASON)),
            _ => (None, None),
        };
        let virtual_file = match &named.entry {
            ViewEntry::VirtualFile(shown) => Some(VirtualEntryReport::of(shown)),
            _ => None,
        };
        EntryReport {
            name: NameText::of(&named.name),
            kind,
            size,
            tensors,
            target,
            refused,
            virtual_file,
        }
    }
}

impl VirtualEntryReport {
    fn of(shown: &ShownFile) -> VirtualEntryReport {
        VirtualEntryReport {
            from: shown.originals(),
            format: shown.format(),
            tensors: shown.tensors(),
            layout: shown.layout_hash().to_string(),
            identity: shown.identity().to_string(),
            notes: shown.notes().to_vec(),
        }
    }
}

fn kind_name(kind: FileKind) -> &'static str {
    match kind {
        FileKind::File => "file",
        FileKind::Directory => "directory",
        FileKind::Link => "link",
        FileKind::Pipe => "pipe",
        FileKind::Socket => "socket",
        FileKind::CharDevice | FileKind::BlockDevice => "device",
    }
}
