//! Reads any range of an image from its sources, held open.

use std::ops::Range;
use std::sync::Arc;

use crate::checkpoint::{Bytes, Origin, OriginId};
use crate::source::{self, OpenFile, ReadAt};

use super::{Error, Image, SegmentBytes, gather};

/// An image whose sources are held open.
///
/// Any number of threads read at once; there is no lock. Nothing larger than the request is
/// allocated, and nothing at all where the bytes lie one after the other.
#[derive(Debug)]
pub struct Reader {
    image: Arc<Image>,
    sources: Box<[OpenOrigin]>,
}

#[derive(Debug)]
enum OpenOrigin {
    File(OpenFile),
    Memory(Arc<[u8]>),
}

impl OpenOrigin {
    fn bytes(&self) -> &dyn ReadAt {
        match self {
            OpenOrigin::File(file) => file,
            OpenOrigin::Memory(bytes) => bytes,
        }
    }
}

impl Reader {
    pub(super) fn new(image: Arc<Image>) -> Result<Reader, Error> {
        let open = |origin: &Origin| match origin {
            Origin::File(file) => file.open().map(OpenOrigin::File),
            Origin::Memory(bytes) => Ok(OpenOrigin::Memory(Arc::clone(bytes))),
        };
        let sources = image.origins().iter().map(open).collect::<Result<_, _>>()?;
        Ok(Reader { image, sources })
    }

    /// The image that is read.
    pub fn image(&self) -> &Arc<Image> {
        &self.image
    }

    /// The open file of an origin, if it is one: to copy from it without reading it.
    pub fn file(&self, origin: OriginId) -> Option<&OpenFile> {
        match self.sources.get(origin.0 as usize)? {
            OpenOrigin::File(file) => Some(file),
            OpenOrigin::Memory(_) => None,
        }
    }

    /// Fills `buf` with the image's bytes from `offset`, and says how many there are: fewer than
    /// asked only at the end. If a source changed since it was parsed, this is an error and `buf`
    /// holds nothing of worth.
    pub fn read_at(&self, buf: &mut [u8], offset: u64) -> Result<usize, Error> {
        let end = offset.saturating_add(buf.len() as u64).min(self.image.size());
        if offset >= end {
            return Ok(0);
        }
        let mut used: Option<OriginId> = None;
        for segment in self.image.segments(offset..end) {
            let Range { start, end } = segment.range;
            let out = &mut buf[(start - offset) as usize..(end - offset) as usize];
            let origin = match segment.bytes {
                SegmentBytes::Header(from) => {
                    let from = from as usize;
                    out.copy_from_slice(&self.image.header()[from..from + out.len()]);
                    continue;
                }
                SegmentBytes::Run { origin, offset } => {
                    self.source(origin).bytes().read_exact_at(out, offset)?;
                    origin
                }
                SegmentBytes::Tensor { place, offset } => {
                    let bytes = &self.image.tensors()[place].bytes;
                    self.read_tensor(bytes, offset, out)?;
                    bytes.reach().0
                }
            };
            // Each source is looked at once, after the last read from it.
            if let Some(before) = used.replace(origin).filter(|before| *before != origin) {
                self.check_unchanged(before)?;
            }
        }
        if let Some(last) = used {
            self.check_unchanged(last)?;
        }
        Ok((end - offset) as usize)
    }

    /// Refuses if anything about any source changed since it was parsed, also what leaves its bytes as
    /// they are: for those who open the image now, and can be given a new one.
    pub fn check_all_untouched(&self) -> Result<(), Error> {
        let mut files = self.sources.iter().filter_map(|source| match source {
            OpenOrigin::File(file) => Some(file),
            OpenOrigin::Memory(_) => None,
        });
        Ok(files.try_for_each(OpenFile::check_untouched)?)
    }

    /// Refuses if any source changed since it was parsed.
    pub fn check_all_unchanged(&self) -> Result<(), Error> {
        (0..self.sources.len() as u32).try_for_each(|origin| self.check_unchanged(OriginId(origin)))
    }

    /// The origins of an image are numbered by the checkpoint that it was made of.
    fn source(&self, origin: OriginId) -> &OpenOrigin {
        &self.sources[origin.0 as usize]
    }

    fn check_unchanged(&self, origin: OriginId) -> Result<(), Error> {
        match self.source(origin) {
            OpenOrigin::File(file) => Ok(file.check_unchanged()?),
            OpenOrigin::Memory(_) => Ok(()),
        }
    }

    fn read_tensor(&self, bytes: &Bytes, offset: u64, out: &mut [u8]) -> Result<(), source::Error> {
        let source = self.source(bytes.reach().0).bytes();
        match bytes {
            Bytes::Run(run) => source.read_exact_at(out, run.offset + offset),
            Bytes::Grid(grid) => gather::gather(source, grid, offset, out),
            Bytes::Swapped { unit, of } => {
                let read = |out: &mut [u8], from: u64| self.read_tensor(of, from, out);
                gather::swapped(*unit, offset, out, read)
            }
        }
    }
}
