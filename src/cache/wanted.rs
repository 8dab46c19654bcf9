//! Which bytes of which files and tensors a read wants.
//!
//! In: a range of an image. Out: the pieces of source files, or of tensors that have to be gathered, where each
//! belongs in the answer, and how much is read with it where no block has it yet.

use std::ops::Range;

use crate::checkpoint::Bytes;
use crate::image::{Segment, SegmentBytes};

use super::cover::Piece;
use super::origin::OpenOrigin;
use super::pool::Size;
use super::served::Served;
use super::store::{BlockId, MOST_BLOCKS, Of};

/// From so many bytes of a file on exactly those are read that are wanted: the kernel reads on from there, and
/// asks for no byte twice. Of less, what lies around it is read too: small tensors share a block.
const EXACT: u64 = 256 << 10;

/// Blocks that are fetched of one range ahead of time. Of one that has more the rest is read when it is asked for: it is
/// tiny tensors that each have to be gathered.
const MOST_FETCHED: usize = 128;

/// What a read is made of.
#[derive(Default)]
pub(super) struct Wanted {
    pub pieces: Vec<Piece>,
    /// Parts that are in memory: where in the answer, and which part of the image.
    pub at_hand: Vec<(usize, Range<u64>)>,
}

impl Served {
    /// What a read wants; `None` if that lies in more blocks than one read is made of.
    pub(super) fn wanted(&self, range: &Range<u64>) -> Option<Wanted> {
        let (mut wanted, mut blocks) = (Wanted::default(), Vec::new());
        for segment in self.image().segments(range.clone()) {
            let at = (segment.range.start - range.start) as usize;
            let Some((of, bytes)) = self.place(&segment) else {
                wanted.at_hand.push((at, segment.range));
                continue;
            };
            for piece in self.pieces(of, bytes, at) {
                let block = (of, piece.within.start);
                if !blocks.contains(&block) {
                    if blocks.len() == MOST_BLOCKS {
                        return None;
                    }
                    blocks.push(block);
                }
                wanted.pieces.push(piece);
            }
        }
        Some(wanted)
    }

    /// What to fetch of a range ahead of time: its pieces, those that lie in one block as one.
    pub(super) fn to_fetch(&self, range: Range<u64>) -> Vec<Piece> {
        let mut fetch: Vec<Piece> = Vec::new();
        for segment in self.image().segments(range) {
            let Some((of, bytes)) = self.place(&segment) else { continue };
            for piece in self.pieces(of, bytes, 0) {
                if let Some(last) = fetch.last_mut()
                    && (last.of, &last.within) == (of, &piece.within)
                {
                    last.bytes.end = piece.bytes.end;
                } else if fetch.len() < MOST_FETCHED {
                    fetch.push(piece);
                } else {
                    return fetch;
                }
            }
        }
        fetch
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

    /// What a segment's bytes are of, and which of it; `None` if they are in memory.
    fn place(&self, segment: &Segment) -> Option<(Of, Range<u64>)> {
        let (of, offset) = match segment.bytes {
            SegmentBytes::Header(_) => return None,
            SegmentBytes::Run { origin, offset } => {
                self.reader.file(origin)?;
                (Of::File(origin.0), offset)
            }
            SegmentBytes::Tensor { place, offset } => (Of::Tensor(place as u32), offset),
        };
        Some((of, offset..offset + (segment.range.end - segment.range.start)))
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
