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
use crate::common::mounting::{MountFixture, WAIT_TIMEOUT, wait_until};
use crate::common::test_path;
use crate::sharded_model::{BYTES, Model, forget, values};
use memmap2::Mmap;

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
    model.fixture.wait_until_alive();
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
            let has_read = whole.load(Ordering::Relaxed) > 10;
            if began.elapsed() > if has_read { Duration::from_secs(4) } else { WAIT_TIMEOUT } {
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
