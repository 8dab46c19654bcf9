//! What names of a directory stand for.

use std::ffi::{OsStr, OsString};
use std::path::PathBuf;
use std::sync::Arc;

use crate::source::{FileKind, FileMetadata};

use super::error::{Refusal, ViewError};
use super::shown_file::ShownFile;

/// What a name stands for.
#[derive(Clone, Debug)]
pub enum ViewEntry {
    /// A checkpoint as one virtual file.
    VirtualFile(Arc<ShownFile>),
    /// The virtual index of a set that is shown as one file: it names that file for every tensor.
    Index(Arc<ShownFile>),
    /// The configuration that a recipe shows beside its file.
    Config(Arc<ShownFile>),
    /// A source file or directory, as it is; a link whose target the view hides, as that target.
    Source(FileMetadata),
    /// A link and its target; `None` where following it is refused.
    Link(FileMetadata, Option<PathBuf>),
}

impl ViewEntry {
    /// The metadata of the virtual file, source file or link.
    pub fn metadata(&self) -> &FileMetadata {
        match self {
            ViewEntry::VirtualFile(shown) | ViewEntry::Index(shown) | ViewEntry::Config(shown) => {
                shown.metadata()
            }
            ViewEntry::Source(metadata) | ViewEntry::Link(metadata, _) => metadata,
        }
    }
}

/// One name of a listing.
#[derive(Clone, Debug)]
pub struct NamedEntry {
    /// The name in its directory.
    pub name: OsString,
    /// What the name stands for.
    pub entry: ViewEntry,
}

/// What a listed name stands for; `None` if it is gone. An error where only its kind is known.
pub type ListedEntry = Result<Option<ViewEntry>, (FileKind, ViewError)>;

/// All that a view tells of a directory.
#[derive(Debug, Default)]
pub struct Listing {
    /// What is shown, sorted by name.
    pub entries: Vec<NamedEntry>,
    /// Names that are not shown, and why.
    pub hidden: Vec<(OsString, String)>,
    /// Names that stay as they are although they are like those of checkpoints, and why.
    pub skipped: Vec<(OsString, String)>,
    /// Checkpoints that cannot be shown as virtual files.
    pub refused: Vec<Arc<Refusal>>,
    /// Names of which the system tells nothing but their kind.
    pub unreadable: Vec<(OsString, FileKind, ViewError)>,
}

impl Listing {
    /// The names of the subdirectories that are shown.
    pub fn subdirectories(&self) -> impl Iterator<Item = &OsStr> {
        let is_directory = |named: &&NamedEntry| matches!(&named.entry, ViewEntry::Source(metadata) if metadata.kind == FileKind::Directory);
        self.entries.iter().filter(is_directory).map(|named| &*named.name)
    }
}

/// Numbers of checkpoints that a view has parsed.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct CheckpointCounts {
    /// Checkpoints shown as virtual files.
    pub virtual_files: u64,
    /// Checkpoints that were refused.
    pub refused: u64,
}
