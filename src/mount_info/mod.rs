//! Where mounts and loaders meet: what files of a mount say of themselves to programs that know ckptfs,
//! and the system's [`mountinfo`] of mounts, which says whether they may be believed.
//!
//! In: the path of a file. Out: a [`MountOrigin`]: where its bytes lie. There is no other way between the two:
//! no socket, no file that could be left behind.

mod may_block;
pub mod mountinfo;

use std::path::{Path, PathBuf};

use rustix::fs::{FsWord, statfs};
use rustix::io::Errno;
use serde::{Deserialize, Serialize};

pub use may_block::may_block;
use mountinfo::PathHandle;

/// The attribute that says where the bytes lie.
pub const SOURCE_XATTR: &str = "user.ckptfs.source";
/// A hash of the header and the order: what a load is remembered by.
pub const LAYOUT_XATTR: &str = "user.ckptfs.layout";
/// A hash of the sources' states and the options: equal means the same bytes.
pub const IDENTITY_XATTR: &str = "user.ckptfs.identity";

/// The version of the form of [`SourceAttribute`].
pub const SOURCE_FORMAT_VERSION: u32 = 1;

/// The kernel takes no larger attribute.
const MAX_XATTR_BYTES: usize = 64 << 10;

const FUSE_MAGIC: FsWord = 0x6573_5546;

/// Where the bytes of a file lie, as `user.ckptfs.source` has it in JSON.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct SourceAttribute {
    /// The version of this form.
    pub version: u32,
    /// What is mounted.
    pub source: PathBuf,
    /// From the directory that `rootfd` of `pid` is open on.
    pub path: PathBuf,
    /// Whether it is made of others, or shown as it is.
    #[serde(rename = "virtual_file")]
    pub is_virtual_file: bool,
    /// How it was read.
    pub options: RecordedOptions,
    /// The process that serves the mount.
    pub pid: u32,
    /// Its descriptor of the directory that `path` leads from.
    pub rootfd: i32,
}

/// How a checkpoint was read.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct RecordedOptions {
    /// The dictionary that is shown.
    pub root: Option<String>,
    /// Whether what cannot be shown is left out.
    pub allow_partial: bool,
    /// Whether links may lead out.
    pub follow_symlinks: bool,
}

/// What a file of a mount of ours says of itself.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct MountOrigin {
    /// Where its bytes lie.
    pub source: SourceAttribute,
    /// Of a virtual file: what tells it from any other.
    pub identity: Option<String>,
}

/// What the file at a path says; nothing if it lies on no mount of ours, whatever attributes it has.
pub fn mount_origin(path: &Path) -> Option<Result<MountOrigin, String>> {
    // Everything else is not worth a look at the table.
    if statfs(path).ok()?.f_type != FUSE_MAGIC {
        return None;
    }
    let entry = PathHandle::open(path).ok()?.mount_entry().ok()??;
    entry.is_ckptfs().then(|| read_origin(path))
}

fn read_origin(path: &Path) -> Result<MountOrigin, String> {
    let source = read_xattr(path, SOURCE_XATTR)?;
    let source = source.ok_or("the mount does not tell where its bytes lie")?;
    let source: SourceAttribute = serde_json::from_slice(&source)
        .map_err(|_| "the mount tells where its bytes lie in another form")?;
    if source.version != SOURCE_FORMAT_VERSION {
        return Err(format!("the mount is of another version ({})", source.version));
    }
    let identity =
        read_xattr(path, IDENTITY_XATTR)?.and_then(|bytes| String::from_utf8(bytes).ok());
    Ok(MountOrigin { source, identity })
}

fn read_xattr(path: &Path, name: &str) -> Result<Option<Vec<u8>>, String> {
    let mut value = Vec::with_capacity(MAX_XATTR_BYTES);
    match rustix::fs::getxattr(path, name, rustix::buffer::spare_capacity(&mut value)) {
        Ok(_) => Ok(Some(value)),
        Err(Errno::NODATA) => Ok(None),
        Err(error) => Err(format!("the mount does not answer: {error}")),
    }
}
