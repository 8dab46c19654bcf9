//! Where commands write: results to standard output, notes to standard error.

use std::io::{self, Write};

use super::terminal_text;

/// Prints a note to standard error. If that is closed or full, the command goes on, and its exit code stays.
pub fn print_note(text: &str) {
    let _ = writeln!(io::stderr(), "ckptfs: note: {}", terminal_text::one_line(text));
}

/// A writer whose reader may close it early (`| head`): the command still runs to its exit code.
pub struct BrokenPipeFilter<W>(pub W);

impl<W: Write> BrokenPipeFilter<W> {
    fn unless_closed<T>(result: io::Result<T>, fallback: T) -> io::Result<T> {
        match result {
            Err(error) if error.kind() == io::ErrorKind::BrokenPipe => Ok(fallback),
            result => result,
        }
    }
}

impl<W: Write> Write for BrokenPipeFilter<W> {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        Self::unless_closed(self.0.write(bytes), bytes.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Self::unless_closed(self.0.flush(), ())
    }
}
