//! Where mounts and loaders meet: what files of a mount say of themselves to programs that know ckptfs,
//! and the system's [`mountinfo`] of mounts, which says whether they may be believed.
//!
//! In: the path of a file. Out: a [`Told`]: where its bytes lie. There is no other way between the two:
//! no socket, no file that could be left behind.

mod may_block;
pub mod mountinfo;

use std::path::{Path, PathBuf};

use rustix::fs::{FsWord, statfs};
use rustix::io::Errno;
use serde::{Deserialize, Serialize};

pub use may_block::may_keep_waiting;
use mountinfo::Spot;

/// The attribute that says where the bytes lie.
pub const SOURCE: &str = "user.ckptfs.source";
/// A hash of the header and the order: what a load is remembered by.
pub const LAYOUT: &str = "user.ckptfs.layout";
/// A hash of the sources' states and the options: equal means the same bytes.
pub const IDENTITY: &str = "user.ckptfs.identity";

/// The version of the form of [`Source`].
pub const VERSION: u32 = 1;

/// The kernel takes no larger attribute.
const MOST: usize = 64 << 10;

const FUSE: FsWord = 0x6573_5546;

/// Where the bytes of a file lie, as `user.ckptfs.source` has it in JSON.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Source {
    /// The version of this form.
    pub version: u32,
    /// What is mounted.
    pub source: PathBuf,
    /// From the directory that `rootfd` of `pid` is open on.
    pub path: PathBuf,
    /// Whether it is made of others, or shown as it is.
    pub image: bool,
    /// How it was read.
    pub options: Options,
    /// The process that serves the mount.
    pub pid: u32,
    /// Its descriptor of the directory that `path` leads from.
    pub rootfd: i32,
}

/// How a checkpoint was read.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Options {
    /// The dictionary that is shown.
    pub root: Option<String>,
    /// Whether what cannot be shown is left out.
    pub allow_partial: bool,
    /// Whether links may lead out.
    pub follow_symlinks: bool,
}

/// What a file of a mount of ours says of itself.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Told {
    /// Where its bytes lie.
    pub source: Source,
    /// Of an image: what tells it from any other.
    pub identity: Option<String>,
}

/// What the file at a path says; nothing if it lies on no mount of ours, whatever attributes it has.
pub fn told(path: &Path) -> Option<Result<Told, String>> {
    // Everything else is not worth a look at the table.
    if statfs(path).ok()?.f_type != FUSE {
        return None;
    }
    let entry = Spot::at(path).ok()?.entry().ok()??;
    entry.is_ours().then(|| read(path))
}

fn read(path: &Path) -> Result<Told, String> {
    let source = attribute(path, SOURCE)?;
    let source = source.ok_or("the mount does not tell where its bytes lie")?;
    let source: Source = serde_json::from_slice(&source)
        .map_err(|_| "the mount tells where its bytes lie in another form")?;
    if source.version != VERSION {
        return Err(format!("the mount is of another version ({})", source.version));
    }
    let identity = attribute(path, IDENTITY)?.and_then(|bytes| String::from_utf8(bytes).ok());
    Ok(Told { source, identity })
}

fn attribute(path: &Path, name: &str) -> Result<Option<Vec<u8>>, String> {
    let mut value = Vec::with_capacity(MOST);
    match rustix::fs::getxattr(path, name, rustix::buffer::spare_capacity(&mut value)) {
        Ok(_) => Ok(Some(value)),
        Err(Errno::NODATA) => Ok(None),
        Err(error) => Err(format!("the mount does not answer: {error}")),
    }
}
