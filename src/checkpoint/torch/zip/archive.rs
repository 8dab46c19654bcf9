//! A zip archive as a table of records.

use std::collections::{HashMap, HashSet};

use crate::source::ReadAt;

use super::directory::{CentralEntry, parse_directory};
use super::end_record::find_end;
use super::error::ZipError;
use super::local_header::ZipRecord;
use super::record_reader::read_records;
use super::tail::TailedFile;

/// The record with the pickle.
pub const PICKLE: &str = "data.pkl";

/// The records of an archive, by their names inside its single folder.
#[derive(Debug)]
pub struct ZipArchive {
    records: HashMap<String, ZipRecord>,
}

impl ZipArchive {
    /// The record with a name.
    pub fn get(&self, name: &str) -> Option<ZipRecord> {
        self.records.get(name).copied()
    }

    /// Whether it is a TorchScript program rather than a checkpoint.
    pub fn is_torchscript(&self) -> bool {
        self.records.contains_key("constants.pkl")
            || self.records.keys().any(|name| name.starts_with("code/"))
    }
}

/// Reads the directory, and finds every record.
pub fn read_archive(file: &dyn ReadAt) -> Result<ZipArchive, ZipError> {
    let tailed = TailedFile::read(file)?;
    let end = find_end(&tailed)?;
    let mut directory = vec![0; end.directory_len as usize];
    tailed.read_exact_at(&mut directory, end.directory)?;
    drop(tailed);
    let mut entries = parse_directory(&directory, &end)?;
    drop(directory);
    if !entries.iter().any(|entry| entry.name.ends_with(PICKLE)) {
        let is_array = |entry: &CentralEntry| entry.name.ends_with(".npy");
        let has_arrays = !entries.is_empty() && entries.iter().all(is_array);
        return Err(ZipError::NoPickle { has_arrays });
    }
    // Readers that fold case would see `Data.pkl` where others see `data.pkl`.
    let mut folded = HashSet::with_capacity(entries.len());
    let folder =
        entries.first().and_then(|e| e.name.split_once('/')).map(|(folder, _)| folder.to_owned());
    entries.sort_by_key(|entry| entry.header_offset);
    let mut names = Vec::with_capacity(entries.len());
    for entry in &entries {
        let inner = match (&folder, entry.name.split_once('/')) {
            (Some(shared), Some((folder, inner))) if folder == shared => inner.to_owned(),
            _ => return Err(ZipError::OutsideFolder(entry.name.clone())),
        };
        if !folded.insert(inner.to_ascii_lowercase()) {
            return Err(ZipError::DuplicateRecord(entry.name.clone()));
        }
        names.push((entry.header_offset, inner));
    }
    drop(folded);
    let records = read_records(file, entries, end.directory)?;
    if names.first().is_some_and(|(first, _)| *first != 0) {
        return Err(ZipError::LeadingBytes);
    }
    let later = names.iter().skip(1);
    for (record, (next, name)) in records.iter().zip(later) {
        if record.offset + record.packed_bytes > *next {
            let folder = folder.unwrap_or_default();
            return Err(ZipError::Overlap(format!("{folder}/{name}")));
        }
    }
    Ok(ZipArchive { records: names.into_iter().map(|(_, name)| name).zip(records).collect() })
}
