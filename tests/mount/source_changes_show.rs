//! Changes in the source show without mounting again. An open file gives the old bytes as long as they
//! exist, then an error, and never a mixture.

#![allow(unsafe_code)] // Mapping a file.

use std::fs::{self, File};
use std::io::{BufRead, BufReader, ErrorKind, Write};
use std::os::unix::fs::{FileExt, MetadataExt, PermissionsExt};
use std::os::unix::process::ExitStatusExt;
use std::path::PathBuf;
use std::process::{Command, Stdio};
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use crate::common::command::{names_in, two_shards};
use crate::common::mounting::{MountFixture, wait_until};
use crate::common::test_path;
use memmap2::Mmap;

/// Bytes of each of the two tensors: more than is read along with a read.
const BYTES: usize = 4 << 20;

/// A mount with a model in two shards, in a directory of its own.
struct Model {
    fixture: MountFixture,
    log: String,
}

impl Model {
    fn new(options: &[&str]) -> Model {
        let fixture = MountFixture::new();
        let log = fixture.path("log");
        let model = Model { fixture, log };
        fs::create_dir(model.source("model")).unwrap();
        model.write(1);
        model.fixture.mount(&[&["--log-file", &model.log], options].concat());
        model
    }

    fn source(&self, name: &str) -> PathBuf {
        PathBuf::from(&self.fixture.source).join(name)
    }

    fn shard(&self, number: usize) -> PathBuf {
        self.source(&format!("model/model-0000{number}-of-00002.safetensors"))
    }

    fn virtual_file(&self) -> PathBuf {
        PathBuf::from(&self.fixture.mountpoint).join("model/model.safetensors")
    }

    /// Writes both shards under new names, and renames each into place.
    fn write(&self, fill: u8) {
        self.write_beside(fill);
        self.put_in_place();
    }

    fn write_beside(&self, fill: u8) {
        for (name, bytes) in two_shards(fill, BYTES) {
            fs::write(self.source(&format!("model/{name}.new")), bytes).unwrap();
        }
    }

    fn put_in_place(&self) {
        for number in [1, 2] {
            let shard = self.shard(number);
            fs::rename(format!("{}.new", shard.display()), shard).unwrap();
        }
    }

    /// Waits until the name shows a model of these values, and gives its inode.
    #[track_caller]
    fn shows(&self, first: u8, second: u8) -> u64 {
        let mut shown = None;
        wait_until("the name shows the new state", || {
            shown = File::open(self.virtual_file()).ok().and_then(|file| {
                let values = values(&file).ok()?;
                Some((values, file.metadata().ok()?.ino()))
            });
            shown.is_some_and(|(values, _)| values == (first, second))
        });
        shown.unwrap().1
    }

    fn errors(&self) -> Vec<String> {
        let log = fs::read_to_string(&self.log).unwrap_or_default();
        log.lines().filter(|line| line.contains("ERROR")).map(str::to_owned).collect()
    }

    fn unmount(&self) {
        assert_eq!(self.fixture.unmount(&[]).code, 0);
    }
}

/// The one value of each of the two tensors, read past the kernel's cache.
fn values(file: &File) -> std::io::Result<(u8, u8)> {
    let size = file.metadata()?.len();
    forget(file);
    let mut bytes = vec![0; 2 * BYTES];
    file.read_exact_at(&mut bytes, size - 2 * BYTES as u64)?;
    let (first, second) = bytes.split_at(BYTES);
    for tensor in [first, second] {
        assert!(tensor.iter().all(|&byte| byte == tensor[0]), "mixed bytes");
    }
    Ok((first[0], second[0]))
}

/// Drops a file's pages from the page cache.
fn forget(file: &File) {
    rustix::fs::fadvise(file, 0, None, rustix::fs::Advice::DontNeed).unwrap();
}

/// The clock of timestamps advances in ticks of at most 10 ms.
fn tick() {
    std::thread::sleep(Duration::from_millis(20));
}

fn assert_eio(read: std::io::Result<impl std::fmt::Debug>) {
    assert_eq!(read.unwrap_err().raw_os_error(), Some(libc::EIO));
}

#[test]
fn replaced_by_rename_while_open_and_mapped() {
    let model = Model::new(&[]);
    let old = File::open(model.virtual_file()).unwrap();
    let map = unsafe { Mmap::map(&old) }.unwrap();
    let inode = old.metadata().unwrap().ino();
    model.write(5);
    assert_ne!(model.shows(5, 6), inode);
    assert_eq!(values(&old).unwrap(), (1, 2));
    assert_eq!((map[map.len() - 1], map[map.len() - BYTES - 1]), (2, 1));
    assert_eq!(old.metadata().unwrap().ino(), inode);
    assert_eq!(model.errors(), [""; 0]);
    drop((old, map));
    model.unmount();
}

// The next tests change a virtual file that is not open: a lookup just before leaves nothing stale.

#[test]
fn replaced_just_before_it_is_opened() {
    let model = Model::new(&[]);
    model.write_beside(5);
    assert!(model.virtual_file().exists());
    model.put_in_place();
    assert_eq!(values(&File::open(model.virtual_file()).unwrap()).unwrap(), (5, 6));
    model.unmount();
}

#[test]
fn deleted_just_before_it_is_opened() {
    let model = Model::new(&[]);
    // With an index, the set is one by its names even when a shard is gone.
    let index = r#"{"weight_map": {"layer.0.weight": "model-00001-of-00002.safetensors",
        "layer.1.weight": "model-00002-of-00002.safetensors"}}"#;
    fs::write(model.source("model/model.safetensors.index.json"), index).unwrap();
    assert!(model.virtual_file().exists());
    fs::remove_file(model.shard(2)).unwrap();
    assert_eq!(File::open(model.virtual_file()).unwrap_err().kind(), ErrorKind::NotFound);
    model.unmount();
}

#[test]
fn deleted_and_renamed_while_open() {
    let model = Model::new(&[]);
    let old = File::open(model.virtual_file()).unwrap();
    fs::rename(model.source("model"), model.source("moved")).unwrap();
    wait_until("the old name is gone", || !model.virtual_file().exists());
    let moved = PathBuf::from(&model.fixture.mountpoint).join("moved/model.safetensors");
    wait_until("the new name is there", || moved.exists());
    assert_eq!(values(&old).unwrap(), (1, 2));
    fs::remove_dir_all(model.source("moved")).unwrap();
    wait_until("it is gone", || !moved.exists());
    assert_eq!(values(&old).unwrap(), (1, 2));
    assert_eq!(old.metadata().unwrap().len() % 4096, 0);
    drop(old);
    model.unmount();
}

#[test]
fn chmodded_while_open() {
    let model = Model::new(&[]);
    let old = File::open(model.virtual_file()).unwrap();
    fs::set_permissions(model.shard(2), fs::Permissions::from_mode(0o600)).unwrap();
    wait_until("the mode shows", || {
        fs::metadata(model.virtual_file()).unwrap().permissions().mode() & 0o777 == 0o600
    });
    assert_eq!(values(&old).unwrap(), (1, 2));
    drop(old);
    model.unmount();
}

#[test]
fn changed_in_place_while_open() {
    let model = Model::new(&[]);
    let old = File::open(model.virtual_file()).unwrap();
    let inode = old.metadata().unwrap().ino();
    assert_eq!(values(&old).unwrap(), (1, 2));
    tick();
    let (_, changed) = two_shards(8, BYTES).swap_remove(1);
    let file = File::options().write(true).open(model.shard(2)).unwrap();
    file.write_all_at(&changed, 0).unwrap();
    drop(file);
    forget(&old);
    // Everything in the virtual file fails, not only the changed shard, however often it is read.
    let size = old.metadata().unwrap().len();
    let mut bytes = [0; 4096];
    for _ in 0..10 {
        assert_eio(old.read_exact_at(&mut bytes, size - 4096));
        assert_eio(old.read_exact_at(&mut bytes, size - 2 * BYTES as u64));
    }
    let errors = model.errors();
    assert_eq!(errors.len(), 1, "{errors:?}");
    assert!(errors[0].contains("model-00002-of-00002.safetensors"), "{errors:?}");
    assert_ne!(model.shows(1, 9), inode);
    assert_eio(old.read_exact_at(&mut bytes, size - 4096));
    assert_eq!(model.errors().len(), 1);
    drop(old);
    model.unmount();
}

/// A program rewrites the file over and over, and readers retry: one line in the log is enough.
#[test]
fn changed_often_it_is_logged_once() {
    let model = Model::new(&[]);
    let file = File::options().write(true).open(model.shard(2)).unwrap();
    for fill in 1..=5 {
        let old = File::open(model.virtual_file()).unwrap();
        tick();
        let (_, changed) = two_shards(10 * fill, BYTES).swap_remove(1);
        file.write_all_at(&changed, 0).unwrap();
        assert_eio(values(&old));
        // An open at this moment may show the old state, and is tried again.
        model.shows(1, 10 * fill + 1);
    }
    let log = fs::read_to_string(&model.log).unwrap();
    let of = |level: &str| log.lines().filter(|line| line.contains(level)).count();
    assert_eq!(of("ERROR"), 1, "{log}");
    assert!(of("WARN ckptfs::mount") <= 1, "{log}");
    model.unmount();
}

#[test]
fn truncated_while_mapped_kills_the_reader_and_nothing_else() {
    let model = Model::new(&[]);
    let mut reader = Command::new(std::env::current_exe().unwrap())
        .args([
            "--exact",
            test_path!("child_that_reads_a_truncated_mapping"),
            "--ignored",
            "--nocapture",
        ])
        .env("CKPTFS_MAPPED", model.virtual_file())
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(Stdio::null())
        .spawn()
        .unwrap();
    let mut messages = BufReader::new(reader.stdout.take().unwrap()).lines();
    assert!(messages.any(|line| line.unwrap().ends_with("mapped")), "it maps the virtual file");
    File::options().write(true).open(model.shard(1)).unwrap().set_len(1 << 20).unwrap();
    reader.stdin.take().unwrap().write_all(b"go on\n").unwrap();
    let status = reader.wait().unwrap();
    assert_eq!(status.signal(), Some(libc::SIGBUS), "{status:?}");
    let errors = model.errors();
    assert_eq!(errors.len(), 1, "{errors:?}");
    assert!(errors[0].contains("model-00001-of-00002.safetensors"), "{errors:?}");
    assert_eq!(model.fixture.state(), "alive");
    // A set that is no longer complete is shown as its files.
    let names = || names_in(model.virtual_file().parent().unwrap());
    wait_until("the shards show", || names().len() == 2 && names()[0].contains("-00001-of"));
    model.unmount();
}

#[test]
#[ignore = "a part of the test before, in a process that dies"]
fn child_that_reads_a_truncated_mapping() {
    let file = File::open(std::env::var_os("CKPTFS_MAPPED").unwrap()).unwrap();
    let map = unsafe { Mmap::map(&file) }.unwrap();
    println!("{}\nmapped", map[0]);
    std::io::stdin().read_line(&mut String::new()).unwrap();
    let sum: u64 = map.iter().step_by(4096).map(|&byte| u64::from(byte)).sum();
    println!("{sum}");
}

/// A passed-through file behaves as the original does.
#[test]
fn passed_through_files_follow_their_source() {
    for options in [&[][..], &["--no-passthrough"]] {
        let model = Model::new(options);
        let source = model.source("notes.bin");
        let shown = PathBuf::from(&model.fixture.mountpoint).join("notes.bin");
        fs::write(&source, vec![1; BYTES]).unwrap();
        wait_until("it appears", || shown.exists());
        let open = File::open(&shown).unwrap();
        let size = || open.metadata().unwrap().len();
        let byte = |at: usize| {
            let mut byte = [0];
            open.read_at(&mut byte, at as u64).unwrap();
            byte[0]
        };
        assert_eq!((size(), byte(BYTES - 1)), (BYTES as u64, 1));
        let writer = File::options().write(true).open(&source).unwrap();
        writer.write_all_at(&[2; 5000], BYTES as u64).unwrap();
        wait_until("it has grown", || size() == BYTES as u64 + 5000);
        wait_until("its end is read", || byte(BYTES + 4999) == 2 && byte(BYTES) == 2);
        tick();
        writer.write_all_at(&[3; 5000], 0).unwrap();
        wait_until("its start is read", || byte(0) == 3 && byte(4999) == 3 && byte(5000) == 1);
        writer.set_len(100).unwrap();
        wait_until("it is short", || size() == 100);
        wait_until("it ends where it ends", || open.read_at(&mut [0], 100).unwrap() == 0);
        assert_eq!(byte(99), 3);
        fs::remove_file(&source).unwrap();
        wait_until("it is gone", || !shown.exists());
        assert_eq!(byte(99), 3);
        fs::write(&source, [4; 10]).unwrap();
        wait_until("another is there", || fs::read(&shown).is_ok_and(|bytes| bytes == [4; 10]));
        assert_eq!(byte(99), 3, "{options:?}");
        assert_eq!(model.errors(), [""; 0], "{options:?}");
        drop(open);
        model.unmount();
    }
}

#[test]
fn written_just_before_it_is_opened() {
    for options in [&[][..], &["--no-passthrough"]] {
        let model = Model::new(options);
        let shown = format!("{}/config.json", model.fixture.mountpoint);
        for n in 1..60 {
            // Longer and shorter each time, and looked at before.
            let text = "x".repeat(n * 37 % 400);
            fs::write(model.source("config.json"), &text).unwrap();
            assert_eq!(fs::read_to_string(&shown).unwrap(), text, "{options:?}");
        }
        assert_eq!(model.fixture.unmount(&[]).code, 0);
    }
}

/// Either name of a file with two names can go.
#[test]
fn either_of_two_names_of_a_file_can_go() {
    let model = Model::new(&[]);
    let shown = |name: &str| PathBuf::from(&model.fixture.mountpoint).join(name);
    fs::write(model.source("a"), "text").unwrap();
    fs::hard_link(model.source("a"), model.source("b")).unwrap();
    wait_until("both appear", || shown("a").exists() && shown("b").exists());
    assert_eq!(fs::metadata(shown("a")).unwrap().ino(), fs::metadata(shown("b")).unwrap().ino());
    fs::remove_file(model.source("b")).unwrap();
    assert_eq!(fs::read(shown("a")).unwrap(), b"text");
    model.unmount();
}

#[test]
fn names_and_times_of_directories() {
    let model = Model::new(&[]);
    let shown = |name: &str| PathBuf::from(&model.fixture.mountpoint).join(name);
    let time = |name: &str| fs::metadata(shown(name)).unwrap().modified().unwrap();
    let at_first = time("");
    tick();
    fs::create_dir(model.source("later")).unwrap();
    wait_until("the directory appears", || shown("later").is_dir());
    wait_until("its time shows", || time("") > at_first);
    assert_eq!(time(""), fs::metadata(&model.fixture.source).unwrap().modified().unwrap());
    for (name, bytes) in two_shards(3, 1000) {
        assert!(!shown("later/model.safetensors").exists());
        fs::write(model.source(&format!("later/{name}")), bytes).unwrap();
    }
    wait_until("the model is complete", || names_in(&shown("later")) == ["model.safetensors"]);
    let complete = time("later");
    tick();
    fs::remove_file(model.source("later/model-00001-of-00002.safetensors")).unwrap();
    wait_until("it is no longer", || {
        names_in(&shown("later")) == ["model-00002-of-00002.safetensors"]
    });
    wait_until("that time shows too", || time("later") > complete);
    fs::remove_dir_all(model.source("later")).unwrap();
    wait_until("the directory is gone", || !names_in(&shown("")).contains(&"later".to_owned()));
    model.unmount();
}

/// Readers open and read while shards are replaced. Each gets one whole state, or an error that it is gone.
#[test]
fn replaced_again_and_again_under_load() {
    let model = Model::new(&["--threads", "1", "--memory", "16M"]);
    let (stop, whole) = (AtomicBool::new(false), AtomicUsize::new(0));
    std::thread::scope(|scope| {
        for _ in 0..4 {
            scope.spawn(|| {
                while !stop.load(Ordering::Relaxed) {
                    let Ok(file) = File::open(model.virtual_file()) else { continue };
                    match values(&file) {
                        Ok(_) => whole.fetch_add(1, Ordering::Relaxed),
                        // One shard was replaced between lookup and open.
                        Err(error) => {
                            assert_eq!(error.raw_os_error(), Some(libc::EIO));
                            0
                        }
                    };
                }
            });
        }
        let began = Instant::now();
        for fill in (1..200).cycle() {
            model.write(fill);
            std::thread::sleep(Duration::from_millis(50));
            if began.elapsed() > Duration::from_secs(4) {
                break;
            }
        }
        model.write(77);
        stop.store(true, Ordering::Relaxed);
    });
    model.shows(77, 78);
    assert!(whole.load(Ordering::Relaxed) > 10);
    model.unmount();
}

/// The kernel tries twice to open a name, and a rename can come before each try.
#[test]
fn a_file_that_is_renamed_over_repeatedly_can_be_opened() {
    const OPENS: usize = 500;
    let fixture = MountFixture::new();
    let (name, beside) =
        (format!("{}/counted", fixture.source), format!("{}/.new", fixture.source));
    let (last, stop) = (AtomicUsize::new(0), AtomicBool::new(false));
    let put = |count: usize| {
        fs::write(&beside, count.to_le_bytes()).unwrap();
        fs::rename(&beside, &name).unwrap();
        last.store(count, Ordering::SeqCst);
    };
    put(1);
    fixture.mount(&[]);
    let shown = format!("{}/counted", fixture.mountpoint);
    let read = || -> Result<(), String> {
        let least = last.load(Ordering::SeqCst);
        let bytes = fs::read(&shown).map_err(|error| error.to_string())?;
        let count = usize::from_le_bytes(bytes.try_into().map_err(|_| "another size".to_owned())?);
        if count < least { Err(format!("{count} after {least}")) } else { Ok(()) }
    };
    let all = std::thread::scope(|scope| {
        scope.spawn(|| {
            (2..).take_while(|_| !stop.load(Ordering::Relaxed)).for_each(put);
        });
        let reader = || (0..OPENS).map(|_| read()).collect::<Vec<_>>();
        let readers: Vec<_> = (0..2).map(|_| scope.spawn(reader)).collect();
        let all: Vec<_> = readers.into_iter().map(|reader| reader.join()).collect();
        stop.store(true, Ordering::Relaxed);
        all
    });
    let all: Vec<_> = all.into_iter().flat_map(Result::unwrap).collect();
    let failed: Vec<_> = all.iter().filter_map(|read| read.as_ref().err()).collect();
    assert!(failed.is_empty(), "{} of {}: {failed:?}", failed.len(), all.len());
    assert!(last.into_inner() > 2, "nothing was renamed meanwhile");
    assert_eq!(fixture.unmount(&[]).code, 0);
}

// The kernel stamps a file when a write begins, not when it ends, and a mapped page once for many stores. A read in
// between may return a mixture. An open afterwards must show the final bytes.

/// Maps a file for writing. Its timestamp does not change with later stores.
fn map_for_stores(path: &std::path::Path) -> memmap2::MmapMut {
    let file = File::options().read(true).write(true).open(path).unwrap();
    let mut map = unsafe { memmap2::MmapMut::map_mut(&file) }.unwrap();
    for at in (0..map.len()).step_by(4096) {
        let byte = map[at];
        // Touches each page, so that the kernel has already stamped the file for it.
        unsafe { std::ptr::write_volatile(&raw mut map[at], byte) };
    }
    // Long enough that the timestamp would count as settled without the mapping.
    std::thread::sleep(Duration::from_millis(200));
    map
}

#[test]
fn stores_through_a_mapping_show_at_the_next_open() {
    let model = Model::new(&[]);
    let mut map = map_for_stores(&model.shard(2));
    let first = File::open(model.virtual_file()).unwrap();
    let read = |file: &File| {
        let mut byte = [0];
        file.read_exact_at(&mut byte, file.metadata().unwrap().len() - 1).unwrap();
        byte[0]
    };
    assert_eq!(read(&first), 2);
    let end = map.len() - 1;
    for value in 3..6 {
        map[end] = value;
        assert_eq!(read(&File::open(model.virtual_file()).unwrap()), value);
    }
    drop((map, first));
    model.unmount();
}

#[test]
fn stores_through_a_mapping_of_a_passed_through_file_show_too() {
    let model = Model::new(&["--no-passthrough"]);
    let name = "model/other.dat";
    fs::write(model.source(name), vec![1; 2 << 20]).unwrap();
    let mut map = map_for_stores(&model.source(name));
    let shown = PathBuf::from(&model.fixture.mountpoint).join(name);
    let first = File::open(&shown).unwrap();
    assert_eq!(fs::read(&shown).unwrap(), vec![1; 2 << 20]);
    map[1 << 20] = 7;
    assert_eq!(fs::read(&shown).unwrap()[1 << 20], 7);
    drop((map, first));
    model.unmount();
}

#[test]
fn a_header_repaired_through_a_mapping_is_shown() {
    let model = Model::new(&[]);
    let mut map = map_for_stores(&model.shard(2));
    let brace = map[8];
    map[8] = b'!';
    wait_until("the broken set is not shown", || !model.virtual_file().exists());
    map[8] = brace;
    wait_until("the repaired set is shown", || model.virtual_file().exists());
    assert_eq!(values(&File::open(model.virtual_file()).unwrap()).unwrap(), (1, 2));
    drop(map);
    model.unmount();
}

/// Readers run during one long write. An open after its end shows the new bytes alone.
#[test]
fn an_open_after_one_long_write_shows_all_of_it() {
    const LONG_WRITE_BYTES: usize = 192 << 20;
    let model = Model::new(&[]);
    let path = model.source("model/model-00001-of-00002.safetensors");
    let write = |fill: u8| fs::write(&path, &two_shards(fill, LONG_WRITE_BYTES)[0].1).unwrap();
    write(20);
    let new = two_shards(40, LONG_WRITE_BYTES).swap_remove(0).1;
    std::thread::sleep(Duration::from_millis(200));
    let ended = AtomicBool::new(false);
    std::thread::scope(|scope| {
        scope.spawn(|| {
            let file = File::options().write(true).open(&path).unwrap();
            file.write_all_at(&new, 0).unwrap();
            ended.store(true, Ordering::Release);
        });
        while !ended.load(Ordering::Acquire) {
            // The outcome does not matter: the kernel may have cached these bytes.
            let Ok(file) = File::open(model.virtual_file()) else { continue };
            let size = file.metadata().unwrap().len();
            let mut bytes = vec![0; 1 << 20];
            for at in (4096..size.saturating_sub(1 << 20)).rev().step_by(16 << 20) {
                let _ = file.read_at(&mut bytes, at);
            }
        }
    });
    let mut bytes = Vec::new();
    std::io::Read::read_to_end(&mut File::open(model.virtual_file()).unwrap(), &mut bytes).unwrap();
    let tensor = &bytes[bytes.len() - LONG_WRITE_BYTES - BYTES..bytes.len() - BYTES];
    assert_eq!(tensor.iter().filter(|&&byte| byte != 40).count(), 0, "bytes from before the write");
    model.unmount();
}
