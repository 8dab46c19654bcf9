//! Reads where the bytes of each piece lie: a piece is an archive of torch with one tensor, inside a file with others.

use std::ops::Range;

use crate::checkpoint::options::ParseOptions;
use crate::checkpoint::tensor::{OriginId, TensorBox, TensorBytes};
use crate::checkpoint::torch::{self, TorchError};
use crate::checkpoint::training_error::TrainingError;
use crate::source::{OpenFile, ReadAt, SourceError};
use crate::threads::parallel_map;

use super::table::{TablePiece, TableTensor};

/// Pieces that a thread takes at a time.
const MAX_BATCH_LEN: usize = 64;

/// Bytes of the first and of the last read of a piece. All of an archive but the tensor fits in them: torch writes
/// records of a few hundred bytes before and after it.
const EDGE_BYTES: u64 = 2048;

/// The index of a tensor, and that of a piece among its pieces.
type PieceNumber = (usize, usize);

/// The boxes of each tensor, from its pieces in the open files of a table.
pub fn read_pieces(
    tensors: &[TableTensor],
    files: &[OpenFile],
    threads: usize,
) -> Result<Vec<Vec<TensorBox>>, PieceError> {
    let numbers: Vec<PieceNumber> = (0..tensors.len())
        .flat_map(|n| (0..tensors[n].pieces.len()).map(move |piece| (n, piece)))
        .collect();
    let batch_len = numbers.len().div_ceil(threads).clamp(1, MAX_BATCH_LEN);
    let batches: Vec<&[PieceNumber]> = numbers.chunks(batch_len).collect();
    let read = parallel_map(&batches, threads, |batch| {
        let read = |&(n, piece): &PieceNumber| {
            let (tensor, piece) = (&tensors[n], &tensors[n].pieces[piece]);
            let bytes = read_piece(tensor, piece, &files[piece.file as usize])?;
            let (start, counts) = (piece.start.clone(), piece.counts.clone());
            Ok::<_, PieceError>((n, TensorBox { start, counts, bytes }))
        };
        batch.iter().map(read).collect::<Result<Vec<_>, _>>()
    });
    let mut boxes: Vec<Vec<TensorBox>> =
        tensors.iter().map(|tensor| Vec::with_capacity(tensor.pieces.len())).collect();
    for batch in read {
        batch?.into_iter().for_each(|(n, part)| boxes[n].push(part));
    }
    Ok(boxes)
}

/// Why a piece cannot be read.
pub enum PieceError {
    Source(SourceError),
    Training(TrainingError),
}

impl From<TrainingError> for PieceError {
    fn from(error: TrainingError) -> PieceError {
        PieceError::Training(error)
    }
}

fn read_piece(
    tensor: &TableTensor,
    piece: &TablePiece,
    file: &OpenFile,
) -> Result<TensorBytes, PieceError> {
    let name = || file.file().path().file_name().unwrap_or_default().to_string_lossy().into_owned();
    if piece.range.end > file.size() {
        return Err(TrainingError::ShortFile { tensor: tensor.name.clone(), name: name() }.into());
    }
    let mismatch =
        |what| TrainingError::PieceMismatch { tensor: tensor.name.clone(), name: name(), what };
    let archive = PieceArchive::read(file, piece.range.clone()).map_err(PieceError::Source)?;
    let contents =
        torch::read_zip(&archive, &ParseOptions::default()).map_err(|error| {
            match error.into_source() {
                Ok(error) => PieceError::Source(error),
                Err(TorchError::Zip(_)) if !archive.is_archive() => {
                    mismatch("no torch archive begins there").into()
                }
                Err(error) => TrainingError::Piece {
                    tensor: tensor.name.clone(),
                    name: name(),
                    error: Box::new(error),
                }
                .into(),
            }
        })?;
    if let Some(entry) = contents.refused.into_iter().next() {
        let error = entry.error;
        return Err(TrainingError::Tensor { tensor: tensor.name.clone(), error }.into());
    }
    if !contents.unpacked.is_empty() {
        return Err(mismatch("it is compressed").into());
    }
    let Ok([found]) = <[_; 1]>::try_from(contents.tensors) else {
        return Err(mismatch("it is not a single tensor").into());
    };
    if found.dtype != tensor.dtype {
        return Err(mismatch("its values have another type").into());
    }
    if found.torch_shape() != piece.counts {
        return Err(mismatch("it has another shape").into());
    }
    // torch writes out every value. A small file must not become a virtual petabyte.
    if found.bytes.has_repeats() {
        return Err(mismatch("it repeats its bytes").into());
    }
    let mut bytes = found.bytes;
    bytes.embed(OriginId(piece.file), piece.range.start);
    Ok(bytes)
}

/// The bytes of a piece in its file. Its edges are in memory: they have all that is read except the tensor.
struct PieceArchive<'a> {
    file: &'a OpenFile,
    range: Range<u64>,
    head: Vec<u8>,
    tail: Vec<u8>,
}

impl<'a> PieceArchive<'a> {
    fn read(file: &'a OpenFile, range: Range<u64>) -> Result<PieceArchive<'a>, SourceError> {
        let len = range.end - range.start;
        let read = |from: u64, len: u64| {
            let mut bytes = vec![0; len as usize];
            file.read_exact_at(&mut bytes, from)?;
            Ok::<_, SourceError>(bytes)
        };
        let head = read(range.start, len.min(EDGE_BYTES))?;
        let tail_len = (len - head.len() as u64).min(EDGE_BYTES);
        let tail = read(range.end - tail_len, tail_len)?;
        Ok(PieceArchive { file, range, head, tail })
    }

    /// Whether it begins as an archive does.
    fn is_archive(&self) -> bool {
        self.head.starts_with(b"PK")
    }
}

impl ReadAt for PieceArchive<'_> {
    fn size(&self) -> u64 {
        self.range.end - self.range.start
    }

    fn read_exact_at(&self, buf: &mut [u8], offset: u64) -> Result<(), SourceError> {
        let end = offset.checked_add(buf.len() as u64).filter(|end| *end <= self.size());
        let Some(end) = end else {
            return Err(SourceError::Truncated { path: self.file.file().path(), offset });
        };
        let tail_start = self.size() - self.tail.len() as u64;
        if end <= self.head.len() as u64 {
            buf.copy_from_slice(&self.head[offset as usize..end as usize]);
        } else if offset >= tail_start {
            let from = (offset - tail_start) as usize;
            buf.copy_from_slice(&self.tail[from..from + buf.len()]);
        } else {
            self.file.read_exact_at(buf, self.range.start + offset)?;
        }
        Ok(())
    }
}
