//! The limit on the files that this process may have open.

use rustix::io::Errno;
use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};

/// Raises the soft limit on open files to the hard one. Returns whether that allows more files.
pub fn raise_file_limit() -> bool {
    let limit = getrlimit(Resource::Nofile);
    let is_raised = limit.current != limit.maximum;
    is_raised && setrlimit(Resource::Nofile, Rlimit { current: limit.maximum, ..limit }).is_ok()
}

/// Opens a file. If that fails at the soft limit, raises it and tries again.
///
/// A checkpoint of a thousand files needs a thousand of them. The limit stays raised, which harms only programs that
/// pass later files to `select`.
pub fn open_within_limit<T>(open: impl Fn() -> Result<T, Errno>) -> Result<T, Errno> {
    match open() {
        // Another thread may have raised it meanwhile.
        Err(Errno::MFILE) => {
            raise_file_limit();
            open()
        }
        opened => opened,
    }
}
