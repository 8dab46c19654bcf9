//! Which bytes of which files and tensors a read wants.
//!
//! In: a range of an image. Out: the pieces of source files, or of tensors that have to be gathered, where each
//! belongs in the answer, and how much is read with it where no block has it yet.

use std::ops::Range;

use crate::checkpoint::Bytes;
use crate::image::SegmentBytes;

use super::cover::Piece;
use super::origin::OpenOrigin;
use super::pool::Size;
use super::served::Served;
use super::store::{BlockId, Of};

/// From so many bytes of a file on exactly those are read that are wanted: the kernel reads on from there, and
/// asks for no byte twice. Of less, what lies around it is read too: small tensors share a block.
const EXACT: u64 = 256 << 10;

/// What a read is made of.
#[derive(Default)]
pub(super) struct Wanted {
    pub pieces: Vec<Piece>,
    /// Parts that are in memory: where in the answer, and which part of the image.
    pub at_hand: Vec<(usize, Range<u64>)>,
}

impl Served {
    /// What a range wants.
    pub(super) fn wanted(&self, range: &Range<u64>) -> Wanted {
        let mut wanted = Wanted::default();
        for segment in self.image().segments(range.clone()) {
            let at = (segment.range.start - range.start) as usize;
            match self.place(segment.bytes) {
                Some((of, offset)) => {
                    let end = offset + (segment.range.end - segment.range.start);
                    wanted.pieces.extend(self.pieces(of, offset..end, at));
                }
                None => wanted.at_hand.push((at, segment.range)),
            }
        }
        wanted
    }

    /// Cut so that each lies in one block.
    fn pieces(&self, of: Of, bytes: Range<u64>, at: usize) -> impl Iterator<Item = Piece> {
        let (size, all) = (self.size_of(of).bytes() as u64, self.len_of(of));
        let is_exact = matches!(of, Of::File(_)) && bytes.end - bytes.start >= EXACT;
        // Where blocks begin: with the piece, or at what is a multiple of their size.
        let first = if is_exact { bytes.start } else { bytes.start / size * size };
        let last = if is_exact { bytes.end } else { all };
        let starts = (first..bytes.end).step_by(size as usize);
        starts.map(move |start| {
            let within = start..(start + size).min(last);
            let part = bytes.start.max(within.start)..bytes.end.min(within.end);
            Piece { of, at: at + (part.start - bytes.start) as usize, bytes: part, within }
        })
    }

    /// What a segment's bytes are of, and from which byte on; `None` if they are in memory.
    fn place(&self, bytes: SegmentBytes) -> Option<(Of, u64)> {
        match bytes {
            SegmentBytes::Header(_) => None,
            SegmentBytes::Run { origin, offset } => {
                self.reader.file(origin)?;
                Some((Of::File(origin.0), offset))
            }
            SegmentBytes::Tensor { place, offset } => Some((Of::Tensor(place as u32), offset)),
        }
    }

    /// How large blocks of it are at the most.
    pub(super) fn size_of(&self, of: Of) -> Size {
        fn strided(bytes: &Bytes) -> bool {
            match bytes {
                Bytes::Run(_) => false,
                Bytes::Grid(_) => true,
                Bytes::Swapped { of, .. } => strided(of),
            }
        }
        match of {
            Of::Tensor(place) if strided(&self.image().tensors()[place as usize].bytes) => {
                self.large
            }
            _ => Size::Small,
        }
    }

    fn len_of(&self, of: Of) -> u64 {
        match of {
            Of::File(origin) => self.image().origins()[origin as usize].size(),
            Of::Tensor(place) => self.image().tensors()[place as usize].bytes.len(),
        }
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
