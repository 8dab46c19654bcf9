//! A mount with a sharded model that tests change in its source.

use std::fs::{self, File};
use std::os::unix::fs::{FileExt, MetadataExt};
use std::path::PathBuf;

use crate::common::command::two_shards;
use crate::common::mounting::{MountFixture, wait_until};

/// Bytes of each of the two tensors: more than is read along with a read.
pub const BYTES: usize = 4 << 20;

/// A mount with a model in two shards, in a directory of its own.
pub struct Model {
    pub fixture: MountFixture,
    pub log: String,
}

impl Model {
    pub fn new(options: &[&str]) -> Model {
        let fixture = MountFixture::new();
        let log = fixture.path("log");
        let model = Model { fixture, log };
        fs::create_dir(model.source("model")).unwrap();
        model.write(1);
        model.fixture.mount(&[&["--log-file", &model.log], options].concat());
        model
    }

    pub fn source(&self, name: &str) -> PathBuf {
        PathBuf::from(&self.fixture.source).join(name)
    }

    pub fn shard(&self, number: usize) -> PathBuf {
        self.source(&format!("model/model-0000{number}-of-00002.safetensors"))
    }

    pub fn virtual_file(&self) -> PathBuf {
        PathBuf::from(&self.fixture.mountpoint).join("model/model.safetensors")
    }

    /// Writes both shards under new names, and renames each into place.
    pub fn write(&self, fill: u8) {
        self.write_beside(fill);
        self.put_in_place();
    }

    pub fn write_beside(&self, fill: u8) {
        for (name, bytes) in two_shards(fill, BYTES) {
            fs::write(self.source(&format!("model/{name}.new")), bytes).unwrap();
        }
    }

    pub fn put_in_place(&self) {
        for number in [1, 2] {
            let shard = self.shard(number);
            fs::rename(format!("{}.new", shard.display()), shard).unwrap();
        }
    }

    /// Waits until the name shows a model of these values, and gives its inode.
    #[track_caller]
    pub fn shows(&self, first: u8, second: u8) -> u64 {
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

    pub fn errors(&self) -> Vec<String> {
        let log = fs::read_to_string(&self.log).unwrap_or_default();
        log.lines().filter(|line| line.contains("ERROR")).map(str::to_owned).collect()
    }

    pub fn unmount(&self) {
        assert_eq!(self.fixture.unmount(&[]).code, 0);
    }
}

/// The one value of each of the two tensors, read past the kernel's cache.
pub fn values(file: &File) -> std::io::Result<(u8, u8)> {
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
pub fn forget(file: &File) {
    rustix::fs::fadvise(file, 0, None, rustix::fs::Advice::DontNeed).unwrap();
}
