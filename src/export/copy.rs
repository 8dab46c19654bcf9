//! Copies a virtual file's bytes into a file: within the kernel where they lie one after the other. Or streams them.

use std::io::Write;
use std::ops::Range;
use std::os::unix::fs::FileExt;

use rustix::fs::copy_file_range;
use rustix::io::Errno;

use crate::source::OpenFile;
use crate::virtual_file::{ChunkReader, Progress, Segment, SegmentSource, VirtualFileReader};

use super::ordered_writer::OrderedWriter;
use super::{AtomicFile, ExportError};

/// Bytes between two checks of whether to stop: a tenth of a second at the speed of a disk.
const STEP_BYTES: u64 = 64 << 20;

/// Bytes gathered at a time. The more are asked for, the longer the pieces of a transposed matrix.
const BUFFER_BYTES: u64 = 8 << 20;

/// Maximum bytes of all windows in memory at once: the larger parts of tensors that are strided in a store.
const MAX_WINDOW_BYTES: u64 = 512 << 20;

/// Threads that read from a disk.
const DISK_THREADS: usize = 1;

pub fn copy_contents(
    reader: &VirtualFileReader,
    file: &AtomicFile,
    progress: &dyn Progress,
) -> Result<(), ExportError> {
    let virtual_file = reader.virtual_file();
    let write = |bytes: &[u8], at| {
        let written = file.file().write_all_at(bytes, at);
        written.map_err(|e| ExportError::io(file.path(), "write it", e))
    };
    if reader.chunk_threads(DISK_THREADS) > DISK_THREADS {
        return read_chunks(reader, progress, |bytes, _, start| write(bytes?, start));
    }
    let mut buffer = Vec::new();
    // Whether these filesystems copy within the kernel: learnt at the first attempt.
    let mut in_kernel = true;
    for segment in virtual_file.segments(0..virtual_file.size()) {
        let Segment { range, bytes } = segment;
        let mut at = range.start;
        while at < range.end {
            if progress.should_stop() {
                return Err(ExportError::Stopped);
            }
            let source = match bytes {
                SegmentSource::Run { origin, offset } if in_kernel => {
                    reader.file(origin).map(|source| (source, offset + (at - range.start)))
                }
                _ => None,
            };
            let left = range.end - at;
            let copied = match source {
                Some((source, from)) => {
                    copy_in_kernel(source, from, file, at, left.min(STEP_BYTES))?
                }
                None => None,
            };
            in_kernel &= source.is_none() || copied.is_some();
            let copied = match copied {
                Some(copied) => copied,
                None => {
                    buffer.resize(left.min(BUFFER_BYTES) as usize, 0);
                    let read = reader.read_at(&mut buffer, at)?;
                    write(&buffer[..read], at)?;
                    read as u64
                }
            };
            progress.on_bytes(copied);
            at += copied;
        }
    }
    Ok(())
}

/// Writes a virtual file's bytes in order.
pub fn stream_contents(
    reader: &VirtualFileReader,
    out: &mut (dyn Write + Send),
    progress: &dyn Progress,
) -> Result<(), ExportError> {
    let writer = OrderedWriter::new(out);
    let streamed = read_chunks(reader, progress, |bytes, number, _| writer.write(number, bytes));
    streamed.map_err(|error| match error {
        ExportError::Stopped => ExportError::StreamStopped,
        error => error,
    })?;
    writer.flush()
}

/// Reads a virtual file in chunks, several at once where its sources lie in stores. Calls `write` with the bytes of each
/// chunk, or why it cannot be read, its number and its start.
fn read_chunks(
    reader: &VirtualFileReader,
    progress: &dyn Progress,
    write: impl Fn(Result<&[u8], ExportError>, usize, u64) -> Result<(), ExportError> + Sync,
) -> Result<(), ExportError> {
    let chunk_reader = ChunkReader::new(BUFFER_BYTES, MAX_WINDOW_BYTES);
    let chunks = chunk_reader.chunks(reader);
    let threads = reader.chunk_threads(DISK_THREADS);
    let should_stop = || progress.should_stop();
    let is_complete =
        chunk_reader.for_each(&chunks, threads, should_stop, |[buffer], number| {
            let Range { start, end } = chunks[number];
            let read = chunk_reader.read(reader, &(start..end), buffer, should_stop);
            let bytes =
                read.map_err(ExportError::from).and_then(|read| read.ok_or(ExportError::Stopped));
            write(bytes, number, start)?;
            progress.on_bytes(end - start);
            Ok::<_, ExportError>(())
        })?;
    if is_complete { Ok(()) } else { Err(ExportError::Stopped) }
}

/// Copies within the kernel, and returns how many bytes. `None` where it cannot between these two files.
fn copy_in_kernel(
    source: &OpenFile,
    from: u64,
    to: &AtomicFile,
    at: u64,
    len: u64,
) -> Result<Option<u64>, ExportError> {
    let Some(descriptor) = source.descriptor() else { return Ok(None) };
    let (mut from_offset, mut to_offset) = (from, at);
    loop {
        let copied = copy_file_range(
            descriptor,
            Some(&mut from_offset),
            to.file(),
            Some(&mut to_offset),
            len as usize,
        );
        return match copied {
            Ok(0) => {
                // The source is shorter than it was when it was parsed.
                source.check_unchanged()?;
                Ok(None)
            }
            Ok(copied) => Ok(Some(copied as u64)),
            Err(Errno::INTR) => continue,
            Err(Errno::XDEV | Errno::INVAL | Errno::NOSYS | Errno::OPNOTSUPP | Errno::PERM) => {
                Ok(None)
            }
            Err(error) => Err(ExportError::io(to.path(), "copy into it", error)),
        };
    }
}
