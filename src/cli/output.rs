//! Where commands write: results to standard output, notes to standard error.

use std::collections::BTreeSet;
use std::io::{self, Write};
use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, Ordering};

use crate::threads::lock;

use super::terminal_text;

/// Whether notes and progress are left out.
static IS_QUIET: AtomicBool = AtomicBool::new(false);

/// The notes that this process has printed.
static PRINTED_NOTES: Mutex<BTreeSet<String>> = Mutex::new(BTreeSet::new());

/// Leaves out notes and progress from now on.
pub fn set_quiet() {
    IS_QUIET.store(true, Ordering::Relaxed);
}

pub fn is_quiet() -> bool {
    IS_QUIET.load(Ordering::Relaxed)
}

/// Prints a note to standard error, unless it was printed before or none is wanted. If standard error is closed or
/// full, the command goes on, and its exit code stays.
pub fn print_note(text: &str) {
    if is_quiet() || !lock(&PRINTED_NOTES).insert(text.to_owned()) {
        return;
    }
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
