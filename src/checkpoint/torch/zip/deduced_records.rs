//! Deduces from the directory alone where torch's writer put each record.
//!
//! The writer pads each header so that the data begins at a multiple of 64 bytes, and leaves no other gap. So the
//! offset of a record follows from that of its header, and also from that of the next header. The layout is torch's if
//! both agree for every record. The headers then stay unread until the first read of each record checks them.

use crate::source::{DeferredChecks, HeaderCheck, HeaderMismatch, SourceError, UnreadHeader};

use super::directory::CentralEntry;
use super::error::ZipError;
use super::local_header::{LOCAL_BYTES, ZipRecord, mismatch, parse_local_header};
use super::zip64::ZIP64_MARKER;

/// Data begins at a multiple of this. torch can be configured to use another one; such a file's headers are read.
const ALIGNMENT_BYTES: u64 = 64;

/// Bytes before the contents of an extra field. The padding is an extra field.
const EXTRA_FIELD_BYTES: u64 = 4;

/// Lengths of a data descriptor, which has the sizes after the data: with sizes of 32 bits, or of 64.
const DESCRIPTOR_BYTES: [u64; 2] = [16, 24];

/// The records of a file. `entries` are in the order of their headers. `None` if torch's writer would have put any of
/// them elsewhere.
pub fn deduce_records(entries: &[CentralEntry], directory: u64) -> Option<Vec<ZipRecord>> {
    let ends = entries.iter().skip(1).map(|next| next.header_offset).chain([directory]);
    entries.iter().zip(ends).map(|(entry, end)| deduce_record(entry, end)).collect()
}

/// The record of an entry. `end` is the offset of the next header, or of the directory.
fn deduce_record(entry: &CentralEntry, end: u64) -> Option<ZipRecord> {
    let size = entry.packed_bytes;
    if entry.method != 0 || size != entry.unpacked_bytes {
        return None;
    }
    let offset = data_start(entry)?;
    let rest = end.checked_sub(offset)?.checked_sub(size)?;
    let is_whole = match entry.sizes_follow() {
        false => rest == 0,
        true => DESCRIPTOR_BYTES.contains(&rest),
    };
    let record = ZipRecord { offset, packed_bytes: size, unpacked_bytes: size, is_deflated: false };
    is_whole.then_some(record)
}

/// The offset at which torch's writer begins the data of a record.
fn data_start(entry: &CentralEntry) -> Option<u64> {
    let (is_long, is_far) =
        (entry.packed_bytes >= ZIP64_MARKER, entry.header_offset >= ZIP64_MARKER);
    // The zip64 field has the numbers that do not fit 32 bits: two sizes, one offset.
    let zip64_bytes = match is_long || is_far {
        true => EXTRA_FIELD_BYTES + 16 * u64::from(is_long) + 8 * u64::from(is_far),
        false => 0,
    };
    let header_bytes = LOCAL_BYTES + entry.name.len() as u64 + zip64_bytes + EXTRA_FIELD_BYTES;
    entry.header_offset.checked_add(header_bytes)?.checked_next_multiple_of(ALIGNMENT_BYTES)
}

/// Defers the checks of the headers of deduced records.
pub fn defer_checks(
    entries: Vec<CentralEntry>,
    records: &[ZipRecord],
    directory: u64,
) -> DeferredChecks {
    let header = |(entry, record): (&CentralEntry, &ZipRecord)| UnreadHeader {
        start: entry.header_offset,
        data: record.offset..record.offset + record.packed_bytes,
    };
    let headers = entries.iter().zip(records).map(header).collect();
    let check = LocalHeaderCheck { entries: entries.into(), directory };
    DeferredChecks::new(headers, Box::new(check))
}

/// Compares headers with the entries of the directory.
#[derive(Debug)]
struct LocalHeaderCheck {
    entries: Box<[CentralEntry]>,
    directory: u64,
}

impl LocalHeaderCheck {
    /// Checks a header, which must be complete and end where the deduced record begins.
    fn check(&self, entry: &CentralEntry, header: &[u8]) -> Result<(), ZipError> {
        let fixed_len = (LOCAL_BYTES as usize + entry.name.len()).min(header.len());
        let (fixed, rest) = header.split_at(fixed_len);
        let read_extra = |extra: &mut [u8], at| match rest.get(..extra.len()) {
            Some(bytes) => {
                extra.copy_from_slice(bytes);
                Ok(())
            }
            None => Err(SourceError::Truncated { path: entry.name.clone().into(), offset: at }),
        };
        let record = parse_local_header(fixed, entry, self.directory, read_extra);
        match record {
            Ok(record) if record.offset - entry.header_offset == header.len() as u64 => Ok(()),
            Ok(_) | Err(ZipError::Source(_)) => Err(mismatch(entry)),
            Err(error) => Err(error),
        }
    }
}

impl HeaderCheck for LocalHeaderCheck {
    fn check(&self, index: usize, header: &[u8]) -> Result<(), HeaderMismatch> {
        self.check(&self.entries[index], header).map_err(|error| HeaderMismatch {
            reason: format!("not a safe torch archive: {error}"),
            remedy: error.remedy(),
        })
    }

    fn memory_bytes(&self) -> usize {
        size_of_val(&*self.entries) + self.entries.iter().map(|e| e.name.len()).sum::<usize>()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const SIZES_FOLLOW_FLAG: u16 = 1 << 3;

    fn entry(name: &str, header_offset: u64, size: u64, flags: u16) -> CentralEntry {
        let (name, packed_bytes, unpacked_bytes) = (name.to_owned(), size, size);
        CentralEntry { name, flags, method: 0, crc: 0, packed_bytes, unpacked_bytes, header_offset }
    }

    #[test]
    fn records_are_where_torch_writes_them() {
        // As torch 2.15 wrote them.
        let entries = [
            entry("a/data.pkl", 0, 282, SIZES_FOLLOW_FLAG),
            entry("a/byteorder", 362, 6, SIZES_FOLLOW_FLAG),
            entry("a/data/0", 470, 0, 0),
        ];
        let offsets = |entries: &[CentralEntry], directory| {
            let records = deduce_records(entries, directory)?;
            Some(records.iter().map(|record| record.offset).collect::<Vec<_>>())
        };
        assert_eq!(offsets(&entries, 512), Some(vec![64, 448, 512]));
        // Another offset of the directory; then a data descriptor of a valid length, and of wrong ones.
        assert_eq!(offsets(&entries, 513), None);
        assert_eq!(offsets(&entries[..1], 64 + 282 + 24), Some(vec![64]));
        for end in [64 + 282, 64 + 282 + 15, 64 + 282 + 20, 64 + 100, 0] {
            assert_eq!(offsets(&entries[..1], end), None, "{end}");
        }
        assert_eq!(offsets(&[entry("a/data.pkl", 0, 282, 0)], 64 + 282), Some(vec![64]));
    }

    #[test]
    fn numbers_that_do_not_fit_32_bits_move_the_data() {
        let far = (1 << 33) - 40;
        // 30 bytes, the name, 12 for the offset, 4 for the padding.
        let start = (far + 30 + 8 + 12 + 4u64).next_multiple_of(64);
        let record =
            deduce_record(&entry("a/data/1", far, 100, SIZES_FOLLOW_FLAG), start + 100 + 24);
        assert_eq!(record.map(|record| record.offset), Some(start));
        let long = entry("a/data/1", 0, 1 << 33, SIZES_FOLLOW_FLAG);
        let record = deduce_record(&long, 64 + (1 << 33) + 24);
        assert_eq!(record.map(|record| record.offset), Some(64));
        // Offsets that overflow.
        assert!(deduce_record(&entry("a/data/1", u64::MAX - 3, 1, 0), u64::MAX).is_none());
        assert!(deduce_record(&entry("a/data/1", 0, u64::MAX, 0), u64::MAX).is_none());
    }
}
