//! A source that hangs blocks its readers and nothing else: not other sources, listings, statistics or
//! unmounting.

use std::fs::{self, File};
use std::io;
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::thread::JoinHandle;

use crate::common::command::{names_in, two_shards};
use crate::common::failing_source::{Behavior, FailingSource};
use crate::common::mounting::{MountFixture, wait_until};

/// Readers of the hanging source: more than any threads that may wait for it.
const READERS: usize = 64;

/// Bytes of each tensor: more than is read along with the headers.
const BYTES: usize = 8 << 20;

/// A fixture with two models: one on a disk, and one on a filesystem that can hang.
fn fixture() -> (MountFixture, FailingSource) {
    let fixture = MountFixture::new();
    let disk = format!("{}/disk", fixture.source);
    fs::create_dir(&disk).unwrap();
    for (name, bytes) in two_shards(7, BYTES) {
        fs::write(format!("{disk}/{name}"), bytes).unwrap();
    }
    let far = FailingSource::new(&format!("{}/far", fixture.source), two_shards(1, BYTES));
    (fixture, far)
}

/// Opens the model that can hang, and reads it at many offsets from threads.
fn readers(fixture: &MountFixture) -> Vec<JoinHandle<io::Result<u8>>> {
    let model = File::open(format!("{}/far/model.safetensors", fixture.mountpoint)).unwrap();
    let size = model.metadata().unwrap().len();
    let read = |n: usize| {
        let model = model.try_clone().unwrap();
        let at = size - (n as u64 + 1) * (4 << 20) % (6 << 20) - 1;
        std::thread::spawn(move || {
            let mut byte = [0];
            model.read_exact_at(&mut byte, at).map(|()| byte[0])
        })
    };
    (0..READERS).map(read).collect()
}

/// Asserts that everything else goes on: another model, listings, a passed-through file, statistics.
fn others_go_on(fixture: &MountFixture) {
    fixture.wait_until_alive();
    let mountpoint = fixture.mountpoint.clone();
    let others = std::thread::spawn(move || read_others(&mountpoint));
    // A thread that hangs with the source can only be abandoned.
    wait_until("others are read", || others.is_finished());
    others.join().unwrap();
}

fn read_others(mountpoint: &str) {
    let path = |name: &str| Path::new(mountpoint).join(name);
    let model = fs::read(path("disk/model.safetensors")).unwrap();
    assert_eq!(&model[model.len() - BYTES..], vec![8; BYTES]);
    assert_eq!(names_in(&path("disk")), ["model.safetensors"]);
    assert_eq!(fs::read(path("model.safetensors")).unwrap().last(), Some(&62));
    assert!(fs::metadata(path("missing")).is_err());
    // Without its pages, the next read asks the daemon again.
    let model = File::open(path("disk/model.safetensors")).unwrap();
    rustix::fs::fadvise(&model, 0, None, rustix::fs::Advice::DontNeed).unwrap();
}

#[test]
fn reads_hang_and_everything_else_goes_on() {
    let (fixture, far) = fixture();
    let daemon = fixture.mount(&["--threads", "1"]);
    let at_far = Path::new(&fixture.mountpoint).join("far");
    assert_eq!(names_in(&at_far), ["model.safetensors"]);
    far.set(Behavior::HangsOnReads);
    let readers = readers(&fixture);
    wait_until("the source is asked", || far.pending() > 0);
    others_go_on(&fixture);
    // Its own directory too: only reads hang.
    assert_eq!(names_in(&at_far), ["model.safetensors"]);
    assert!(readers.iter().all(|reader| !reader.is_finished()));
    far.set(Behavior::Works);
    for reader in readers {
        assert_eq!(reader.join().unwrap().unwrap(), 2);
    }
    assert_eq!(fixture.unmount(&[]).code, 0);
    assert!(!daemon.runs());
}

/// As many readers as a busy server has. Each waits for bytes of its own, and none keeps the kernel from
/// asking for those of others.
#[test]
fn hundreds_of_readers_hang_and_everything_else_goes_on() {
    let (fixture, far) = fixture();
    fixture.mount(&["--threads", "1"]);
    let model = File::open(format!("{}/far/model.safetensors", fixture.mountpoint)).unwrap();
    rustix::fs::fadvise(&model, 0, None, rustix::fs::Advice::Random).unwrap();
    let size = model.metadata().unwrap().len();
    far.set(Behavior::HangsOnReads);
    let read = |n: u64| {
        let model = model.try_clone().unwrap();
        let at = size - 1 - n * (2 * BYTES as u64 / HUNDREDS);
        std::thread::spawn(move || model.read_exact_at(&mut [0], at).unwrap())
    };
    let readers: Vec<JoinHandle<()>> = (0..HUNDREDS).map(read).collect();
    wait_until("the source is asked", || far.pending() > 0);
    wait_until("all wait", || waiting() >= HUNDREDS as usize * 9 / 10);
    for _ in 0..3 {
        others_go_on(&fixture);
    }
    far.set(Behavior::Works);
    for reader in readers {
        reader.join().unwrap();
    }
    drop(model);
    assert_eq!(fixture.unmount(&[]).code, 0);
}

/// More requests than one source is asked at once.
const THOUSAND: usize = 1_200;

/// More requests than the kernel starts by itself at once.
const HUNDREDS: u64 = 600;

/// Threads of this process that wait for a file.
fn waiting() -> usize {
    let threads = fs::read_dir("/proc/self/task").unwrap();
    let waits = |thread: &fs::DirEntry| {
        let at = fs::read_to_string(thread.path().join("wchan")).unwrap_or_default();
        ["folio_wait", "fuse", "request_wait"].iter().any(|name| at.contains(name))
    };
    threads.filter(|thread| waits(thread.as_ref().unwrap())).count()
}

#[test]
fn a_silent_source_blocks_nothing_else() {
    let (fixture, far) = fixture();
    fixture.mount(&["--threads", "1"]);
    let at_far = Path::new(&fixture.mountpoint).join("far");
    assert_eq!(names_in(&at_far), ["model.safetensors"]);
    let model = File::open(at_far.join("model.safetensors")).unwrap();
    far.set(Behavior::Hangs);
    let asks: Vec<JoinHandle<()>> = (0..READERS)
        .map(|n| {
            let (at_far, model) = (at_far.clone(), model.try_clone().unwrap());
            std::thread::spawn(move || match n % 4 {
                0 => assert_eq!(names_in(&at_far).len(), 1),
                1 => drop(File::open(at_far.join("model.safetensors")).unwrap()),
                2 => assert!(fs::metadata(at_far.join(format!("missing{n}"))).is_err()),
                _ => model.read_exact_at(&mut [0], BYTES as u64).unwrap(),
            })
        })
        .collect();
    wait_until("the source is asked", || far.pending() > 0);
    others_go_on(&fixture);
    far.set(Behavior::Works);
    for ask in asks {
        ask.join().unwrap();
    }
    drop(model);
    assert_eq!(fixture.unmount(&[]).code, 0);
}

/// More requests than one source is asked at once.
#[test]
fn a_thousand_requests_hang_and_everything_else_goes_on() {
    let (fixture, far) = fixture();
    fixture.mount(&["--threads", "1"]);
    let at_far = Path::new(&fixture.mountpoint).join("far");
    assert_eq!(names_in(&at_far), ["model.safetensors"]);
    far.set(Behavior::Hangs);
    let asks: Vec<_> = (0..THOUSAND)
        .map(|n| {
            let at_far = at_far.clone();
            std::thread::spawn(move || {
                assert!(fs::metadata(at_far.join(format!("missing{n}"))).is_err())
            })
        })
        .collect();
    wait_until("all wait", || waiting() >= THOUSAND * 9 / 10);
    others_go_on(&fixture);
    far.set(Behavior::Works);
    for ask in asks {
        ask.join().unwrap();
    }
    assert_eq!(fixture.unmount(&[]).code, 0);
}

#[test]
fn a_hanging_mount_detaches_and_its_readers_go_on() {
    let (fixture, far) = fixture();
    let daemon = fixture.mount(&["--threads", "1"]);
    let other = File::open(format!("{}/disk/model.safetensors", fixture.mountpoint)).unwrap();
    far.set(Behavior::Works);
    assert_eq!(names_in(&Path::new(&fixture.mountpoint).join("far")), ["model.safetensors"]);
    far.set(Behavior::HangsOnReads);
    let readers = readers(&fixture);
    wait_until("the source is asked", || far.pending() > 0);
    assert_eq!(fixture.unmount(&["--lazy"]).code, 0);
    assert_eq!(fixture.mounts(), 0);
    let mut byte = [0];
    other.read_exact_at(&mut byte, other.metadata().unwrap().len() - 1).unwrap();
    assert_eq!(byte, [8]);
    far.set(Behavior::Works);
    for reader in readers {
        assert_eq!(reader.join().unwrap().unwrap(), 2);
    }
    drop(other);
    wait_until("the daemon ends", || !daemon.runs());
}

#[test]
fn a_signal_ends_a_hanging_mount_and_cuts_off_its_readers() {
    let (fixture, far) = fixture();
    let daemon = fixture.mount(&["--threads", "1"]);
    assert_eq!(names_in(&Path::new(&fixture.mountpoint).join("far")), ["model.safetensors"]);
    far.set(Behavior::HangsOnReads);
    let readers = readers(&fixture);
    wait_until("the source is asked", || far.pending() > 0);
    daemon.kill("TERM");
    for reader in readers {
        assert!(reader.join().unwrap().is_err());
    }
    assert_eq!(fixture.mounts(), 0);
    wait_until("the daemon ends", || !daemon.runs());
}
