//! Writes chunks in order that several threads read.

use std::io::{self, Write};
use std::sync::{Condvar, Mutex, PoisonError};

use crate::threads::lock;

use super::ExportError;

/// A writer that takes each chunk in its turn. Threads that read ahead wait there.
pub struct OrderedWriter<'a> {
    state: Mutex<WriterState<'a>>,
    turn: Condvar,
}

struct WriterState<'a> {
    out: &'a mut (dyn Write + Send),
    next_chunk: usize,
    has_failed: bool,
}

impl<'a> OrderedWriter<'a> {
    pub fn new(out: &'a mut (dyn Write + Send)) -> Self {
        let state = WriterState { out, next_chunk: 0, has_failed: false };
        OrderedWriter { state: Mutex::new(state), turn: Condvar::new() }
    }

    /// Writes a chunk when those before it are written. An error ends the wait of all threads. It is returned to the
    /// thread that has it, and the others write nothing more.
    pub fn write(
        &self,
        chunk: usize,
        bytes: Result<&[u8], ExportError>,
    ) -> Result<(), ExportError> {
        let is_read = bytes.is_ok();
        let must_wait =
            |state: &mut WriterState<'_>| is_read && !state.has_failed && state.next_chunk != chunk;
        let state = self.turn.wait_while(lock(&self.state), must_wait);
        let mut state = state.unwrap_or_else(PoisonError::into_inner);
        if state.has_failed {
            return bytes.map(|_| ());
        }
        let written = bytes.and_then(|bytes| state.out.write_all(bytes).map_err(stream_error));
        state.next_chunk += 1;
        state.has_failed = written.is_err();
        self.turn.notify_all();
        written
    }

    pub fn flush(&self) -> Result<(), ExportError> {
        lock(&self.state).out.flush().map_err(stream_error)
    }
}

fn stream_error(source: io::Error) -> ExportError {
    ExportError::Stream { source }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn chunks_are_written_in_order_up_to_an_error() {
        let mut out = Vec::new();
        let writer = OrderedWriter::new(&mut out);
        let write = |chunk: usize| writer.write(chunk, Ok(&[chunk as u8; 3]));
        std::thread::scope(|scope| {
            let others: Vec<_> = [2, 1, 4, 5].map(|chunk| scope.spawn(move || write(chunk))).into();
            write(0).unwrap();
            let failed = writer.write(3, Err(ExportError::Stopped));
            assert!(matches!(failed, Err(ExportError::Stopped)));
            for other in others {
                other.join().unwrap().unwrap();
            }
        });
        assert!(out.starts_with(&[0, 0, 0]) && [0, 0, 0, 1, 1, 1, 2, 2, 2].starts_with(&out));
    }
}
