//! Replies that list a directory.

use std::ffi::OsStr;
use std::path::Path;
use std::time::Duration;

use fuser::{Errno, FileHandle, FileType, INodeNo, ReplyDirectory, ReplyDirectoryPlus};

use crate::source::{FileKind, FileMetadata};
use crate::view::{ListedEntry, SortedNames};

use super::attr::{GENERATION, file_type, kernel_cache_timeout};
use super::inodes::{Inode, InodeKind, InodePath, LastAttributes, ROOT};
use super::listings::DirNames;
use super::state::FilesystemState;

/// Names that are looked up together. A reply of one page has room for fewer.
const BATCH_NAMES: usize = 32;

/// A reply that takes one name after another. Both methods return whether there was no room for the name.
pub trait DirSink {
    /// Adds a name.
    fn add(&mut self, state: &FilesystemState, next: u64, entry: ListedName<'_>) -> bool;
    /// Adds `.` or `..`, which the kernel knows and never looks up.
    fn add_dots(
        &mut self,
        state: &FilesystemState,
        next: u64,
        number: u64,
        directory: &Inode,
        name: &str,
    ) -> bool;
}

/// A name, and what it stands for.
pub struct ListedName<'a> {
    name: &'a OsStr,
    inode: Inode,
    metadata: FileMetadata,
    /// How long the kernel may cache the metadata.
    timeout: Duration,
}

/// Replies with the names of a directory from an offset on, as many as there is room for. A read from the start reads
/// the names anew.
pub fn reply_names(
    state: &FilesystemState,
    number: INodeNo,
    handle: FileHandle,
    offset: u64,
    reply: &mut impl DirSink,
) -> Result<(), Errno> {
    let (inode, number, handle) = (state.inode(number)?, number.0, handle.0);
    let directory = inode.path.to_path();
    let (names, mut index) = match state.listings.resume(handle, offset) {
        Some(cached) => cached,
        None => {
            let names = current_names(state, number, &directory)?;
            let names = DirNames { directory: (*directory).into(), names };
            state.listings.insert(handle, number, offset, names)
        }
    };
    let mut next = offset;
    for name in [".", ".."].into_iter().skip(usize::try_from(offset).unwrap_or(usize::MAX)) {
        if reply.add_dots(state, next + 1, number, &inode, name) {
            return Ok(());
        }
        next += 1;
    }
    'full: while index < names.names.len() {
        let end = names.names.len().min(index + BATCH_NAMES);
        let batch = (index..end).filter_map(|index| names.names.get(index));
        let entries = state.view.list_entries(&names.directory, batch);
        for entry in entries.map_err(|e| state.record_error(&names.directory, &e))? {
            if let Some(entry) = listed_name(&names, index, entry, &inode)
                && reply.add(state, next + 1, entry)
            {
                break 'full;
            }
            (index, next) = (index + 1, next + 1);
        }
    }
    state.listings.advance(handle, offset..next);
    Ok(())
}

/// The names of a directory as they are now.
fn current_names(
    state: &FilesystemState,
    number: u64,
    directory: &Path,
) -> Result<SortedNames, Errno> {
    let names = state.view.names(directory).map_err(|e| state.record_error(directory, &e))?;
    if number == ROOT && names.is_empty() {
        // A removed source looks empty. This logs it.
        state.is_source_removed();
    }
    Ok(names)
}

/// A name of a listing with its inode; `None` if it is gone.
fn listed_name<'a>(
    names: &'a DirNames,
    index: usize,
    entry: ListedEntry,
    directory: &Inode,
) -> Option<ListedName<'a>> {
    let name = names.names.get(index)?;
    let path = InodePath::new(&names.directory, name);
    match entry {
        Ok(entry) => {
            let entry = entry?;
            let metadata = *entry.metadata();
            // Attributes of another filesystem may be outdated, so the kernel must look the name up.
            let is_elsewhere =
                metadata.kind == FileKind::Directory && metadata.dev != directory.attributes.dev;
            let inode = Inode::new(path, &entry);
            let timeout = if is_elsewhere { Duration::ZERO } else { kernel_cache_timeout(&inode) };
            Some(ListedName { name, inode, metadata, timeout })
        }
        // An unreadable file is still listed; looking its name up returns the error.
        Err((kind, error)) => {
            tracing::debug!(%error, "listed by its name alone");
            let metadata = FileMetadata::placeholder(kind, directory.attributes.dev, index as u64);
            let attributes = LastAttributes::from(&metadata);
            let inode = Inode { path, kind: InodeKind::Source, attributes };
            Some(ListedName { name, inode, metadata, timeout: Duration::ZERO })
        }
    }
}

impl DirSink for ReplyDirectory {
    fn add(&mut self, state: &FilesystemState, next: u64, entry: ListedName<'_>) -> bool {
        let number = INodeNo(state.inodes.number_for(&entry.inode));
        let kind = file_type(entry.inode.attributes.kind);
        ReplyDirectory::add(self, number, next, kind, entry.name)
    }

    fn add_dots(
        &mut self,
        _: &FilesystemState,
        next: u64,
        number: u64,
        _: &Inode,
        name: &str,
    ) -> bool {
        ReplyDirectory::add(self, INodeNo(number), next, FileType::Directory, name)
    }
}

impl DirSink for ReplyDirectoryPlus {
    fn add(&mut self, state: &FilesystemState, next: u64, entry: ListedName<'_>) -> bool {
        let ListedName { name, inode, metadata, timeout } = entry;
        let number = state.inodes.add_lookup(inode);
        let attr = state.attr(number, &metadata);
        let ino = INodeNo(number);
        let is_full = ReplyDirectoryPlus::add(self, ino, next, name, &timeout, &attr, GENERATION);
        if is_full {
            // The kernel does not learn a name that did not fit.
            state.inodes.forget(number, 1);
        }
        is_full
    }

    fn add_dots(
        &mut self,
        state: &FilesystemState,
        next: u64,
        number: u64,
        directory: &Inode,
        name: &str,
    ) -> bool {
        let attr = state.last_attr(number, directory);
        let (ino, timeout) = (INodeNo(number), kernel_cache_timeout(directory));
        ReplyDirectoryPlus::add(self, ino, next, name, &timeout, &attr, GENERATION)
    }
}
