//! The virtual file: a checkpoint laid out as one valid safetensors file.
//!
//! In: a [`Checkpoint`]. Out: a [`VirtualFile`], an immutable value: header, size, which bytes come from
//! where ([`VirtualFile::segments`]), and two hashes. [`VirtualFile::virtual_file`] gives a [`Reader`], which holds the
//! sources open and fills any range of the virtual file from any thread.
//!
//! The same checkpoint always gives the same virtual file, byte for byte.

mod error;
mod header;
mod layout;
mod reader;

use std::collections::BTreeMap;
use std::fmt;
use std::ops::Range;
use std::sync::{Arc, OnceLock};

use crate::checkpoint::{Checkpoint, Origin, OriginId, ParseOptions, Tensor};
use crate::source::{self, OpenFile};

pub use error::VirtualFileError;
pub use header::DATA_ALIGNMENT_BYTES;
pub use reader::VirtualFileReader;

/// A hash, shown as 32 hexadecimal digits.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Digest([u8; 16]);

impl fmt::Display for Digest {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.iter().try_for_each(|byte| write!(f, "{byte:02x}"))
    }
}

/// A checkpoint as one virtual safetensors file.
#[derive(Debug)]
pub struct VirtualFile {
    /// In the order of the virtual file.
    tensors: Box<[Tensor]>,
    /// Where each tensor starts, from the start of the data; one more, for the end of the last.
    starts: Box<[u64]>,
    origins: Box<[Origin]>,
    source_files: Box<[Arc<source::SourceFile>]>,
    metadata: BTreeMap<String, String>,
    source_has_metadata: bool,
    source_has_format: bool,
    options: ParseOptions,
    /// Written when it is first asked for: who only loads tensors never does.
    file_layout: OnceLock<FileLayout>,
    /// Asked at every opening, and summed over every tensor.
    memory_bytes: OnceLock<u64>,
}

/// What stands in the file before the data, and what follows from it.
#[derive(Debug)]
struct FileLayout {
    header: Arc<[u8]>,
    /// Where each piece starts in the virtual file, beside `pieces`.
    piece_starts: Box<[u64]>,
    pieces: Box<[LayoutPiece]>,
    layout_hash: Digest,
    identity: Digest,
}

/// What a range of the virtual file is made of. Ranges of an origin that follow one another are one piece.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum LayoutPiece {
    Header,
    Run {
        origin: OriginId,
        offset: u64,
    },
    /// A tensor whose bytes do not lie one after the other, by its place in the virtual file.
    Tensor(u32),
}

/// A part of the virtual file, and where its bytes come from.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Segment {
    /// The part of the virtual file.
    pub range: Range<u64>,
    /// Where its bytes come from.
    pub bytes: SegmentSource,
}

/// Where the bytes of a segment come from.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum SegmentSource {
    /// The header, from this byte on.
    Header(u64),
    /// An origin, from this byte on.
    Run {
        /// Which origin.
        origin: OriginId,
        /// From which of its bytes.
        offset: u64,
    },
    /// A tensor that has to be gathered or turned round, from this byte on.
    Tensor {
        /// Its place in [`VirtualFile::tensors`].
        index: usize,
        /// From which of its bytes.
        offset: u64,
    },
}

impl VirtualFile {
    /// Lays a checkpoint out. Refuses one of which something cannot be shown, unless its options
    /// allow a part.
    pub fn new(checkpoint: Checkpoint) -> Result<VirtualFile, VirtualFileError> {
        layout::build(checkpoint)
    }

    /// A file as it is, whatever it holds: one piece, and no header and tensors that we know of.
    pub fn plain(file: Arc<source::SourceFile>) -> VirtualFile {
        layout::plain(file)
    }

    /// A file of these bytes, which lies in no source: all of it is header.
    pub fn from_bytes(bytes: Vec<u8>) -> VirtualFile {
        layout::from_bytes(bytes)
    }

    /// Whether it is a file as it is.
    pub fn is_plain(&self) -> bool {
        self.header().is_empty()
    }

    fn file_layout(&self) -> &FileLayout {
        self.file_layout.get_or_init(|| layout::lay_out(self))
    }

    /// Bytes of the whole file.
    pub fn size(&self) -> u64 {
        self.header_size() + self.starts.last().copied().unwrap_or(0)
    }

    /// Bytes before the data, the eight of the length included: a multiple of 4,096.
    pub fn header_size(&self) -> u64 {
        self.header().len() as u64
    }

    /// The header as it stands in the file, its length first.
    pub fn header(&self) -> &[u8] {
        &self.file_layout().header
    }

    /// The tensors in the order of the file.
    pub fn tensors(&self) -> &[Tensor] {
        &self.tensors
    }

    /// The part of the file that a tensor takes, by its place in [`VirtualFile::tensors`].
    pub fn tensor_range(&self, index: usize) -> Range<u64> {
        let data = self.header_size();
        data + self.starts[index]..data + self.starts[index + 1]
    }

    /// The place of the tensor that has a byte of the file; `None` in the header and past the end.
    pub fn tensor_at(&self, offset: u64) -> Option<usize> {
        let offset = offset.checked_sub(self.header_size())?;
        // The last that starts at or before it: those that start at the same byte are empty.
        let place = self.starts.partition_point(|&start| start <= offset).checked_sub(1)?;
        (place < self.tensors.len()).then_some(place)
    }

    /// What holds the bytes.
    pub fn origins(&self) -> &[Origin] {
        &self.origins
    }

    /// The source files, the index of a set included.
    pub fn source_files(&self) -> &[Arc<source::SourceFile>] {
        &self.source_files
    }

    /// The metadata in the header.
    pub fn metadata(&self) -> &BTreeMap<String, String> {
        &self.metadata
    }

    /// Whether the source has metadata, even if empty; if not, only the virtual file has it.
    pub fn source_has_metadata(&self) -> bool {
        self.source_has_metadata
    }

    /// Whether the source says of itself what `format` in the metadata says, or the virtual file added it.
    pub fn source_has_format(&self) -> bool {
        self.source_has_format
    }

    /// A hash of the header: names, types, shapes and order. The same checkpoint has the same one
    /// wherever it lies.
    pub fn layout_hash(&self) -> Digest {
        self.file_layout().layout_hash
    }

    /// A hash of the sources' identities, the options and the layout: what two programs compare to
    /// know that they see the same bytes.
    pub fn identity(&self) -> Digest {
        self.file_layout().identity
    }

    /// About how many bytes of memory it takes.
    pub fn memory_bytes(&self) -> u64 {
        *self.memory_bytes.get_or_init(|| self.compute_memory_bytes())
    }

    fn compute_memory_bytes(&self) -> u64 {
        let name = |tensor: &Tensor| {
            let spilled = if tensor.shape.spilled() { tensor.shape.capacity() } else { 0 };
            tensor.name.len() + spilled * size_of::<u64>()
        };
        let tensors = size_of_val(&*self.tensors) + self.tensors.iter().map(name).sum::<usize>();
        let FileLayout { piece_starts, pieces, .. } = self.file_layout();
        let pieces = size_of_val(&**piece_starts) + size_of_val(&**pieces);
        let unpacked = self.origins.iter().map(|origin| match origin {
            Origin::File(_) => size_of::<source::SourceFile>(),
            Origin::Memory(bytes) => bytes.len(),
        });
        let parts = self.header().len() + tensors + size_of_val(&*self.starts) + pieces;
        (parts + unpacked.sum::<usize>()) as u64
    }

    /// The segments of a range, cut to it, in order. What lies past the end has none.
    pub fn segments(&self, range: Range<u64>) -> impl Iterator<Item = Segment> {
        let FileLayout { piece_starts, pieces, .. } = self.file_layout();
        let size = self.size();
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
                LayoutPiece::Tensor(place) => {
                    SegmentSource::Tensor { index: place as usize, offset: into }
                }
            };
            Some(Segment { range, bytes })
        })
    }

    /// Opens the sources, and refuses any that is not what was parsed.
    pub fn open(self: &Arc<Self>) -> Result<VirtualFileReader, VirtualFileError> {
        VirtualFileReader::new(Arc::clone(self), None)
    }

    /// The same, where the one file that was parsed may still be open.
    pub fn open_with_file(
        self: &Arc<Self>,
        open_file: Option<OpenFile>,
    ) -> Result<VirtualFileReader, VirtualFileError> {
        VirtualFileReader::new(Arc::clone(self), open_file)
    }
}
