//! The damaged deltas that reads of this process have found.
//!
//! The newest version of a chain is chosen without reading its tensors, so a damaged delta is found when a tensor is first
//! read. From then on, chains end before it.

use std::collections::{HashSet, VecDeque};
use std::path::PathBuf;
use std::sync::Mutex;
use std::sync::atomic::{AtomicU64, Ordering};

use crate::source::{Damage, FileIdentity, SourceError};
use crate::threads::lock;

use super::contents::Checkpoint;

/// Maximum number of damaged files that are remembered. The oldest is forgotten first, and found again by a read.
const MAX_DAMAGED_COUNT: usize = 64;

static DAMAGED: Mutex<VecDeque<DamagedDelta>> = Mutex::new(VecDeque::new());

static FOUND_COUNT: AtomicU64 = AtomicU64::new(0);

/// A file of a delta, and what is wrong with it on this base.
struct DamagedDelta {
    file: FileIdentity,
    /// The file of the base that the damage was found with: the delta may be sound on another.
    base: Option<FileIdentity>,
    path: PathBuf,
    damage: Box<Damage>,
}

/// Remembers a damaged file of a delta. Errors of other kinds do not lie in the delta, and are ignored.
pub fn record_damage(file: FileIdentity, base: Option<FileIdentity>, error: SourceError) {
    let SourceError::Damaged { path, damage } = error else { return };
    let mut damaged = lock(&DAMAGED);
    if damaged.iter().any(|known| known.file == file && known.base == base) {
        return;
    }
    if damaged.len() >= MAX_DAMAGED_COUNT {
        damaged.pop_front();
    }
    damaged.push_back(DamagedDelta { file, base, path, damage });
    FOUND_COUNT.fetch_add(1, Ordering::Release);
}

/// The number of damaged files that were found. While it stays the same, no chain ends earlier.
pub fn damaged_delta_count() -> u64 {
    FOUND_COUNT.load(Ordering::Acquire)
}

/// The error of a damaged file that a checkpoint is made of, if there is one.
pub fn find_damage(checkpoint: &Checkpoint) -> Option<SourceError> {
    let damaged = lock(&DAMAGED);
    if damaged.is_empty() {
        return None;
    }
    let files: HashSet<FileIdentity> =
        checkpoint.source_files().map(|file| file.identity()).collect();
    let is_part = |known: &&DamagedDelta| {
        files.contains(&known.file) && known.base.is_none_or(|base| files.contains(&base))
    };
    damaged.iter().find(is_part).map(|known| SourceError::Damaged {
        path: known.path.clone(),
        damage: known.damage.clone(),
    })
}
