//! A file for tests of the page cache.

use std::path::Path;

use tempfile::TempDir;

use super::file::OpenFile;
use super::root::Root;
use super::store::LinkPolicy;

/// Opens the file `f` of a directory.
pub fn open(dir: &Path) -> OpenFile {
    let (root, _) = Root::for_directory(dir, LinkPolicy::Inside).unwrap();
    OpenFile::open_in_root(&root, Path::new("f")).unwrap()
}

/// A new file `f` in a directory on a disk. It is not in /tmp: a filesystem in memory evicts nothing, and older
/// kernels read nothing of it past the page cache.
pub fn on_disk(bytes: &[u8]) -> (TempDir, OpenFile) {
    let dir = tempfile::tempdir_in(env!("CARGO_MANIFEST_DIR")).unwrap();
    std::fs::write(dir.path().join("f"), bytes).unwrap();
    let file = open(dir.path());
    (dir, file)
}

/// Writes the file back, so that its pages can be evicted.
pub fn sync(dir: &TempDir) {
    std::fs::File::open(dir.path().join("f")).unwrap().sync_all().unwrap();
}
