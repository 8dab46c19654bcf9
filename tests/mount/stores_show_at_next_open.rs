//! An open after stores through a mapping, or after a long write, shows the final bytes.
//!
//! The kernel stamps a file when a write begins, not when it ends, and a mapped page once for many stores. A
//! read in between may return a mixture.

#![allow(unsafe_code)] // Mapping a file.

use std::fs::{self, File};
use std::os::unix::fs::FileExt;
use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use crate::common::command::two_shards;
use crate::common::mounting::wait_until;
use crate::sharded_model::{BYTES, Model, values};

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
