//! Decodes the changes of a tensor by the deltas of a chain: zstd frames of XORed bytes, or of positions and values.
//!
//! A frame is read in parts, and every size that it states is checked first. Changes are kept for as many pages as the
//! allowance permits, from the requested one on. Besides them, only one decoder takes memory.

use std::io::{self, BufRead, Read};
use std::ops::Range;

use zstd::stream::read::Decoder;
use zstd::zstd_safe::get_frame_content_size;

use crate::checkpoint::tensor::DeltaEncoding;
use crate::source::{ReadAt, SourceError};

use super::cache::PatchAllowance;
use super::error::{LayerError, PatchError};
use super::pages::{Changes, PAGE_BYTES, PageGroup, Patch};

/// Bytes of compressed changes that are read at once.
const BLOB_READ_BYTES: usize = 128 << 10;

/// The largest window of a frame, as a power of two: 8 MiB, which every decoder must support. The level that trainers
/// use takes 512 KiB.
const MAX_WINDOW_LOG: u32 = 23;

/// The longest header of a frame.
const MAX_FRAME_HEADER_BYTES: usize = 18;

/// Minimum pages of a decoded patch, whatever the allowance: 1 MiB.
const MIN_PATCH_PAGES: u64 = 16;

/// Maximum pages of a decoded patch: 4 GiB. Its empty pages alone take some megabytes.
const MAX_PATCH_PAGES: u64 = 1 << 16;

/// Bytes of memory that a change takes until its page is made: its offset and its value.
const CHANGE_BYTES: u64 = 3;

/// The compressed changes by one delta.
#[derive(Clone, Copy)]
pub struct LayerSource<'a> {
    pub source: &'a dyn ReadAt,
    pub offset: u64,
    pub len: u64,
    pub encoding: DeltaEncoding,
}

/// Decodes changes of a tensor of `len` bytes, from the page of `at` on.
pub fn decode(
    layers: &[LayerSource<'_>],
    len: u64,
    at: u64,
    allowance: &mut PatchAllowance<'_>,
) -> Result<Patch, LayerError> {
    let first = at / PAGE_BYTES;
    let end = len.div_ceil(PAGE_BYTES).min(first + MAX_PATCH_PAGES);
    let mut window = Window { first, end, groups: Vec::new(), held: 0, pending: 0, allowance };
    for (number, layer) in layers.iter().enumerate() {
        window.begin_layer(layer.encoding);
        let decoded = match layer.encoding {
            DeltaEncoding::Xor => decode_xor(layer, len, &mut window),
            DeltaEncoding::Overwrite => decode_overwrite(layer, len, &mut window),
        };
        decoded.map_err(|error| LayerError { layer: number, error })?;
    }
    let Window { first, end, groups, held, allowance, .. } = window;
    allowance.force(held);
    Ok(Patch::new(first * PAGE_BYTES..len.min(end * PAGE_BYTES), groups))
}

/// The pages whose changes are kept.
struct Window<'a, 'c> {
    first: u64,
    /// The page behind the last. It is lowered when the allowance is used up.
    end: u64,
    groups: Vec<PageGroup>,
    /// Bytes of memory of the groups.
    held: u64,
    /// Bytes of memory of changes that are not in a group yet.
    pending: u64,
    allowance: &'a mut PatchAllowance<'c>,
}

impl Window<'_, '_> {
    /// Begins the changes by the next delta: in the last group, if that has the same encoding.
    fn begin_layer(&mut self, encoding: DeltaEncoding) {
        if self.groups.last().is_none_or(|last| last.encoding != encoding) {
            let group = PageGroup::new(encoding, (self.end - self.first) as usize);
            self.held += group.memory_bytes();
            self.groups.push(group);
            self.fit(self.first);
        }
    }

    fn contains(&self, page: u64) -> bool {
        (self.first..self.end).contains(&page)
    }

    /// Adds changes of a page to the last group.
    fn add(&mut self, page: u64, changes: Changes) {
        if let (true, Some(group)) = (self.contains(page), self.groups.last_mut()) {
            let more = group.merge((page - self.first) as usize, changes);
            self.held = self.held.saturating_add_signed(more);
            self.fit(page);
        }
    }

    /// Drops the pages from `page` on if the allowance is used up, but keeps [`MIN_PATCH_PAGES`].
    fn fit(&mut self, page: u64) {
        if self.allowance.resize(self.held + self.pending) {
            return;
        }
        self.end = self.end.min(page.max(self.first + MIN_PATCH_PAGES));
        for group in &mut self.groups {
            self.held -= group.truncate((self.end - self.first) as usize);
        }
        self.allowance.force(self.held + self.pending);
    }
}

fn decode_xor(
    layer: &LayerSource<'_>,
    len: u64,
    window: &mut Window<'_, '_>,
) -> Result<(), PatchError> {
    let mut frame = Frame::open(layer, |stated| match stated {
        Some(stated) if stated != len => Err(PatchError::StatedSize { stated, expected: len }),
        _ => Ok(len),
    })?;
    let mut difference = vec![0; PAGE_BYTES.min(len) as usize];
    let pages = len.div_ceil(PAGE_BYTES);
    for page in 0..pages {
        if page >= window.end {
            return Ok(());
        }
        let part = &mut difference[..PAGE_BYTES.min(len - page * PAGE_BYTES) as usize];
        frame.fill(part)?;
        if page >= window.first {
            window.add(page, Changes::from_difference(part));
        }
    }
    frame.end()
}

fn decode_overwrite(
    layer: &LayerSource<'_>,
    len: u64,
    window: &mut Window<'_, '_>,
) -> Result<(), PatchError> {
    let mut frame = Frame::open(layer, |stated| stated.ok_or(PatchError::NoSize))?;
    let mut count = [0; 4];
    frame.fill(&mut count)?;
    let count = u64::from(u32::from_le_bytes(count));
    if count > len {
        return Err(PatchError::Count { count, len });
    }
    let expected = 4 + 5 * count;
    if frame.expected != expected {
        return Err(PatchError::StatedSize { stated: frame.expected, expected });
    }
    let Positions { pages, skipped } = read_positions(&mut frame, count, len, window)?;
    frame.skip(skipped)?;
    for (page, offsets) in pages {
        if !window.contains(page) {
            break;
        }
        let mut values = vec![0; offsets.len()];
        frame.fill(&mut values)?;
        window.pending -= offsets.len() as u64 * CHANGE_BYTES;
        window.add(page, Changes { offsets, values });
    }
    window.pending = 0;
    // What lies behind the window is for another decoding.
    if window.end * PAGE_BYTES < len { Ok(()) } else { frame.end() }
}

/// The positions of changed bytes.
struct Positions {
    /// The offsets in each page of the window that has any.
    pages: Vec<(u64, Vec<u16>)>,
    /// The number of changes before the window.
    skipped: u64,
}

fn read_positions(
    frame: &mut Frame<'_>,
    count: u64,
    len: u64,
    window: &mut Window<'_, '_>,
) -> Result<Positions, PatchError> {
    let mut found = Positions { pages: Vec::new(), skipped: 0 };
    let mut buffer = vec![0; (4 * count).min(PAGE_BYTES) as usize];
    let (mut left, mut previous) = (count, None);
    while left > 0 {
        let part = &mut buffer[..(4 * left).min(PAGE_BYTES) as usize];
        frame.fill(part)?;
        let (positions, _) = part.as_chunks::<4>();
        left -= positions.len() as u64;
        for position in positions {
            let position = u64::from(u32::from_le_bytes(*position));
            if position >= len {
                return Err(PatchError::OutOfRange { position, len });
            }
            if let Some(previous) = previous.replace(position).filter(|last| *last >= position) {
                return Err(PatchError::Unordered { position, previous });
            }
            let page = position / PAGE_BYTES;
            if page < window.first {
                found.skipped += 1;
            } else if page < window.end {
                let offset = (position % PAGE_BYTES) as u16;
                match found.pages.last_mut() {
                    Some((last, offsets)) if *last == page => offsets.push(offset),
                    last => {
                        window.pending +=
                            last.map_or(0, |(_, offsets)| offsets.len() as u64 * CHANGE_BYTES);
                        window.fit(page);
                        if page < window.end {
                            found.pages.push((page, vec![offset]));
                        }
                    }
                }
            }
        }
    }
    let last = found.pages.last().map_or(0, |(_, offsets)| offsets.len() as u64 * CHANGE_BYTES);
    window.pending += last;
    Ok(found)
}

/// A zstd frame that is read from its start to its end.
struct Frame<'a> {
    decoder: Decoder<'static, BlobReader<'a>>,
    /// Bytes that it must hold.
    expected: u64,
    left: u64,
}

impl<'a> Frame<'a> {
    /// Opens the frame of a layer. `expected_size` checks the size that it states, and returns the bytes that it must hold.
    fn open(
        layer: &LayerSource<'a>,
        expected_size: impl FnOnce(Option<u64>) -> Result<u64, PatchError>,
    ) -> Result<Frame<'a>, PatchError> {
        let mut blob = BlobReader::new(layer);
        let header = blob.fill_buf().map_err(frame_error)?;
        let header = &header[..header.len().min(MAX_FRAME_HEADER_BYTES)];
        let stated = get_frame_content_size(header)
            .map_err(|_| PatchError::Frame("it has no header of one".to_owned()))?;
        let expected = expected_size(stated)?;
        let mut decoder = Decoder::with_buffer(blob).map_err(frame_error)?.single_frame();
        decoder.window_log_max(MAX_WINDOW_LOG).map_err(frame_error)?;
        Ok(Frame { decoder, expected, left: expected })
    }

    fn fill(&mut self, out: &mut [u8]) -> Result<(), PatchError> {
        let short = PatchError::Short { expected: self.expected };
        self.left = match self.left.checked_sub(out.len() as u64) {
            Some(left) => left,
            None => return Err(short),
        };
        self.decoder.read_exact(out).map_err(|error| match error.kind() {
            io::ErrorKind::UnexpectedEof => short,
            _ => frame_error(error),
        })
    }

    fn skip(&mut self, mut bytes: u64) -> Result<(), PatchError> {
        let mut scratch = vec![0; bytes.min(PAGE_BYTES) as usize];
        while bytes > 0 {
            let len = bytes.min(PAGE_BYTES);
            self.fill(&mut scratch[..len as usize])?;
            bytes -= len;
        }
        Ok(())
    }

    /// Fails unless the frame ends here, and its blob with it.
    fn end(mut self) -> Result<(), PatchError> {
        let long = || PatchError::Long { expected: self.expected };
        let is_over = self.decoder.read(&mut [0]).map_err(frame_error)? == 0;
        if !is_over || self.left > 0 {
            return Err(long());
        }
        let expected = self.expected;
        let mut blob = self.decoder.finish();
        match blob.fill_buf().map_err(frame_error)? {
            [] => Ok(()),
            _ => Err(PatchError::Long { expected }),
        }
    }
}

fn frame_error(error: io::Error) -> PatchError {
    match error.downcast::<SourceError>() {
        Ok(error) => PatchError::Source(error),
        Err(error) => PatchError::Frame(error.to_string()),
    }
}

/// Reads the compressed bytes of a layer from its file.
struct BlobReader<'a> {
    source: &'a dyn ReadAt,
    offset: u64,
    left: u64,
    buffer: Box<[u8]>,
    /// The part of the buffer that is not consumed.
    unread: Range<usize>,
}

impl<'a> BlobReader<'a> {
    fn new(layer: &LayerSource<'a>) -> BlobReader<'a> {
        let buffer = vec![0; layer.len.min(BLOB_READ_BYTES as u64) as usize].into();
        BlobReader {
            source: layer.source,
            offset: layer.offset,
            left: layer.len,
            buffer,
            unread: 0..0,
        }
    }
}

impl BufRead for BlobReader<'_> {
    fn fill_buf(&mut self) -> io::Result<&[u8]> {
        if self.unread.is_empty() && self.left > 0 {
            let len = self.left.min(self.buffer.len() as u64);
            let part = &mut self.buffer[..len as usize];
            self.source.read_exact_at(part, self.offset).map_err(io::Error::other)?;
            self.unread = 0..part.len();
            self.offset += len;
            self.left -= len;
        }
        Ok(&self.buffer[self.unread.clone()])
    }

    fn consume(&mut self, bytes: usize) {
        self.unread.start += bytes;
    }
}

impl Read for BlobReader<'_> {
    fn read(&mut self, out: &mut [u8]) -> io::Result<usize> {
        let available = self.fill_buf()?;
        let len = available.len().min(out.len());
        out[..len].copy_from_slice(&available[..len]);
        self.consume(len);
        Ok(len)
    }
}

#[cfg(test)]
#[path = "decode_tests.rs"]
mod tests;
