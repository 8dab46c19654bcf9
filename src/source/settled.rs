//! Whether a file's times tell everything that is written to it from now on.
//!
//! The system stamps a file when a write begins, and not again when it ends. Bytes that are read while one long
//! write is under way can be a mixture of old and new ones, under a time that never changes again. The same holds
//! for stores through a mapping. A file is settled once every write that could still change it must leave another
//! time: equal states of a settled file then mean equal bytes.

use std::io::ErrorKind;
use std::os::fd::{AsFd, AsRawFd};
use std::thread::sleep;
use std::time::{Duration, SystemTime};

use rustix::fs::fstat;

use super::{OpenFile, State};

/// Two writes within one step of a filesystem's clock leave the same time. Local filesystems count in ticks of
/// at most 10 ms, and this is two of them.
const LOCAL_CLOCK_STEP: Duration = Duration::from_millis(20);

/// The same of any filesystem: the clocks of networks differ more.
const CLOCK_STEP: Duration = Duration::from_millis(100);

/// The same where only whole seconds are kept, as on ext4 with small inodes; FAT keeps every other second.
const COARSE_CLOCK_STEP: Duration = Duration::from_secs(2);

/// The age of a change after which no write that began with it is taken to be under way any more, where the
/// system does not tell of writers. One `write` transfers at most 2 GiB, so a disk of 35 MB/s is through by then,
/// and so is the write-back (35 s) behind which a store through a mapping leaves a new time.
const LONGEST_WRITE: Duration = Duration::from_secs(60);

/// Whether a change after `state` must leave another time, seen from now.
pub fn is_past_clock_step(state: &State) -> bool {
    let step = if state.ctime_nsec == 0 { COARSE_CLOCK_STEP } else { CLOCK_STEP };
    age(state).is_some_and(|age| age > step)
}

/// How long ago the file last changed; nothing if that is yet to come. The time of a write can be set by anybody,
/// that of a change cannot.
fn age(state: &State) -> Option<Duration> {
    let seconds = Duration::from_secs(u64::try_from(state.ctime).ok()?);
    let changed = SystemTime::UNIX_EPOCH + seconds + Duration::from_nanos(state.ctime_nsec.into());
    SystemTime::now().duration_since(changed).ok()
}

/// Names the signal that tells of a broken lease; the crate libc lacks it.
const F_SETSIG: libc::c_int = 10;

/// Programs that have a file open for writing.
enum Writers {
    None,
    Some,
    /// The system does not say: another machine's or another user's file.
    Unknown,
}

impl OpenFile {
    /// Whether the file is what it was when it was opened, and every write from now on must leave another time.
    /// Waits for the clock's next step where that is all that is missing.
    pub fn is_settled(&self) -> bool {
        let state = self.file().state();
        let is_quiet = match self.filesystem().local.then(|| self.writers()) {
            Some(Writers::None) => match age(&state) {
                Some(age) if state.ctime_nsec != 0 => {
                    sleep(LOCAL_CLOCK_STEP.saturating_sub(age));
                    true
                }
                _ => is_past_clock_step(&state),
            },
            Some(Writers::Some) => false,
            Some(Writers::Unknown) | None => age(&state).is_some_and(|age| age > LONGEST_WRITE),
        };
        // Asked after the writers: one that came meanwhile has left its time.
        is_quiet && fstat(self.as_fd()).is_ok_and(|now| State::from(&now) == state)
    }

    /// Asks for a lease, which the system grants only while nobody has the file open for writing, and gives it
    /// back at once. A program that opens the file for writing in between waits for that instant.
    #[allow(unsafe_code)]
    fn writers(&self) -> Writers {
        let fd = self.as_fd().as_raw_fd();
        // SAFETY: these commands take a number and touch no memory of ours.
        let fcntl = |command, value: libc::c_int| unsafe { libc::fcntl(fd, command, value) };
        // A lease that is broken sends SIGIO, which ends a process, unless another signal is named. This one is
        // ignored by default.
        if fcntl(F_SETSIG, libc::SIGURG) != 0 {
            return Writers::Unknown;
        }
        if fcntl(libc::F_SETLEASE, libc::F_RDLCK) == 0 {
            fcntl(libc::F_SETLEASE, libc::F_UNLCK);
            return Writers::None;
        }
        match std::io::Error::last_os_error().kind() {
            ErrorKind::WouldBlock => Writers::Some,
            _ => Writers::Unknown,
        }
    }
}

#[cfg(test)]
mod tests {
    use std::fs::File;
    use std::os::unix::fs::FileExt;
    use std::path::Path;

    use super::super::{Links, Root};
    use super::*;

    fn opened(folder: &Path) -> OpenFile {
        let (root, _) = Root::around(folder, Links::Inside).unwrap();
        root.open(Path::new("file")).unwrap()
    }

    #[test]
    fn a_file_is_settled_once_nobody_can_write_to_it_unnoticed() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("file");
        std::fs::write(&path, "bytes").unwrap();
        let fresh = opened(folder.path());
        assert!(fresh.is_settled());
        assert!(
            age(&fresh.file().state()).unwrap() >= LOCAL_CLOCK_STEP,
            "the clock has stepped on"
        );
        let writer = File::options().write(true).open(&path).unwrap();
        assert!(!fresh.is_settled(), "somebody may be writing");
        drop(writer);
        assert!(fresh.is_settled());
        // Nothing is left of the question: a lease would keep the next writer waiting.
        let writer = File::options().write(true).open(&path).unwrap();
        writer.write_at(b"others", 0).unwrap();
        drop(writer);
        assert!(!fresh.is_settled(), "it is not what it was when it was opened");
        assert!(opened(folder.path()).is_settled());
    }

    #[test]
    fn times_of_whole_seconds_settle_later() {
        let now = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).unwrap();
        let folder = tempfile::tempdir().unwrap();
        std::fs::write(folder.path().join("file"), "bytes").unwrap();
        let state = opened(folder.path()).file().state();
        let changed = |seconds: i64, ctime_nsec| State {
            ctime: now.as_secs() as i64 - seconds,
            ctime_nsec,
            ..state
        };
        assert!(is_past_clock_step(&changed(2, 1)));
        assert!(!is_past_clock_step(&changed(1, 0)));
        assert!(is_past_clock_step(&changed(3, 0)));
        assert!(!is_past_clock_step(&changed(-3, 0)), "a change that is yet to come");
    }
}
