//! The layout of a virtual file: its header as it is written, and the sources of its bytes.
//!
//! A safetensors file has no hole between tensors, so that only their order can align them. Tensors of larger elements
//! come first: every tensor then starts at a multiple of its element. Tensors of one element size keep the order of the
//! sources: a sequential read of the virtual file is then sequential on the disk.

use std::cmp::Reverse;
use std::collections::BTreeMap;
use std::ops::Range;
use std::sync::Arc;

use crate::checkpoint::{
    ByteRun, MAX_HEADER_BYTES, Origin, OriginId, ParseOptions, Tensor, TensorPart,
};
use crate::source::{FileIdentity, FileState, SourceFile};

use super::digest::Digest;

/// The version of the layout, a part of the identity: another layout is another virtual file.
const LAYOUT_VERSION: u8 = 3;

/// The header of a virtual file, and what follows from it.
#[derive(Debug)]
pub struct FileLayout {
    pub header: Arc<[u8]>,
    /// Whether the file, header included, is identical to its source.
    pub is_identical: bool,
    /// The start of each piece in the virtual file.
    piece_starts: Box<[u64]>,
    /// The pieces, parallel to their starts.
    pieces: Box<[LayoutPiece]>,
    /// The hash of the header, and of the recipe if there is one.
    pub layout_hash: Digest,
    /// The hash of the sources' states, the options and the layout.
    pub identity: Digest,
}

/// The source of a part of the virtual file. Consecutive ranges of an origin are one piece.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum LayoutPiece {
    Header,
    Run {
        origin: OriginId,
        offset: u64,
    },
    /// Bytes of a tensor that are not contiguous, from an offset on. `index` is that of the tensor in the virtual file.
    Tensor {
        index: u32,
        offset: u64,
    },
}

impl LayoutPiece {
    /// The piece whose first byte is so many bytes into this one, if a piece can go on there.
    fn at(self, into: u64) -> Option<LayoutPiece> {
        match self {
            LayoutPiece::Header => None,
            LayoutPiece::Run { origin, offset } => {
                Some(LayoutPiece::Run { origin, offset: offset.checked_add(into)? })
            }
            LayoutPiece::Tensor { index, offset } => {
                Some(LayoutPiece::Tensor { index, offset: offset.checked_add(into)? })
            }
        }
    }
}

/// A part of the virtual file, and the source of its bytes.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Segment {
    /// The part of the virtual file.
    pub range: Range<u64>,
    /// The source of its bytes.
    pub bytes: SegmentSource,
}

/// The source of a segment's bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum SegmentSource {
    /// The header, from this byte on.
    Header(u64),
    /// An origin, from an offset on.
    Run {
        /// The origin that has the bytes.
        origin: OriginId,
        /// The offset of the first byte in it.
        offset: u64,
    },
    /// A tensor whose bytes are not contiguous, from an offset on.
    Tensor {
        /// Its index in [`VirtualFile::tensors`](super::VirtualFile::tensors).
        index: usize,
        /// The offset of the first byte in it.
        offset: u64,
    },
}

impl FileLayout {
    /// The layout of sorted tensors behind a header. `starts` are their starts in the data, and its end.
    pub fn of_tensors(
        header: Arc<[u8]>,
        is_identical: bool,
        tensors: &[Tensor],
        starts: &[u64],
        source_files: &[Arc<SourceFile>],
        options: &ParseOptions,
        recipe: Option<&str>,
    ) -> FileLayout {
        let (piece_starts, pieces) = merge_pieces(tensors, starts, header.len() as u64);
        let layout_hash = match recipe {
            None => Digest::compute(&header),
            // Of two recipes, equal headers can stand for other bytes.
            Some(recipe) => Digest::compute(&[&*header, recipe.as_bytes()].concat()),
        };
        let identity = identity(layout_hash, source_files, options);
        FileLayout { header, is_identical, piece_starts, pieces, layout_hash, identity }
    }

    /// The layout of a source file as it is.
    pub fn of_plain_file(file: &Arc<SourceFile>) -> FileLayout {
        let piece = LayoutPiece::Run { origin: OriginId(0), offset: 0 };
        let layout = FileLayout::of_piece(piece, Arc::from([]), std::slice::from_ref(file));
        FileLayout { is_identical: true, ..layout }
    }

    /// The layout of bytes in memory, all of which are header.
    pub fn of_bytes(bytes: Vec<u8>) -> FileLayout {
        FileLayout::of_piece(LayoutPiece::Header, bytes.into(), &[])
    }

    fn of_piece(
        piece: LayoutPiece,
        header: Arc<[u8]>,
        source_files: &[Arc<SourceFile>],
    ) -> FileLayout {
        let layout_hash = Digest::compute(&header);
        FileLayout {
            header,
            is_identical: false,
            piece_starts: Box::new([0]),
            pieces: Box::new([piece]),
            layout_hash,
            identity: identity(layout_hash, source_files, &ParseOptions::default()),
        }
    }

    /// Bytes of memory that it takes, the header included.
    pub fn memory_bytes(&self) -> usize {
        self.header.len() + size_of_val(&*self.piece_starts) + size_of_val(&*self.pieces)
    }

    /// The segments of a range in order. The virtual file has `size` bytes; past its end there is no segment.
    pub fn segments(&self, range: Range<u64>, size: u64) -> impl Iterator<Item = Segment> {
        let FileLayout { piece_starts, pieces, .. } = self;
        let end = range.end.min(size);
        let first = piece_starts.partition_point(|&start| start <= range.start).saturating_sub(1);
        let mut at = range.start;
        (first..pieces.len()).map_while(move |n| {
            if at >= end {
                return None;
            }
            let piece_end = piece_starts.get(n + 1).copied().unwrap_or(size);
            let into = at - piece_starts[n];
            let range = at..piece_end.min(end);
            at = range.end;
            let bytes = match pieces[n] {
                LayoutPiece::Header => SegmentSource::Header(into),
                LayoutPiece::Run { origin, offset } => {
                    SegmentSource::Run { origin, offset: offset + into }
                }
                LayoutPiece::Tensor { index, offset } => {
                    SegmentSource::Tensor { index: index as usize, offset: offset + into }
                }
            };
            Some(Segment { range, bytes })
        })
    }
}

/// The key that sorts tensors. Names break ties, so that there is one order. A patched tensor has the place of its bytes
/// in the base, so that all versions of a model have one order.
pub fn sort_key<'a>(tensor: &'a Tensor, origins: &[Origin]) -> (Reverse<u32>, ByteRun, &'a str) {
    let extent = tensor.bytes.first_extent();
    let patched = origins.get(extent.origin.0 as usize).and_then(Origin::patched);
    let place = patched.map_or(extent, |patched| patched.base.first_extent());
    (Reverse(tensor.dtype.bits()), place, &tensor.name)
}

/// The pieces of tensors whose data starts at `data_start`, and their starts.
fn merge_pieces(
    tensors: &[Tensor],
    starts: &[u64],
    data_start: u64,
) -> (Box<[u64]>, Box<[LayoutPiece]>) {
    let mut piece_starts = vec![0];
    let mut pieces = vec![LayoutPiece::Header];
    for (index, (tensor, &start)) in tensors.iter().zip(starts).enumerate() {
        for TensorPart { offset, len, run } in tensor.bytes.parts() {
            if len == 0 {
                continue;
            }
            let start = data_start + start + offset;
            let piece = match run {
                Some(ByteRun { origin, offset, .. }) => LayoutPiece::Run { origin, offset },
                None => LayoutPiece::Tensor { index: index as u32, offset },
            };
            let before = pieces.last().copied().zip(piece_starts.last().copied());
            if !before.is_some_and(|(before, at)| before.at(start - at) == Some(piece)) {
                pieces.push(piece);
                piece_starts.push(start);
            }
        }
    }
    (piece_starts.into(), pieces.into())
}

fn identity(layout_hash: Digest, files: &[Arc<SourceFile>], options: &ParseOptions) -> Digest {
    let ParseOptions { root_key, allow_partial, follow_symlinks, ranks, delta_base } = options;
    let mut bytes = vec![LAYOUT_VERSION, u8::from(*allow_partial), u8::from(*follow_symlinks)];
    bytes.extend_from_slice(layout_hash.as_bytes());
    bytes.push(u8::from(root_key.is_some()));
    let key = root_key.as_deref().unwrap_or_default();
    bytes.extend_from_slice(&(key.len() as u64).to_le_bytes());
    bytes.extend_from_slice(key.as_bytes());
    bytes.extend_from_slice(&ranks.unwrap_or(0).to_le_bytes());
    let base = delta_base.as_ref().map_or(&[][..], |base| base.as_os_str().as_encoded_bytes());
    bytes.extend_from_slice(&(base.len() as u64).to_le_bytes());
    bytes.extend_from_slice(base);
    for file in files {
        let FileState { identity, ctime, ctime_nsec } = file.state();
        let FileIdentity { dev, ino, size, mtime, mtime_nsec } = identity;
        for number in [dev, ino, size, mtime as u64, ctime as u64] {
            bytes.extend_from_slice(&number.to_le_bytes());
        }
        for number in [mtime_nsec, ctime_nsec] {
            bytes.extend_from_slice(&number.to_le_bytes());
        }
    }
    Digest::compute(&bytes)
}

/// The data starts at a multiple of this, so that direct reads and mappings are aligned. Spaces pad the header: the
/// format permits no other padding.
pub const DATA_ALIGNMENT_BYTES: usize = 4096;

/// Bytes of the length before the JSON.
const LENGTH_BYTES: usize = 8;

/// Encodes a header, its length first; `None` if it would be longer than readers take.
///
/// `starts` are the starts of the tensors in the data, and the end of the data.
pub fn encode_header(
    tensors: &[Tensor],
    starts: &[u64],
    metadata: &BTreeMap<String, String>,
) -> Option<Vec<u8>> {
    let mut header = vec![0; LENGTH_BYTES];
    encode_json(&mut header, tensors, starts, metadata).ok()?;
    header.resize(header.len().next_multiple_of(DATA_ALIGNMENT_BYTES), b' ');
    let len = (header.len() - LENGTH_BYTES) as u64;
    header[..LENGTH_BYTES].copy_from_slice(&len.to_le_bytes());
    (len <= MAX_HEADER_BYTES).then_some(header)
}

/// An upper bound for the length of a header, however many characters of its names are escaped.
#[derive(Default)]
pub struct HeaderBound(u64);

impl HeaderBound {
    /// Adds a tensor.
    pub fn add_tensor(&mut self, tensor: &Tensor) {
        // A character takes at most six bytes, a number at most 20. The rest is punctuation and keys.
        self.0 += escaped_bytes(&tensor.name) + 21 * tensor.shape.len() as u64 + 100;
    }

    /// The bound for the tensors so far, the metadata, and everything around them.
    pub fn max_header_bytes(&self, metadata: &BTreeMap<String, String>) -> u64 {
        let pairs =
            metadata.iter().map(|(key, value)| escaped_bytes(key) + escaped_bytes(value) + 6);
        self.0 + pairs.sum::<u64>() + (LENGTH_BYTES + DATA_ALIGNMENT_BYTES + 20) as u64
    }
}

fn escaped_bytes(text: &str) -> u64 {
    6 * text.len() as u64
}

/// Appends the JSON. Fails only if the header is too long.
fn encode_json(
    out: &mut Vec<u8>,
    tensors: &[Tensor],
    starts: &[u64],
    metadata: &BTreeMap<String, String>,
) -> std::io::Result<()> {
    out.extend_from_slice(b"{\"__metadata__\":");
    serde_json::to_writer(&mut *out, metadata)?;
    for (tensor, range) in tensors.iter().zip(starts.windows(2)) {
        if out.len() as u64 > MAX_HEADER_BYTES {
            return Err(std::io::ErrorKind::FileTooLarge.into());
        }
        out.push(b',');
        serde_json::to_writer(&mut *out, &*tensor.name)?;
        out.extend_from_slice(b":{\"dtype\":\"");
        out.extend_from_slice(tensor.dtype.name().as_bytes());
        out.extend_from_slice(b"\",\"shape\":");
        serde_json::to_writer(&mut *out, &*tensor.shape)?;
        out.extend_from_slice(b",\"data_offsets\":");
        serde_json::to_writer(&mut *out, range)?;
        out.push(b'}');
    }
    out.push(b'}');
    Ok(())
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::checkpoint::Dtype;
    use crate::checkpoint::TensorBytes;

    proptest! {
        #[test]
        fn no_header_is_longer_than_it_can_be(
            names in prop::collection::vec(".*", 0..9),
            dims in prop::collection::vec(any::<u64>(), 0..9),
            metadata in prop::collection::btree_map(".*", "[\\x00-\\x20\"]*", 0..5),
        ) {
            let bytes = TensorBytes::Run(ByteRun { origin: OriginId(0), offset: 0, len: 0 });
            let tensor = |name: &String| Tensor {
                name: name.as_str().into(),
                dtype: Dtype::F8E4M3Fnuz,
                shape: dims.clone().into(),
                bytes: bytes.clone(),
            };
            let tensors: Vec<Tensor> = names.iter().map(tensor).collect();
            let starts = vec![u64::MAX; tensors.len() + 1];
            let header = encode_header(&tensors, &starts, &metadata).unwrap();
            let mut bound = HeaderBound::default();
            tensors.iter().for_each(|tensor| bound.add_tensor(tensor));
            prop_assert!(header.len() as u64 <= bound.max_header_bytes(&metadata));
        }
    }
}
