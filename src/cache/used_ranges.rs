//! The ranges of source files that a virtual file shows, so that no block holds much else.

use std::ops::Range;

use crate::virtual_file::{Segment, SegmentSource, VirtualFile};

/// Two used ranges are one over a gap of at most this: reading it costs less than another request.
pub const MAX_GAP_BYTES: u64 = 64 << 10;

/// The used ranges of each origin, in order.
pub struct UsedRanges {
    by_origin: Box<[Box<[Range<u64>]>]>,
}

impl UsedRanges {
    pub fn of(file: &VirtualFile) -> UsedRanges {
        let mut by_origin: Vec<Vec<Range<u64>>> = vec![Vec::new(); file.origins().len()];
        for Segment { range, bytes } in file.segments(0..file.size()) {
            if let SegmentSource::Run { origin, offset } = bytes {
                by_origin[origin.0 as usize].push(offset..offset + (range.end - range.start));
            }
        }
        UsedRanges { by_origin: by_origin.into_iter().map(merge).collect() }
    }

    /// The used range that begins last before the end of these bytes of an origin.
    pub fn around(&self, origin: u32, bytes: &Range<u64>) -> Range<u64> {
        let ranges = &self.by_origin[origin as usize];
        let next = ranges.partition_point(|used| used.start < bytes.end);
        next.checked_sub(1).map_or_else(|| bytes.clone(), |place| ranges[place].clone())
    }
}

/// Joins ranges that overlap or lie close together.
fn merge(mut ranges: Vec<Range<u64>>) -> Box<[Range<u64>]> {
    ranges.sort_unstable_by_key(|range| range.start);
    let mut merged: Vec<Range<u64>> = Vec::new();
    for range in ranges {
        match merged.last_mut().filter(|last| range.start <= last.end + MAX_GAP_BYTES) {
            Some(last) => last.end = last.end.max(range.end),
            None => merged.push(range),
        }
    }
    merged.into()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ranges_are_one_over_small_gaps() {
        let gap = MAX_GAP_BYTES;
        let merged = merge(vec![900..1000, 0..10, 10 + gap..20 + gap, 21 + 2 * gap..30 + 2 * gap]);
        assert_eq!(*merged, [0..20 + gap, 21 + 2 * gap..30 + 2 * gap]);
        let used = UsedRanges { by_origin: Box::new([merged]) };
        assert_eq!(used.around(0, &(5..9)), 0..20 + gap);
        assert_eq!(used.around(0, &(25 + 2 * gap..26 + 2 * gap)), 21 + 2 * gap..30 + 2 * gap);
    }
}
