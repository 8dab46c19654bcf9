//! What a mount of ours says of its files, for loaders that read the sources instead.
//!
//! A file of a mount names its source in extended attributes. The system's [`mountinfo`] decides whether they can
//! be believed: any filesystem can have attributes of these names. Mounts and loaders share nothing else, no socket
//! and no file that could be left behind.

mod may_block;
pub mod mountinfo;

use std::path::{Path, PathBuf};

use rustix::fs::{FsWord, statfs};
use rustix::io::Errno;
use serde::{Deserialize, Serialize};

pub use may_block::may_block;
use mountinfo::PathHandle;

/// The attribute with a [`SourceAttribute`] in JSON.
pub const SOURCE_XATTR: &str = "user.ckptfs.source";
/// The attribute with the layout hash, under which the order of a load is remembered.
pub const LAYOUT_XATTR: &str = "user.ckptfs.layout";
/// The attribute with a hash of the sources' states and the options: equal means the same bytes.
pub const IDENTITY_XATTR: &str = "user.ckptfs.identity";

/// The version of [`SourceAttribute`].
pub const SOURCE_FORMAT_VERSION: u32 = 1;

/// The kernel allows no larger attribute.
pub const MAX_XATTR_BYTES: usize = 64 << 10;

const FUSE_MAGIC: FsWord = 0x6573_5546;

/// The source of a file of a mount.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct SourceAttribute {
    /// The version, [`SOURCE_FORMAT_VERSION`].
    pub version: u32,
    /// The mounted directory or file.
    pub source: PathBuf,
    /// The path from the directory that `rootfd` of `pid` is open on.
    pub path: PathBuf,
    /// Whether the file is a virtual one, made of its sources; otherwise it is shown as it is.
    #[serde(rename = "virtual_file")]
    pub is_virtual_file: bool,
    /// The options that it was parsed with.
    pub options: RecordedOptions,
    /// The process that serves the mount.
    pub pid: u32,
    /// Its descriptor of the directory that `path` leads from.
    pub rootfd: i32,
    /// The file of a recipe that it is made by, in JSON. `path` is then the directory that the recipe is for.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub recipe: Option<String>,
}

/// The options that a checkpoint was parsed with.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct RecordedOptions {
    /// The key of the dictionary that is shown.
    pub root: Option<String>,
    /// Whether tensors that cannot be shown are left out.
    pub allow_partial: bool,
    /// Whether links may lead out of the source.
    pub follow_symlinks: bool,
    /// The number of ranks that per-rank files must have; `None` for any number.
    #[serde(default)]
    pub ranks: Option<u32>,
    /// The base of the first delta, if the user gave one.
    #[serde(default)]
    pub delta_base: Option<PathBuf>,
}

/// The attributes of a file of a mount of ours.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct MountOrigin {
    /// The source of the file.
    pub source: SourceAttribute,
    /// The identity of a virtual file.
    pub identity: Option<String>,
    /// The user that mounted it, as the kernel says.
    pub owner_uid: Option<u32>,
}

/// The attributes of the file at a path; `None` if it is on no mount of ours, whatever attributes it has.
pub fn mount_origin(path: &Path) -> Option<Result<MountOrigin, String>> {
    // Reading the table of mounts takes longer.
    if statfs(path).ok()?.f_type != FUSE_MAGIC {
        return None;
    }
    let entry = PathHandle::open(path).ok()?.mount_entry().ok()??;
    entry.is_ckptfs().then(|| read_origin(path, entry.owner_uid()))
}

fn read_origin(path: &Path, owner_uid: Option<u32>) -> Result<MountOrigin, String> {
    let source = read_xattr(path, SOURCE_XATTR)?;
    let source = source.ok_or("the mount does not tell where its bytes lie")?;
    let source: SourceAttribute = serde_json::from_slice(&source)
        .map_err(|_| "the mount tells where its bytes lie, but not in a known form")?;
    if source.version != SOURCE_FORMAT_VERSION {
        return Err(format!("the mount is of another version ({})", source.version));
    }
    let identity =
        read_xattr(path, IDENTITY_XATTR)?.and_then(|bytes| String::from_utf8(bytes).ok());
    Ok(MountOrigin { source, identity, owner_uid })
}

fn read_xattr(path: &Path, name: &str) -> Result<Option<Vec<u8>>, String> {
    let mut value = Vec::with_capacity(MAX_XATTR_BYTES);
    match rustix::fs::getxattr(path, name, rustix::buffer::spare_capacity(&mut value)) {
        Ok(_) => Ok(Some(value)),
        Err(Errno::NODATA) => Ok(None),
        Err(error) => Err(format!("the mount does not answer: {error}")),
    }
}
