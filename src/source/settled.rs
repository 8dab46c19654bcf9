//! Decides whether a file's timestamps reveal every later write to it.
//!
//! The kernel stamps a file when a write begins, and not again when it ends. A read during one long write can
//! return a mixture of old and new bytes, under a timestamp that never changes again. The same holds for stores
//! through a mapping. A file is settled once every write that could still change it must leave another timestamp.
//! Equal states of a settled file mean equal bytes.

use std::os::fd::BorrowedFd;
use std::thread::sleep;
use std::time::{Duration, SystemTime};

use rustix::fs::fstat;
use rustix::io::Errno;

use super::file::OpenFile;
use super::lease;
use super::metadata::{FileState, FilesystemKind};

/// Two writes within one clock step of a filesystem leave the same timestamp. Local filesystems step every 10 ms
/// or faster; this is two steps.
const LOCAL_CLOCK_INTERVAL: Duration = Duration::from_millis(20);

/// The step that any filesystem keeps to: the clocks of network filesystems differ more.
const CLOCK_INTERVAL: Duration = Duration::from_millis(100);

/// The step where timestamps are whole seconds, as on ext4 with small inodes. FAT keeps every other second.
const COARSE_CLOCK_INTERVAL: Duration = Duration::from_secs(2);

/// The longest time that a write is assumed to be in flight, where the system does not reveal writers. One `write`
/// transfers at most 2 GiB, for which a disk of 35 MB/s needs about this long. A store through a mapping leaves a
/// new timestamp after the write-back, which comes within 35 s.
const IN_FLIGHT_WRITE_WINDOW: Duration = Duration::from_secs(60);

/// Whether every change from now on must leave another timestamp than `state` has.
pub fn is_past_clock_step(state: &FileState) -> bool {
    let step = if state.ctime_nsec == 0 { COARSE_CLOCK_INTERVAL } else { CLOCK_INTERVAL };
    age(state).is_some_and(|age| age > step)
}

/// Time since the last change (`ctime`), which no program can set, unlike the time of a write; `None` if it lies
/// in the future.
fn age(state: &FileState) -> Option<Duration> {
    let seconds = Duration::from_secs(u64::try_from(state.ctime).ok()?);
    let changed = SystemTime::UNIX_EPOCH + seconds + Duration::from_nanos(state.ctime_nsec.into());
    SystemTime::now().duration_since(changed).ok()
}

/// Whether the file is unchanged since it was opened, and every later write must leave another timestamp. Objects of
/// another machine are: each version has its own name.
/// Waits for the next clock step if nothing else is missing.
pub fn is_settled(file: &OpenFile) -> bool {
    let state = file.file().state();
    let Some(descriptor) = file.descriptor() else { return true };
    let filesystem = FilesystemKind::of(Some(descriptor));
    if filesystem.is_in_memory {
        return false;
    }
    // An overlay does not count a mapping whose descriptor was closed among the writers.
    let reveals_writers = filesystem.is_local && !filesystem.is_overlay;
    let is_quiet = match reveals_writers.then(|| writer_status(descriptor)) {
        Some(WriterStatus::Absent) => match age(&state) {
            Some(age) if state.ctime_nsec != 0 => {
                sleep(LOCAL_CLOCK_INTERVAL.saturating_sub(age));
                true
            }
            _ => is_past_clock_step(&state),
        },
        Some(WriterStatus::Present) => false,
        Some(WriterStatus::Unknown) | None => {
            age(&state).is_some_and(|age| age > IN_FLIGHT_WRITE_WINDOW)
        }
    };
    // Checked after the writers: a writer that came in between has left its timestamp.
    is_quiet && fstat(descriptor).is_ok_and(|now| FileState::from(&now) == state)
}

/// Programs that have a file open for writing.
enum WriterStatus {
    Absent,
    Present,
    /// The kernel does not report them, as for files of another machine or another user.
    Unknown,
}

/// Takes a read lease and returns it at once: the kernel grants one only while no program has the file open for
/// writing. A program that opens the file for writing in between waits for that instant, or gets EAGAIN if it
/// opens with `O_NONBLOCK`.
fn writer_status(descriptor: BorrowedFd<'_>) -> WriterStatus {
    match lease::take(descriptor) {
        Ok(()) => {
            // It cannot fail for a lease that is held.
            let _ = lease::give_back(descriptor);
            WriterStatus::Absent
        }
        Err(Errno::AGAIN) => WriterStatus::Present,
        Err(_) => WriterStatus::Unknown,
    }
}

#[cfg(test)]
mod tests {
    use std::fs::File;
    use std::os::unix::fs::FileExt;

    use super::super::test_file;
    use super::*;

    #[test]
    fn a_file_is_settled_once_no_write_can_go_unnoticed() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("f");
        std::fs::write(&path, "bytes").unwrap();
        let fresh = test_file::open(folder.path());
        assert!(is_settled(&fresh));
        assert!(
            age(&fresh.file().state()).unwrap() >= LOCAL_CLOCK_INTERVAL,
            "the clock has advanced by a step"
        );
        let writer = File::options().write(true).open(&path).unwrap();
        assert!(!is_settled(&fresh), "a writer has it open");
        drop(writer);
        assert!(is_settled(&fresh));
        // The lease was returned: one that is held would block the next writer.
        let writer = File::options().write(true).open(&path).unwrap();
        writer.write_at(b"others", 0).unwrap();
        drop(writer);
        assert!(!is_settled(&fresh), "it changed since it was opened");
        assert!(is_settled(&test_file::open(folder.path())));
    }

    #[test]
    fn times_of_whole_seconds_settle_later() {
        let now = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).unwrap();
        let folder = tempfile::tempdir().unwrap();
        std::fs::write(folder.path().join("f"), "bytes").unwrap();
        let state = test_file::open(folder.path()).file().state();
        let changed = |seconds: i64, ctime_nsec| FileState {
            ctime: now.as_secs() as i64 - seconds,
            ctime_nsec,
            ..state
        };
        assert!(is_past_clock_step(&changed(2, 1)));
        assert!(!is_past_clock_step(&changed(1, 0)));
        assert!(is_past_clock_step(&changed(3, 0)));
        assert!(!is_past_clock_step(&changed(-3, 0)), "a change in the future");
    }
}
