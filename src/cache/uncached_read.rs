//! Reads that keep no block: a small jump, a range of more pieces than blocks are worth, and one that
//! there is no memory to wait with.

use std::ops::Range;
use std::sync::Arc;

use crate::checkpoint::OriginId;
use crate::image::{Segment, SegmentBytes};

use super::Error;
use super::cached_file::Served;
use super::page_cache_guard::Reading;
use super::pool::Size;
use super::read_plan::Wanted;
use super::reply::Answer;
use super::scratch::with_scratch;

/// A jump of no more than this reads what it asks for alone. Random reads of 4 KiB took six times as
/// long where each read a block; larger reads are what the kernel asks for streams with.
const SMALL: u64 = 256 << 10;

/// Pieces of one read that are each let go of as they are read.
const FEW: usize = 8;

impl Served {
    /// Where a range lies if it is small and one run of one file.
    pub(super) fn run_alone(&self, range: &Range<u64>) -> Option<(u32, u64)> {
        let mut segments = self.image().segments(range.clone());
        match (segments.next()?.bytes, segments.next()) {
            (SegmentBytes::Run { origin, offset }, None) if range.end - range.start <= SMALL => {
                self.reader.file(origin).map(|_| (origin.0, offset))
            }
            _ => None,
        }
    }

    /// Whether anything of it is being read already, or about to be.
    pub(super) fn comes_anyway(&self, wanted: &Wanted) -> bool {
        self.cache.store.is_coming(self.number, &wanted.pieces)
    }

    /// Reads what was jumped to, and nothing around it: the next jump goes elsewhere.
    pub(super) fn read_alone(&self, origin: u32, offset: u64, len: usize, answer: Answer) {
        let (store, from) = (&self.cache.store, &self.origins[origin as usize]);
        let Some(mut buffer) = store.buffer(Size::Small) else {
            return with_scratch(len, |scratch| {
                match from.read_passing(&self.reader, scratch, offset) {
                    Ok(()) => answer.give(Ok(scratch)),
                    Err(error) => answer.give(Err(&self.failed(error.into()))),
                }
            });
        };
        let range = offset..offset + len as u64;
        match from.read(&self.reader, &mut buffer, &range, &self.cache.counting) {
            Ok(bytes) => answer.give(Ok(&buffer[bytes])),
            Err(error) => answer.give(Err(&self.failed(error.into()))),
        }
    }

    /// Reads a range through the page cache, piece by piece.
    pub(super) fn read_in_pieces(self: &Arc<Self>, range: Range<u64>, answer: Answer) {
        let served = Arc::clone(self);
        let Some(first) = self.image().segments(range.clone()).find_map(|s| self.origin_in(&s))
        else {
            return;
        };
        self.origins[first.0 as usize].lane.run_now(Box::new(move || {
            let len = (range.end - range.start) as usize;
            with_scratch(len, |scratch| match served.fill_in_pieces(&range, scratch) {
                Ok(()) => {
                    served.cache.counting.buffered_bytes.add(len as u64);
                    answer.give(Ok(scratch));
                }
                Err(error) => answer.give(Err(&served.failed(error))),
            });
        }));
    }

    fn fill_in_pieces(&self, range: &Range<u64>, out: &mut [u8]) -> Result<(), Error> {
        let segments: Vec<Segment> = self.image().segments(range.clone()).collect();
        if segments.len() > FEW {
            // Reads come back to the pages that hold tiny pieces.
            let _kept: Vec<_> = segments.iter().filter_map(|segment| self.keep(segment)).collect();
            self.reader.read_at(out, range.start)?;
            return Ok(());
        }
        for segment in &segments {
            let Range { start, end } = segment.range;
            let out = &mut out[(start - range.start) as usize..(end - range.start) as usize];
            if let SegmentBytes::Run { origin, offset } = segment.bytes {
                self.origins[origin.0 as usize].read_passing(&self.reader, out, offset)?;
            } else {
                let _kept = self.keep(segment);
                self.reader.read_at(out, start)?;
            }
        }
        Ok(())
    }

    /// To be called before it is read through the page cache to which reads come back, and held until it was.
    fn keep(&self, segment: &Segment) -> Option<Reading<'_>> {
        match segment.bytes {
            SegmentBytes::Header(_) => None,
            SegmentBytes::Tensor { place, .. } => self.keep_tensor(place),
            SegmentBytes::Run { origin, offset } => {
                let len = segment.range.end - segment.range.start;
                self.origins[origin.0 as usize].keep(&self.reader, &(offset..offset + len))
            }
        }
    }

    /// The same for a part of a tensor that is gathered: the next part of it comes back to the same pages.
    pub(super) fn keep_tensor(&self, place: usize) -> Option<Reading<'_>> {
        let (origin, offset, len) = self.image().tensors()[place].bytes.reach();
        self.origins[origin.0 as usize].keep(&self.reader, &(offset..offset.saturating_add(len)))
    }

    fn origin_in(&self, segment: &Segment) -> Option<OriginId> {
        match segment.bytes {
            SegmentBytes::Header(_) => None,
            SegmentBytes::Run { origin, .. } => Some(origin),
            SegmentBytes::Tensor { place, .. } => {
                Some(self.image().tensors()[place].bytes.reach().0)
            }
        }
    }
}
