//! A zip archive as a table of records.

use std::collections::{HashMap, HashSet};

use crate::source::ReadAt;

use super::directory::{CentralEntry, parse_directory};
use super::end_record::find_end;
use super::error::ZipError;
use super::local_header::{ZipRecord, read_local_header};

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

/// Reads the directory and the header of every record.
pub fn read_archive(file: &dyn ReadAt) -> Result<ZipArchive, ZipError> {
    let end = find_end(file)?;
    let mut directory = vec![0; end.directory_len as usize];
    file.read_exact_at(&mut directory, end.directory)?;
    let entries = parse_directory(&directory, &end)?;
    if !entries.iter().any(|entry| entry.name.ends_with(PICKLE)) {
        let is_array = |entry: &CentralEntry| entry.name.ends_with(".npy");
        let has_arrays = !entries.is_empty() && entries.iter().all(is_array);
        return Err(ZipError::NoPickle { has_arrays });
    }
    let mut records = HashMap::with_capacity(entries.len());
    // Readers that fold case would see `Data.pkl` where others see `data.pkl`.
    let mut folded = HashSet::with_capacity(entries.len());
    let mut extents: Vec<(u64, u64, String)> = Vec::with_capacity(entries.len());
    let folder =
        entries.first().and_then(|e| e.name.split_once('/')).map(|(folder, _)| folder.to_owned());
    for entry in entries {
        let inner = match (&folder, entry.name.split_once('/')) {
            (Some(shared), Some((folder, inner))) if folder == shared => inner.to_owned(),
            _ => return Err(ZipError::OutsideFolder(entry.name)),
        };
        if !folded.insert(inner.to_ascii_lowercase()) {
            return Err(ZipError::DuplicateRecord(entry.name));
        }
        let record = read_local_header(file, &entry, end.directory)?;
        extents.push((entry.header_offset, record.offset + record.packed_bytes, entry.name));
        records.insert(inner, record);
    }
    extents.sort_unstable();
    if extents.first().is_some_and(|first| first.0 != 0) {
        return Err(ZipError::LeadingBytes);
    }
    if let Some(pair) = extents.windows(2).find(|pair| pair[0].1 > pair[1].0) {
        return Err(ZipError::Overlap(pair[1].2.clone()));
    }
    Ok(ZipArchive { records })
}
