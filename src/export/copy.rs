//! Copies a virtual file's bytes into a file: within the kernel where they lie one after the other. Or streams them.

use std::io::Write;
use std::os::unix::fs::FileExt;

use rustix::fs::copy_file_range;
use rustix::io::Errno;

use crate::source::OpenFile;
use crate::virtual_file::{Segment, SegmentSource, VirtualFileReader, for_each_chunk};

use super::ordered_writer::OrderedWriter;
use super::{AtomicFile, ExportError, ExportProgress};

/// Bytes between two checks of whether to stop: a tenth of a second at the speed of a disk.
const STEP_BYTES: u64 = 64 << 20;

/// Bytes gathered at a time. The more are asked for, the longer the pieces of a transposed matrix.
const BUFFER_BYTES: u64 = 8 << 20;

/// Threads that read from a disk.
const DISK_THREADS: usize = 1;

pub fn copy_contents(
    reader: &VirtualFileReader,
    file: &AtomicFile,
    progress: &dyn ExportProgress,
) -> Result<(), ExportError> {
    let virtual_file = reader.virtual_file();
    let write = |bytes: &[u8], at| {
        let written = file.file().write_all_at(bytes, at);
        written.map_err(|e| ExportError::io(file.path(), "write it", e))
    };
    if reader.chunk_threads(DISK_THREADS) > DISK_THREADS {
        return read_chunks(reader, progress, |bytes, chunk| {
            write(bytes?, chunk as u64 * BUFFER_BYTES)
        });
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
            progress.on_write(copied);
            at += copied;
        }
    }
    Ok(())
}

/// Writes a virtual file's bytes in order.
pub fn stream_contents(
    reader: &VirtualFileReader,
    out: &mut (dyn Write + Send),
    progress: &dyn ExportProgress,
) -> Result<(), ExportError> {
    let writer = OrderedWriter::new(out);
    let streamed = read_chunks(reader, progress, |bytes, chunk| writer.write(chunk, bytes));
    streamed.map_err(|error| match error {
        ExportError::Stopped => ExportError::StreamStopped,
        error => error,
    })?;
    writer.flush()
}

/// Reads a virtual file in chunks, several at once where its sources lie in stores. Calls `write` with the bytes of each
/// chunk, or why it cannot be read, and its number.
fn read_chunks(
    reader: &VirtualFileReader,
    progress: &dyn ExportProgress,
    write: impl Fn(Result<&[u8], ExportError>, usize) -> Result<(), ExportError> + Sync,
) -> Result<(), ExportError> {
    let size = reader.virtual_file().size();
    let chunks = size.div_ceil(BUFFER_BYTES) as usize;
    let threads = reader.chunk_threads(DISK_THREADS);
    let buffer = || vec![0; size.min(BUFFER_BYTES) as usize];
    let should_stop = || progress.should_stop();
    let is_complete = for_each_chunk(chunks, threads, should_stop, buffer, |buffer, chunk| {
        let read = reader.read_at(buffer, chunk as u64 * BUFFER_BYTES);
        let bytes = read.map(|read| &buffer[..read]).map_err(ExportError::from);
        let len = bytes.as_ref().map_or(0, |bytes| bytes.len());
        write(bytes, chunk)?;
        progress.on_write(len as u64);
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
