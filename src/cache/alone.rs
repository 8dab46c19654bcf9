//! Reads that keep no block: a small jump, a range of more pieces than blocks are worth, and one that
//! there is no memory to wait with.

use std::ops::Range;
use std::sync::Arc;

use crate::checkpoint::OriginId;
use crate::image::SegmentBytes;

use super::pool::Size;
use super::request::Answer;
use super::scratch::with_scratch;
use super::served::Served;
use super::wanted::Wanted;

/// A jump of no more than this reads what it asks for alone. Random reads of 4 KiB took six times as
/// long where each read a block; larger reads are what the kernel asks for streams with.
const SMALL: u64 = 256 << 10;

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
                match from.read_buffered(&self.reader, scratch, offset) {
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
        let Some(origin) = self.origins_of(&range).next() else { return };
        self.origins[origin.0 as usize].lane.run_now(Box::new(move || {
            let len = (range.end - range.start) as usize;
            // Pieces are smaller than what the disk gives at once: those around them are wanted soon.
            served.origins_of(&range).for_each(|origin| served.will_be_left(origin));
            with_scratch(len, |scratch| match served.reader.read_at(scratch, range.start) {
                Ok(_) => {
                    served.cache.counting.buffered_bytes.add(len as u64);
                    answer.give(Ok(scratch));
                }
                Err(error) => answer.give(Err(&served.failed(error.into()))),
            });
        }));
    }

    /// Where the parts of a range come from.
    fn origins_of(&self, range: &Range<u64>) -> impl Iterator<Item = OriginId> {
        self.image().segments(range.clone()).filter_map(|segment| match segment.bytes {
            SegmentBytes::Header(_) => None,
            SegmentBytes::Run { origin, .. } => Some(origin),
            SegmentBytes::Tensor { place, .. } => {
                Some(self.image().tensors()[place].bytes.reach().0)
            }
        })
    }

    fn will_be_left(&self, origin: OriginId) {
        self.origins[origin.0 as usize].will_be_left(&self.reader);
    }
}
