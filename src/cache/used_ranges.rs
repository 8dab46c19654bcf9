//! The ranges of source files that a virtual file uses. Blocks cover them and the small gaps between them.

use std::ops::Range;

use crate::checkpoint::Origin;
use crate::virtual_file::{Segment, SegmentSource, VirtualFile};

/// Maximum gap that is read with the ranges around it, for files on this machine. It costs a disk less than another request,
/// as in the plans of loads.
pub const MAX_LOCAL_GAP_BYTES: u64 = 64 << 10;

/// The used ranges of each origin, in order.
pub struct UsedRanges {
    by_origin: Box<[Box<[Range<u64>]>]>,
}

impl UsedRanges {
    /// Used ranges are merged over gaps of at most `max_gap_bytes`: reading such a gap costs less than another request.
    pub fn new(file: &VirtualFile, max_gap_bytes: u64) -> UsedRanges {
        let mut by_origin: Vec<Vec<Range<u64>>> = vec![Vec::new(); file.origins().len()];
        for Segment { range, bytes } in file.segments(0..file.size()) {
            if let SegmentSource::Run { origin, offset } = bytes
                && !matches!(file.origins()[origin.0 as usize], Origin::Memory(_))
            {
                by_origin[origin.0 as usize].push(offset..offset + (range.end - range.start));
            }
        }
        let merge = |ranges| merge_ranges(ranges, max_gap_bytes);
        UsedRanges { by_origin: by_origin.into_iter().map(merge).collect() }
    }

    /// The used range that contains these bytes of an origin.
    pub fn containing(&self, origin: u32, bytes: &Range<u64>) -> Range<u64> {
        let ranges = &self.by_origin[origin as usize];
        let next = ranges.partition_point(|used| used.start < bytes.end);
        next.checked_sub(1).map_or_else(|| bytes.clone(), |place| ranges[place].clone())
    }
}

/// Joins ranges that overlap, or lie at most so far apart.
pub fn merge_ranges(mut ranges: Vec<Range<u64>>, max_gap_bytes: u64) -> Box<[Range<u64>]> {
    ranges.sort_unstable_by_key(|range| range.start);
    let mut merged: Vec<Range<u64>> = Vec::new();
    for range in ranges {
        match merged.last_mut().filter(|last| range.start <= last.end + max_gap_bytes) {
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
    fn ranges_are_merged_over_small_gaps() {
        let merged = merge_ranges(vec![900..1000, 0..10, 30..40, 61..70], 20);
        assert_eq!(*merged, [0..40, 61..70, 900..1000]);
        let used = UsedRanges { by_origin: Box::new([merged]) };
        assert_eq!(used.containing(0, &(5..9)), 0..40);
        assert_eq!(used.containing(0, &(65..66)), 61..70);
    }
}
