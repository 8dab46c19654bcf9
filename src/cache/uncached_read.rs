//! Reads that keep no block: a small jump, a range of more pieces than blocks are worth, and one that
//! there is no memory to wait with.

use std::ops::Range;
use std::sync::Arc;

use crate::checkpoint::OriginId;
use crate::source::ActiveRead;
use crate::virtual_file::{Segment, SegmentSource};

use crate::cache::CacheError;
use crate::cache::block::pool::BufferSize;
use crate::cache::file::CachedFile;
use crate::cache::io::reply::PendingReply;
use crate::cache::plan::ReadPlan;
use crate::cache::scratch::with_scratch;

/// A jump of no more than this reads what it asks for alone. Random reads of 4 KiB took six times as
/// long where each read a block; larger reads are what the kernel asks for streams with.
const MAX_UNCACHED_BYTES: u64 = 256 << 10;

/// Pieces of one read that are each let go of as they are read.
const MAX_EVICTED_SEGMENTS: usize = 8;

impl CachedFile {
    /// Where a range lies if it is small and one run of one file.
    pub(super) fn locate_small_run(&self, range: &Range<u64>) -> Option<(u32, u64)> {
        let mut segments = self.virtual_file().segments(range.clone());
        match (segments.next()?.bytes, segments.next()) {
            (SegmentSource::Run { origin, offset }, None)
                if range.end - range.start <= MAX_UNCACHED_BYTES =>
            {
                self.reader.file(origin).map(|_| (origin.0, offset))
            }
            _ => None,
        }
    }

    /// Whether anything of it is being read already, or about to be.
    pub(super) fn is_pending(&self, wanted: &ReadPlan) -> bool {
        self.cache.blocks.is_any_pending(self.file_id, &wanted.pieces)
    }

    /// Reads what was jumped to, and nothing around it: the next jump goes elsewhere.
    pub(super) fn read_uncached(&self, origin: u32, offset: u64, len: usize, answer: PendingReply) {
        let (store, from) = (&self.cache.blocks, &self.sources[origin as usize]);
        let Some(mut buffer) = store.take_buffer(BufferSize::Small) else {
            return with_scratch(len, |scratch| {
                match from.read_through(&self.reader, scratch, offset) {
                    Ok(()) => answer.send(Ok(scratch)),
                    Err(error) => answer.send(Err(&self.record_failure(error.into()))),
                }
            });
        };
        let range = offset..offset + len as u64;
        match from.read(&self.reader, &mut buffer, &range, &self.cache.counters) {
            Ok(bytes) => answer.send(Ok(&buffer[bytes])),
            Err(error) => answer.send(Err(&self.record_failure(error.into()))),
        }
    }

    /// Reads a range through the page cache, piece by piece.
    pub(super) fn read_by_segments(self: &Arc<Self>, range: Range<u64>, answer: PendingReply) {
        let served = Arc::clone(self);
        let Some(first) =
            self.virtual_file().segments(range.clone()).find_map(|s| self.segment_origin(&s))
        else {
            return;
        };
        self.sources[first.0 as usize].executor.submit_blocking(Box::new(move || {
            let len = (range.end - range.start) as usize;
            with_scratch(len, |scratch| match served.copy_segments(&range, scratch) {
                Ok(()) => {
                    served.cache.counters.buffered_bytes.add(len as u64);
                    answer.send(Ok(scratch));
                }
                Err(error) => answer.send(Err(&served.record_failure(error))),
            });
        }));
    }

    fn copy_segments(&self, range: &Range<u64>, out: &mut [u8]) -> Result<(), CacheError> {
        let segments: Vec<Segment> = self.virtual_file().segments(range.clone()).collect();
        if segments.len() > MAX_EVICTED_SEGMENTS {
            // Reads come back to the pages that hold tiny pieces.
            let _kept: Vec<_> =
                segments.iter().filter_map(|segment| self.retain_pages(segment)).collect();
            self.reader.read_at(out, range.start)?;
            return Ok(());
        }
        for segment in &segments {
            let Range { start, end } = segment.range;
            let out = &mut out[(start - range.start) as usize..(end - range.start) as usize];
            if let SegmentSource::Run { origin, offset } = segment.bytes {
                self.sources[origin.0 as usize].read_through(&self.reader, out, offset)?;
            } else {
                let _kept = self.retain_pages(segment);
                self.reader.read_at(out, start)?;
            }
        }
        Ok(())
    }

    /// To be called before it is read through the page cache to which reads come back, and held until it was.
    fn retain_pages(&self, segment: &Segment) -> Option<ActiveRead<'_>> {
        match segment.bytes {
            SegmentSource::Header(_) => None,
            SegmentSource::Tensor { index: place, .. } => self.retain_tensor_pages(place),
            SegmentSource::Run { origin, offset } => {
                let len = segment.range.end - segment.range.start;
                self.sources[origin.0 as usize].retain_pages(&self.reader, &(offset..offset + len))
            }
        }
    }

    /// The same for a part of a tensor that is gathered: the next part of it comes back to the same pages.
    pub(super) fn retain_tensor_pages(&self, place: usize) -> Option<ActiveRead<'_>> {
        let (origin, offset, len) = self.virtual_file().tensors()[place].bytes.extent();
        self.sources[origin.0 as usize]
            .retain_pages(&self.reader, &(offset..offset.saturating_add(len)))
    }

    fn segment_origin(&self, segment: &Segment) -> Option<OriginId> {
        match segment.bytes {
            SegmentSource::Header(_) => None,
            SegmentSource::Run { origin, .. } => Some(origin),
            SegmentSource::Tensor { index: place, .. } => {
                Some(self.virtual_file().tensors()[place].bytes.extent().0)
            }
        }
    }
}
