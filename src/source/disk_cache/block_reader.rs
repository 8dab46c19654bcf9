//! Reads a block, and compares each piece of it with its checksum.

use std::ops::Range;
use std::os::unix::fs::MetadataExt;
use std::path::Path;

use crate::source::read_spans::{PAGE_BYTES, Span};
use crate::source::scatter::has_targets;

use super::block::{BlockError, BlockName};
use super::block_file::{OpenBlockFile, READ_BYTES};
use super::checksums::{CHECKED_BYTES, ChecksumHasher, ObjectChecksums};

/// An open block.
#[derive(Debug)]
pub struct BlockReader {
    file: OpenBlockFile,
    block: BlockName,
}

impl BlockReader {
    /// Opens a block. Its bytes are compared when they are read.
    pub fn open(folder: &Path, block: &BlockName) -> Result<BlockReader, BlockError> {
        let file = OpenBlockFile::open(&folder.join(block.to_string()))?;
        let metadata = file.metadata()?;
        if !metadata.is_file() || metadata.len() != block.file_offset(block.range.end) {
            return Err(BlockError::Corrupt);
        }
        file.mark_used(metadata.atime());
        Ok(BlockReader { file, block: block.clone() })
    }

    /// Whether the block was not evicted, as of at most 10 seconds ago. Also marks its use.
    pub fn is_current(&self) -> bool {
        self.file.is_current()
    }

    /// Fills the parts of the targets that lie in a part of the block. Without targets, only looks for missing checksums.
    pub fn read(
        &self,
        part: &Range<u64>,
        targets: &mut [(u64, &mut [u8])],
        checksums: &ObjectChecksums,
    ) -> Result<(), BlockError> {
        if targets.is_empty() && self.block.checksums(part, checksums)?.contains(&0) {
            return Err(BlockError::Corrupt);
        }
        let mut at = part.start;
        while at < part.end {
            let step = step(&self.block.range, part, at);
            at = step.end;
            if has_targets(&step, targets) {
                self.read_step(&step, targets, checksums)?;
            }
        }
        Ok(())
    }

    /// Compares all checksums.
    pub fn verify(&self, checksums: &ObjectChecksums) -> Result<(), BlockError> {
        let range = &self.block.range;
        let mut at = range.start;
        while at < range.end {
            let step = step(range, range, at);
            at = step.end;
            self.read_step(&step, &mut [], checksums)?;
        }
        Ok(())
    }

    fn read_step(
        &self,
        step: &Range<u64>,
        targets: &mut [(u64, &mut [u8])],
        checksums: &ObjectChecksums,
    ) -> Result<(), BlockError> {
        let start = self.block.file_offset(step.start);
        let first_page = start / PAGE_BYTES as u64 * PAGE_BYTES as u64;
        let file_range = first_page..self.block.file_offset(step.end);
        let expected = self.block.checksums(step, checksums)?;
        let targets = targets_in(&self.block, step, targets);
        self.file.read(&file_range, targets, |spans| {
            compare(spans, start - first_page, step, &expected, checksums.hasher())
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
    block: &BlockName,
    step: &Range<u64>,
    targets: &'a mut [(u64, &mut [u8])],
) -> impl Iterator<Item = (u64, &'a mut [u8])> {
    targets.iter_mut().filter_map(move |(at, target)| {
        let (start, end) = ((*at).max(step.start), (*at + target.len() as u64).min(step.end));
        let part =
            (start..end).contains(&start).then(|| (start - *at) as usize..(end - *at) as usize)?;
        Some((block.file_offset(start), &mut target[part]))
    })
}

/// Compares the pieces of a range with their checksums. The first one begins after `skipped` bytes of the spans.
fn compare(
    spans: &[Span<'_>],
    skipped: u64,
    range: &Range<u64>,
    checksums: &[u32],
    mut hasher: ChecksumHasher,
) -> Result<(), BlockError> {
    let (mut skipped, mut at) = (skipped as usize, range.start);
    let mut checksums = checksums.iter();
    for span in spans {
        let mut bytes = span.bytes.get(skipped..).unwrap_or_default();
        skipped = skipped.saturating_sub(span.bytes.len());
        while at < range.end && !bytes.is_empty() {
            let end = (at / CHECKED_BYTES * CHECKED_BYTES + CHECKED_BYTES).min(range.end);
            let (piece, behind) = bytes.split_at(bytes.len().min((end - at) as usize));
            hasher.update(piece);
            (at, bytes) = (at + piece.len() as u64, behind);
            if at == end && checksums.next() != Some(&hasher.take(end)) {
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

    use super::super::ObjectId;
    use super::super::block::BlockWriter;
    use super::super::checksums::CHECKSUMS_NAME;
    use super::*;

    const OBJECT: ObjectId = ObjectId([7; 16]);

    fn write(folder: &Path, start: u64, bytes: &[u8]) -> BlockName {
        let mut writer = BlockWriter::create(folder, &OBJECT, start).unwrap();
        for piece in bytes.chunks(50_000) {
            writer.append(piece).unwrap();
        }
        writer.finish(folder, &ObjectChecksums::new(OBJECT, folder)).unwrap()
    }

    fn verify(folder: &Path, object: ObjectId, block: &BlockName) -> Result<(), BlockError> {
        BlockReader::open(folder, block)?.verify(&ObjectChecksums::new(object, folder))
    }

    fn sample(len: usize) -> Vec<u8> {
        (0..len as u32).map(|n| (n.wrapping_mul(2_654_435_761) >> 24) as u8).collect()
    }

    #[test]
    fn any_part_of_a_block_is_read_back() {
        let dir = tempfile::tempdir().unwrap();
        let bytes = sample((3 << 20) + 20_000);
        let checksums = ObjectChecksums::new(OBJECT, dir.path());
        for (start, len) in [
            (1000, 1),
            (1000, 65_536),
            (1000, 200_001),
            (1000, 3 << 20),
            // Of one piece: its beginning, its middle, its end, and all of it.
            (0, 5000),
            (100, 5000),
            (16_000, 384),
            (16_384, 16_384),
            // Parts of pieces that other blocks have whole.
            (20_000, 100),
            (100_000, 40_000),
        ] {
            let bytes = &bytes[start as usize..start as usize + len];
            let block = write(dir.path(), start, bytes);
            assert_eq!(block.range, start..start + len as u64);
            assert_eq!(BlockName::parse(&block.to_string()), Some(block.clone()));
            let reader = BlockReader::open(dir.path(), &block).unwrap();
            // Page-aligned memory is filled in place.
            let mut memory = MmapMut::map_anon(4 << 20).unwrap();
            for (from, to) in [(0, len), (len / 3, len), (len / 2, len / 2 + 1), (0, 1)] {
                let part = start + from as u64..start + to as u64;
                reader.read(&part, &mut [], &checksums).unwrap();
                for shift in [0, part.start as usize % PAGE_BYTES] {
                    let out = &mut memory[shift..shift + to - from];
                    out.fill(0);
                    reader.read(&part, &mut [(part.start, out)], &checksums).unwrap();
                    assert_eq!(memory[shift..shift + to - from], bytes[from..to]);
                }
            }
            reader.verify(&checksums).unwrap();
        }
        // The blocks written later have changed no checksum of the earlier ones.
        for entry in std::fs::read_dir(dir.path()).unwrap() {
            if let Some(block) = BlockName::parse(entry.unwrap().file_name().to_str().unwrap()) {
                verify(dir.path(), OBJECT, &block).unwrap();
            }
        }
    }

    #[test]
    fn a_changed_byte_anywhere_is_noticed() {
        let dir = tempfile::tempdir().unwrap();
        let block = write(dir.path(), 1000, &sample(200_000));
        let path = dir.path().join(block.to_string());
        let checksums = dir.path().join(CHECKSUMS_NAME);
        // Of the first piece and the last, the name has the checksums.
        for (path, at) in
            [(&path, 1000), (&path, 70_000), (&path, 200_999), (&checksums, 4), (&checksums, 47)]
        {
            let file = File::options().read(true).write(true).open(path).unwrap();
            let mut byte = [0];
            file.read_exact_at(&mut byte, at).unwrap();
            file.write_all_at(&[byte[0] ^ 1], at).unwrap();
            let read = verify(dir.path(), OBJECT, &block);
            assert!(matches!(read, Err(BlockError::Corrupt)), "{at}");
            file.write_all_at(&byte, at).unwrap();
        }
        verify(dir.path(), OBJECT, &block).unwrap();
        let of_other = verify(dir.path(), ObjectId([8; 16]), &block);
        assert!(matches!(of_other, Err(BlockError::Corrupt)));
        let moved = block.to_string().replace("0003e8", "0043e8");
        std::fs::copy(&path, dir.path().join(&moved)).unwrap();
        let moved = BlockName::parse(&moved).unwrap();
        let reader = BlockReader::open(dir.path(), &moved).unwrap();
        let checksums = ObjectChecksums::new(OBJECT, dir.path());
        let part = moved.range.start..moved.range.start + 1;
        let read = reader.read(&part, &mut [(part.start, &mut [0])], &checksums);
        assert!(matches!(read, Err(BlockError::Corrupt)));
        File::options().write(true).open(&path).unwrap().set_len(100_000).unwrap();
        let of_short = verify(dir.path(), OBJECT, &block);
        assert!(matches!(of_short, Err(BlockError::Corrupt)));
    }

    #[test]
    fn bytes_without_checksums_are_corrupt_until_these_are_there() {
        let dir = tempfile::tempdir().unwrap();
        let checksums = ObjectChecksums::new(OBJECT, dir.path());
        let bytes = sample(100_000);
        let block = write(dir.path(), 0, &bytes);
        let reader = BlockReader::open(dir.path(), &block).unwrap();
        reader.verify(&checksums).unwrap();
        let path = dir.path().join(CHECKSUMS_NAME);
        let kept = std::fs::read(&path).unwrap();
        // Lost in a crash.
        File::options().write(true).open(&path).unwrap().set_len(4).unwrap();
        assert!(matches!(reader.verify(&checksums), Err(BlockError::Corrupt)));
        let read = |part: Range<u64>| reader.read(&part, &mut [], &checksums);
        assert!(matches!(read(0..30_000), Err(BlockError::Corrupt)));
        read(0..16_000).unwrap();
        std::fs::write(&path, &kept).unwrap();
        reader.verify(&checksums).unwrap();
    }
}
