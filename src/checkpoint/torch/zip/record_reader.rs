//! Finds the offset of each record: in its header, or by arithmetic for a file in a store.

use crate::source::ReadAt;
use crate::threads::parallel_map;

use super::deduced_records::{deduce_records, defer_checks};
use super::directory::CentralEntry;
use super::error::ZipError;
use super::local_header::{
    ZipRecord, fixed_range, mismatch, parse_local_header, read_local_header,
};

/// The largest gap between two headers that one request to a store fetches.
const MAX_GAP_BYTES: u64 = 64 << 10;

/// The largest range that one request for headers fetches: with many small records, several requests are made at once.
const MAX_REQUEST_BYTES: u64 = 1 << 20;

/// Requests for the headers of one file that are in flight at once. Several files are read at once, too.
const MAX_REQUEST_COUNT: usize = 8;

/// Finds the records of `entries`, which are in the order of their headers. The directory starts at `directory`.
pub fn read_records(
    file: &dyn ReadAt,
    entries: Vec<CentralEntry>,
    directory: u64,
) -> Result<Vec<ZipRecord>, ZipError> {
    let Some(slot) = file.deferred_checks() else {
        return entries.iter().map(|entry| read_local_header(file, entry, directory)).collect();
    };
    match deduce_records(&entries, directory) {
        Some(records) => {
            // A second parse of the same open file would defer the same checks.
            slot.get_or_init(|| defer_checks(entries, &records, directory));
            Ok(records)
        }
        None => read_in_groups(file, &entries, directory),
    }
}

/// Refuses headers that overlap.
fn check_disjoint(entries: &[CentralEntry], directory: u64) -> Result<(), ZipError> {
    let mut end = 0;
    for entry in entries {
        let range = fixed_range(entry, directory)?;
        if range.start < end {
            return Err(mismatch(entry));
        }
        end = range.end;
    }
    Ok(())
}

/// Reads all headers with few requests, several at once.
fn read_in_groups(
    file: &dyn ReadAt,
    entries: &[CentralEntry],
    directory: u64,
) -> Result<Vec<ZipRecord>, ZipError> {
    check_disjoint(entries, directory)?;
    let groups: Vec<&[CentralEntry]> = entries
        .chunk_by({
            let mut group_start = entries.first().map_or(0, |first| first.header_offset);
            move |before, entry| {
                let at = entry.header_offset;
                let is_near = at - before.header_offset <= MAX_GAP_BYTES
                    && at - group_start <= MAX_REQUEST_BYTES;
                if !is_near {
                    group_start = at;
                }
                is_near
            }
        })
        .collect();
    let read = parallel_map(&groups, MAX_REQUEST_COUNT, |group| read_group(file, group, directory));
    let mut records = Vec::with_capacity(entries.len());
    for group in read {
        records.extend(group?);
    }
    Ok(records)
}

/// Reads headers that lie close together.
fn read_group(
    file: &dyn ReadAt,
    entries: &[CentralEntry],
    directory: u64,
) -> Result<Vec<ZipRecord>, ZipError> {
    let ranges = entries.iter().map(|entry| fixed_range(entry, directory));
    let ranges = ranges.collect::<Result<Vec<_>, _>>()?;
    let mut fixed: Vec<Vec<u8>> =
        ranges.iter().map(|range| vec![0; (range.end - range.start) as usize]).collect();
    let mut targets: Vec<(u64, &mut [u8])> =
        ranges.iter().zip(&mut fixed).map(|(range, bytes)| (range.start, &mut bytes[..])).collect();
    file.read_nearby(&mut targets)?;
    drop(targets);
    let read = |extra: &mut [u8], at| file.read_exact_at(extra, at);
    let headers = entries.iter().zip(&fixed);
    headers.map(|(entry, fixed)| parse_local_header(fixed, entry, directory, read)).collect()
}
