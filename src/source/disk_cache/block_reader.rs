//! Reads a block, and compares each piece of it with its checksum.

use std::ops::Range;
use std::os::unix::fs::MetadataExt;
use std::path::Path;

use crate::source::scatter::has_targets;

use super::ObjectId;
use super::block::{
    BlockError, CHECKED_BYTES, ChecksumHasher, HEADER_BYTES, file_offset, parse_header,
};
use super::block_file::{MAX_GAP_BYTES, OpenBlockFile, READ_BYTES};
use crate::source::read_spans::{PAGE_BYTES, Span};

/// An open block.
#[derive(Debug)]
pub struct BlockReader {
    file: OpenBlockFile,
    range: Range<u64>,
    checksums: Box<[u32]>,
}

impl BlockReader {
    /// Opens the block of a range, and compares its header. The same read of the disk fills the targets in the first
    /// bytes of `part`, if these lie near the header.
    pub fn open(
        path: &Path,
        object: &ObjectId,
        range: &Range<u64>,
        part: &Range<u64>,
        targets: &mut [(u64, &mut [u8])],
    ) -> Result<BlockReader, BlockError> {
        let file = OpenBlockFile::open(path)?;
        let metadata = file.metadata()?;
        if !metadata.is_file() || metadata.len() != file_offset(range, range.end) {
            return Err(BlockError::Corrupt);
        }
        let first = step(range, part, part.start);
        let is_near = first.start - range.start <= MAX_GAP_BYTES && has_targets(&first, targets);
        let first = if is_near { first } else { range.start..range.start };
        let file_range = 0..file_offset(range, first.end);
        let checksums = file.read(&file_range, targets_in(range, &first, targets), |spans| {
            let header = spans.first().and_then(|span| span.bytes.get(..HEADER_BYTES));
            let checksums = header.and_then(|header| parse_header(header, object, range));
            let checksums = checksums.ok_or(BlockError::Corrupt)?;
            compare(spans, file_offset(range, first.start), &first, range, &checksums)?;
            Ok(checksums)
        })?;
        file.mark_used(metadata.atime());
        let reader = BlockReader { file, range: range.clone(), checksums };
        if first.end < part.end {
            reader.read(&(first.end.max(part.start)..part.end), targets)?;
        }
        Ok(reader)
    }

    /// Whether the block was not evicted, as of at most 10 seconds ago. Also marks its use.
    pub fn is_current(&self) -> bool {
        self.file.is_current()
    }

    /// Fills the parts of the targets that lie in a part of the block.
    pub fn read(
        &self,
        part: &Range<u64>,
        targets: &mut [(u64, &mut [u8])],
    ) -> Result<(), BlockError> {
        let mut at = part.start;
        while at < part.end {
            let step = step(&self.range, part, at);
            at = step.end;
            if has_targets(&step, targets) {
                self.read_step(&step, targets)?;
            }
        }
        Ok(())
    }

    /// Compares all checksums.
    pub fn verify(&self) -> Result<(), BlockError> {
        let mut at = self.range.start;
        while at < self.range.end {
            let step = step(&self.range, &self.range, at);
            at = step.end;
            self.read_step(&step, &mut [])?;
        }
        Ok(())
    }

    fn read_step(
        &self,
        step: &Range<u64>,
        targets: &mut [(u64, &mut [u8])],
    ) -> Result<(), BlockError> {
        let place = |at| file_offset(&self.range, at);
        let start = place(step.start);
        let file_range = start / PAGE_BYTES as u64 * PAGE_BYTES as u64..place(step.end);
        self.file.read(&file_range, targets_in(&self.range, step, targets), |spans| {
            compare(spans, start - file_range.start, step, &self.range, &self.checksums)
        })
    }
}

/// The next bytes to read for a part of a block, in whole checked pieces.
fn step(block: &Range<u64>, part: &Range<u64>, at: u64) -> Range<u64> {
    let start = at / CHECKED_BYTES * CHECKED_BYTES;
    let end = (start + READ_BYTES).min(part.end.next_multiple_of(CHECKED_BYTES));
    start.max(block.start)..end.min(block.end)
}

/// The parts of the targets in a step, each with its offset in the file of the block.
fn targets_in<'a>(
    block: &Range<u64>,
    step: &Range<u64>,
    targets: &'a mut [(u64, &mut [u8])],
) -> impl Iterator<Item = (u64, &'a mut [u8])> {
    targets.iter_mut().filter_map(move |(at, target)| {
        let (start, end) = ((*at).max(step.start), (*at + target.len() as u64).min(step.end));
        let part =
            (start..end).contains(&start).then(|| (start - *at) as usize..(end - *at) as usize)?;
        Some((file_offset(block, start), &mut target[part]))
    })
}

/// Compares pieces of a block with their checksums. The first piece begins after `skipped` bytes of the spans.
fn compare(
    spans: &[Span<'_>],
    skipped: u64,
    pieces: &Range<u64>,
    block: &Range<u64>,
    checksums: &[u32],
) -> Result<(), BlockError> {
    let (mut skipped, mut at) = (skipped as usize, pieces.start);
    let first = pieces.start / CHECKED_BYTES - block.start / CHECKED_BYTES;
    let mut checksums = checksums.iter().skip(first as usize);
    let mut hasher = ChecksumHasher::default();
    for span in spans {
        let mut bytes = span.bytes.get(skipped..).unwrap_or_default();
        skipped = skipped.saturating_sub(span.bytes.len());
        while at < pieces.end && !bytes.is_empty() {
            let end = (at / CHECKED_BYTES * CHECKED_BYTES + CHECKED_BYTES).min(pieces.end);
            let (piece, behind) = bytes.split_at(bytes.len().min((end - at) as usize));
            hasher.update(piece);
            (at, bytes) = (at + piece.len() as u64, behind);
            if at == end && checksums.next() != Some(&hasher.take()) {
                return Err(BlockError::Corrupt);
            }
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use std::fs::File;
    use std::os::unix::fs::FileExt;

    use memmap2::MmapMut;

    use super::super::block::{BlockWriter, block_name, parse_block_name};
    use super::*;

    const OBJECT: ObjectId = ObjectId([7; 16]);

    fn write(folder: &Path, start: u64, bytes: &[u8]) -> Range<u64> {
        let mut writer = BlockWriter::create(folder, start).unwrap();
        for piece in bytes.chunks(50_000) {
            writer.append(piece).unwrap();
        }
        writer.finish(folder, &OBJECT).unwrap()
    }

    fn sample(len: usize) -> Vec<u8> {
        (0..len as u32).map(|n| (n.wrapping_mul(2_654_435_761) >> 24) as u8).collect()
    }

    fn open(path: &Path, object: &ObjectId, range: &Range<u64>) -> Result<BlockReader, BlockError> {
        BlockReader::open(path, object, range, &(0..0), &mut [])
    }

    #[test]
    fn any_part_of_a_block_is_read_back() {
        let dir = tempfile::tempdir().unwrap();
        for len in [1, 65_536, 200_001, 3 << 20] {
            let bytes = sample(len);
            let range = write(dir.path(), 1000, &bytes);
            assert_eq!(parse_block_name(&block_name(&range)), Some(range.clone()));
            let path = dir.path().join(block_name(&range));
            let block = open(&path, &OBJECT, &range).unwrap();
            // Page-aligned memory is filled in place.
            let mut memory = MmapMut::map_anon(4 << 20).unwrap();
            for (from, to) in [(0, len), (len / 3, len), (len / 2, len / 2 + 1), (0, 1)] {
                let part = 1000 + from as u64..1000 + to as u64;
                for shift in [0, part.start as usize % PAGE_BYTES] {
                    let out = &mut memory[shift..shift + to - from];
                    out.fill(0);
                    block.read(&part, &mut [(part.start, out)]).unwrap();
                    assert_eq!(memory[shift..shift + to - from], bytes[from..to]);
                    let out = &mut memory[shift..shift + to - from];
                    out.fill(0);
                    BlockReader::open(&path, &OBJECT, &range, &part, &mut [(part.start, out)])
                        .unwrap();
                    assert_eq!(memory[shift..shift + to - from], bytes[from..to]);
                }
            }
            block.verify().unwrap();
        }
    }

    #[test]
    fn a_changed_byte_anywhere_is_noticed() {
        let dir = tempfile::tempdir().unwrap();
        let bytes = sample(200_000);
        let range = write(dir.path(), 0, &bytes);
        let path = dir.path().join(block_name(&range));
        for at in [0, 9, 30, 50, 3000, 4095, 4096, 70_000, 204_095] {
            let file = File::options().read(true).write(true).open(&path).unwrap();
            let mut byte = [0];
            file.read_exact_at(&mut byte, at).unwrap();
            file.write_all_at(&[byte[0] ^ 1], at).unwrap();
            let block = open(&path, &OBJECT, &range);
            let read = block.and_then(|block| block.verify());
            assert!(matches!(read, Err(BlockError::Corrupt)), "{at}");
            file.write_all_at(&byte, at).unwrap();
        }
        open(&path, &OBJECT, &range).unwrap().verify().unwrap();
        assert!(open(&path, &ObjectId([8; 16]), &range).is_err());
        File::options().write(true).open(&path).unwrap().set_len(100_000).unwrap();
        assert!(matches!(open(&path, &OBJECT, &range), Err(BlockError::Corrupt)));
    }
}
