//! The memory that one read of a file fills: whole pages in their targets, the rest in scratch memory.

use std::io::IoSliceMut;
use std::ops::Range;

/// What direct reads fill is a multiple of this, at a multiple of this.
pub const PAGE_BYTES: usize = 4096;

/// Minimum bytes of a target that are read in place; fewer are copied.
const MIN_IN_PLACE_BYTES: usize = 32 << 10;

/// Maximum spans of one read; the kernel accepts 1,024.
const MAX_SPANS: usize = 64;

/// Memory that adjacent bytes of a file are read into.
#[derive(Debug)]
pub struct Span<'a> {
    pub bytes: &'a mut [u8],
    /// The targets that the bytes are copied to, each with the offset of its bytes in the span.
    copies: Vec<(usize, &'a mut [u8])>,
}

impl<'a> Span<'a> {
    pub fn as_io_slice(&mut self) -> IoSliceMut<'_> {
        IoSliceMut::new(self.bytes)
    }

    /// Copies the bytes that were read to their targets.
    pub fn copy_out(&mut self) {
        for (offset, target) in &mut self.copies {
            target.copy_from_slice(&self.bytes[*offset..*offset + target.len()]);
        }
    }
}

/// Divides a range of a file, which begins at a page, into spans. Targets lie in it, in order, each with its offset in
/// the file. The scratch memory is page-aligned, and has room for the range.
pub fn plan_spans<'a>(
    range: &Range<u64>,
    targets: impl Iterator<Item = (u64, &'a mut [u8])>,
    scratch: &'a mut [u8],
) -> Vec<Span<'a>> {
    let page = PAGE_BYTES as u64;
    let targets: Vec<_> = targets.collect();
    let end_of = |(at, target): &(u64, &mut [u8])| at + target.len() as u64;
    // If any targets overlap, all of them are copied.
    let is_disjoint = targets.windows(2).all(|two| end_of(&two[0]) <= two[1].0);
    let mut spans = SpanList { spans: Vec::new(), copies: Vec::new(), end: range.start, scratch };
    for (at, target) in targets {
        let end = at + target.len() as u64;
        let (first, last) = (at.next_multiple_of(page), end / page * page);
        let address = target.as_ptr().addr() + (first - at) as usize;
        let is_in_place = is_disjoint
            && address.is_multiple_of(PAGE_BYTES)
            && first + MIN_IN_PLACE_BYTES as u64 <= last
            && spans.spans.len() + 2 < MAX_SPANS;
        if !is_in_place {
            spans.copies.push((at, target));
            continue;
        }
        let (head, rest) = target.split_at_mut((first - at) as usize);
        let (pages, tail) = rest.split_at_mut((last - first) as usize);
        spans.copies.push((at, head));
        spans.add_scratch(first);
        spans.add_in_place(pages);
        spans.copies.push((last, tail));
    }
    spans.add_scratch(range.end.next_multiple_of(page));
    spans.spans
}

struct SpanList<'a> {
    spans: Vec<Span<'a>>,
    /// Targets of bytes after `end`.
    copies: Vec<(u64, &'a mut [u8])>,
    end: u64,
    scratch: &'a mut [u8],
}

impl<'a> SpanList<'a> {
    /// Adds the bytes from the last span up to `end`, with all copies so far.
    fn add_scratch(&mut self, end: u64) {
        let start = self.end;
        if start == end {
            return;
        }
        let (bytes, rest) = std::mem::take(&mut self.scratch).split_at_mut((end - start) as usize);
        let copies =
            self.copies.drain(..).map(|(at, target)| ((at - start) as usize, target)).collect();
        self.spans.push(Span { bytes, copies });
        (self.scratch, self.end) = (rest, end);
    }

    fn add_in_place(&mut self, bytes: &'a mut [u8]) {
        // An empty head needs no copy.
        self.copies.clear();
        self.end += bytes.len() as u64;
        self.spans.push(Span { bytes, copies: Vec::new() });
    }
}

#[cfg(test)]
mod tests {
    use memmap2::MmapMut;

    use super::*;

    #[test]
    fn targets_that_overlap_get_their_bytes_too() {
        let file: Vec<u8> = (0..200_000u32).map(|n| (n % 251) as u8).collect();
        let mut memory = MmapMut::map_anon(1 << 20).unwrap();
        let (first, rest) = memory.split_at_mut(256 << 10);
        let (second, third) = rest.split_at_mut(256 << 10);
        let targets = [(8192, &mut first[..90_000]), (8200, &mut second[..80_000])];
        let targets = targets.into_iter().chain([(100_000, &mut third[..9])]);
        let mut scratch = MmapMut::map_anon(256 << 10).unwrap();
        for span in &mut plan_spans(&(4096..150_000), targets, &mut scratch) {
            let len = span.bytes.len();
            span.bytes.copy_from_slice(&file[4096..4096 + len]);
            span.copy_out();
        }
        assert!(memory[..90_000] == file[8192..98_192]);
        assert!(memory[256 << 10..][..80_000] == file[8200..88_200]);
        assert!(memory[512 << 10..][..9] == file[100_000..100_009]);
    }

    #[test]
    fn every_target_gets_its_bytes_and_whole_pages_are_read_in_place() {
        let file: Vec<u8> = (0..400_000u32).map(|n| (n % 251) as u8).collect();
        let mut memory = MmapMut::map_anon(1 << 20).unwrap();
        let memory_range = memory.as_ptr_range();
        for (at, len, shift, in_place) in [
            (8192, 100_000, 0, true),
            (8192, 98_304, 0, true),
            (8200, 100_000, 8, true),
            (8200, 100_000, 0, false),
            (8192, 20_000, 0, false),
        ] {
            let (first, second) = memory.split_at_mut(512 << 10);
            let targets = [(at, &mut first[shift..shift + len]), (200_001, &mut second[..77])];
            let mut scratch = MmapMut::map_anon(512 << 10).unwrap();
            let mut spans = plan_spans(&(4096..300_000), targets.into_iter(), &mut scratch);
            let mut read_at = 4096;
            for span in &mut spans {
                assert!(span.bytes.len().is_multiple_of(PAGE_BYTES));
                span.bytes.copy_from_slice(&file[read_at..read_at + span.bytes.len()]);
                read_at += span.bytes.len();
                span.copy_out();
            }
            assert_eq!(read_at, 303_104);
            let is_in_place = spans.iter().any(|span| memory_range.contains(&span.bytes.as_ptr()));
            assert_eq!(is_in_place, in_place);
            drop(spans);
            assert!(memory[shift..shift + len] == file[at as usize..at as usize + len]);
            assert!(memory[512 << 10..][..77] == file[200_001..200_078]);
        }
    }
}
