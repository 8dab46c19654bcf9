//! Which blocks a read touches, and which bytes of each.
//!
//! In: a range of an image. Out: the names of its blocks, of source files or of tensors that have to be
//! gathered, and where the bytes of each belong in the answer.

use std::ops::Range;

use crate::checkpoint::Bytes;
use crate::image::SegmentBytes;

use super::origin::OpenOrigin;
use super::pool::Size;
use super::request::Part;
use super::served::Served;
use super::store::{BlockId, Of};

/// Blocks that one read is put together from. A read of more small pieces than this, far apart, is
/// made piece by piece: whole blocks would read many times what is wanted.
const MOST_BLOCKS: usize = 8;

/// What a read is made of.
#[derive(Default)]
pub(super) struct Wanted {
    pub blocks: Vec<(BlockId, Vec<Part>)>,
    /// Parts that are in memory: where in the answer, and which part of the image.
    pub at_hand: Vec<(usize, Range<u64>)>,
}

impl Served {
    /// Which blocks a range touches; `None` if they are too many.
    pub(super) fn wanted(&self, range: &Range<u64>) -> Option<Wanted> {
        let mut wanted = Wanted::default();
        for segment in self.image().segments(range.clone()) {
            let at = (segment.range.start - range.start) as usize;
            let Some((of, size, offset)) = self.place(segment.bytes) else {
                wanted.at_hand.push((at, segment.range));
                continue;
            };
            for (number, bytes, into) in blocks_of(size, offset, &segment.range) {
                let id = BlockId { served: self.number, of, number };
                let part = Part { at: at + into, bytes };
                let known = wanted.blocks.iter().rposition(|(known, _)| *known == id);
                match known {
                    Some(n) => wanted.blocks[n].1.push(part),
                    None if wanted.blocks.len() == MOST_BLOCKS => return None,
                    None => wanted.blocks.push((id, vec![part])),
                }
            }
        }
        Some(wanted)
    }

    /// In what blocks a segment's bytes are counted, how large they are, and from which byte on;
    /// `None` if the bytes are in memory.
    pub(super) fn place(&self, bytes: SegmentBytes) -> Option<(Of, Size, u64)> {
        match bytes {
            SegmentBytes::Header(_) => None,
            SegmentBytes::Run { origin, offset } => {
                self.reader.file(origin)?;
                Some((Of::File(origin.0), Size::Small, offset))
            }
            SegmentBytes::Tensor { place, offset } => {
                Some((Of::Tensor(place as u32), self.size_of(place), offset))
            }
        }
    }

    fn size_of(&self, place: usize) -> Size {
        fn strided(bytes: &Bytes) -> bool {
            match bytes {
                Bytes::Run(_) => false,
                Bytes::Grid(_) => true,
                Bytes::Swapped { of, .. } => strided(of),
            }
        }
        if strided(&self.image().tensors()[place].bytes) { self.large } else { Size::Small }
    }

    /// Where a block's bytes come from: its size, and the bytes of its file or tensor that it has.
    pub(super) fn extent(&self, id: BlockId) -> (Size, Range<u64>) {
        let (size, end) = match id.of {
            Of::File(origin) => (Size::Small, self.image().origins()[origin as usize].size()),
            Of::Tensor(place) => {
                let place = place as usize;
                (self.size_of(place), self.image().tensors()[place].bytes.len())
            }
        };
        let bytes = size.bytes() as u64;
        (size, id.number * bytes..((id.number + 1) * bytes).min(end))
    }

    /// The origin that a block's bytes come from.
    pub(super) fn origin_of(&self, id: BlockId) -> &OpenOrigin {
        let origin = match id.of {
            Of::File(origin) => origin,
            Of::Tensor(place) => self.image().tensors()[place as usize].bytes.reach().0.0,
        };
        &self.origins[origin as usize]
    }
}

/// The blocks that a segment touches: the number of each, which of its bytes, and where they belong
/// in the segment.
pub(super) fn blocks_of(
    size: Size,
    offset: u64,
    segment: &Range<u64>,
) -> impl Iterator<Item = (u64, Range<usize>, usize)> {
    let size = size.bytes() as u64;
    let end = offset + (segment.end - segment.start);
    (offset / size..end.div_ceil(size)).map(move |number| {
        let start = number * size;
        let bytes = offset.max(start) - start..end.min(start + size) - start;
        let into = start + bytes.start - offset;
        (number, bytes.start as usize..bytes.end as usize, into as usize)
    })
}
