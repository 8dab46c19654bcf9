//! Reading past the page cache: a second descriptor of the same file, with `O_DIRECT`.

use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::path::PathBuf;
use std::sync::Arc;

use rustix::fs::{CWD, Mode, OFlags};
use rustix::io::Errno;

use super::{FileIdentity, OpenFile, SourceError, SourceFile};

/// What offsets, lengths and buffers must be multiples of: what every disk in use asks for, or more.
pub const DIRECT_ALIGNMENT_BYTES: usize = 4096;

/// A source file open for reading past the page cache.
#[derive(Debug)]
pub struct DirectFile {
    fd: OwnedFd,
    file: Arc<SourceFile>,
}

/// How a direct read went, if not wrong.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum DirectReadOutcome {
    /// Every byte is there.
    Complete,
    /// The filesystem does not read this file so, whatever it said when it was opened.
    Unsupported,
}

impl OpenFile {
    /// Opens the same file once more, for direct reads. `None` where its filesystem has none, or
    /// the file is no longer to be opened: reading it the ordinary way goes on.
    pub fn open_direct(&self) -> Option<DirectFile> {
        let fd = self.reopen(OFlags::DIRECT)?;
        Some(DirectFile { fd, file: Arc::clone(&self.file) })
    }

    /// Another descriptor of the same file, with its own flags.
    pub(super) fn reopen(&self, flags: OFlags) -> Option<OwnedFd> {
        let flags = flags | OFlags::RDONLY | OFlags::NONBLOCK | OFlags::NOCTTY | OFlags::CLOEXEC;
        // The way by descriptor also leads to a file whose name is gone.
        let own = PathBuf::from(format!("/proc/self/fd/{}", self.fd.as_raw_fd()));
        let fd = match rustix::fs::openat(CWD, &own, flags, Mode::empty()) {
            Ok(fd) => fd,
            Err(Errno::NOENT | Errno::ACCESS | Errno::PERM | Errno::LOOP) => {
                self.file.location.open_with_flags(flags).ok()?
            }
            Err(_) => return None,
        };
        let stat = rustix::fs::fstat(&fd).ok()?;
        (FileIdentity::from(&stat) == self.file.identity()).then_some(fd)
    }
}

impl AsFd for DirectFile {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.fd.as_fd()
    }
}

impl DirectFile {
    /// Fills `buf` from `offset`, both aligned; but for the end of the file, where only the bytes
    /// up to it are read. Fewer than those are an error.
    ///
    /// Like every read, it must be followed by [`OpenFile::check_unchanged`].
    pub(super) fn read_exact_at(
        &self,
        buf: &mut [u8],
        offset: u64,
    ) -> Result<DirectReadOutcome, SourceError> {
        let wanted =
            self.file.identity().size.saturating_sub(offset).min(buf.len() as u64) as usize;
        let mut done = 0;
        while done < wanted {
            match rustix::io::pread(&self.fd, &mut buf[done..], offset + done as u64) {
                Ok(n) if n > 0 && (done + n >= wanted || n % DIRECT_ALIGNMENT_BYTES == 0) => {
                    done += n
                }
                // It ended before its own end.
                Ok(_) => return Err(SourceError::Truncated { path: self.file.path(), offset }),
                Err(Errno::INTR) => {}
                Err(Errno::INVAL | Errno::OPNOTSUPP) => return Ok(DirectReadOutcome::Unsupported),
                Err(e) => return Err(SourceError::io(&self.file.path(), "read it", e)),
            }
        }
        Ok(DirectReadOutcome::Complete)
    }
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use memmap2::MmapMut;

    use super::*;
    use crate::source::{LinkPolicy, Root};

    fn open(bytes: &[u8]) -> (tempfile::TempDir, OpenFile) {
        // Not /tmp, which may be of memory, where older kernels read nothing directly.
        let dir = tempfile::tempdir_in(env!("CARGO_MANIFEST_DIR")).unwrap();
        std::fs::write(dir.path().join("f"), bytes).unwrap();
        let (root, way) = Root::for_directory(dir.path(), LinkPolicy::Inside).unwrap();
        let file = root.open(&way.join(Path::new("f"))).unwrap();
        (dir, file)
    }

    #[test]
    fn the_end_of_a_file_is_read_as_far_as_it_goes() {
        let bytes: Vec<u8> = (0..10_000u32).map(|n| (n % 251) as u8).collect();
        let (_dir, file) = open(&bytes);
        let direct = file.open_direct().expect("direct reads where this is built");
        let mut buf = MmapMut::map_anon(16_384).unwrap();
        assert_eq!(direct.read_exact_at(&mut buf, 4096).unwrap(), DirectReadOutcome::Complete);
        assert_eq!(&buf[..bytes.len() - 4096], &bytes[4096..]);
    }

    #[test]
    fn a_file_whose_name_is_gone_is_opened_again_and_a_truncated_one_is_not() {
        let (dir, file) = open(&[7; 9000]);
        std::fs::remove_file(dir.path().join("f")).unwrap();
        assert!(file.reopen(OFlags::empty()).is_some());

        let (dir, file) = open(&[7; 9000]);
        let direct = file.open_direct().expect("direct reads where this is built");
        let name = dir.path().join("f");
        std::fs::OpenOptions::new().write(true).open(name).unwrap().set_len(5000).unwrap();
        assert!(file.reopen(OFlags::empty()).is_none());
        let mut buf = MmapMut::map_anon(16_384).unwrap();
        assert!(matches!(direct.read_exact_at(&mut buf, 0), Err(SourceError::Truncated { .. })));
    }
}
