//! Finds the parts of a file of torch's older form: four pickles and the state, then raw storages.
//!
//! In: any [`ReadAt`]. Out: the nodes of the state and where each storage lies. The storages are
//! little-endian whatever machine wrote them: torch turned the bytes round when it saved, and says
//! the machine's order in the file without ever reading that again.

use std::collections::HashMap;

use crate::checkpoint::OriginId;
use crate::source::{self, ReadAt};

use super::gate;
use super::interpret;
use super::pickle::{self, Arena, MAX_PICKLE_BYTES, Node, NodeId};
use super::storage_bounds::StorageLocation;

/// The first read; most pickles of this form are shorter, and one that is not is read again, longer.
const FIRST_READ_BYTES: u64 = 1 << 20;

/// Bytes of the count before each storage.
const COUNT_BYTES: u64 = 8;

/// torch's magic number, 0x1950A86A20F9469CFC6C.
const MAGIC_NUMBER: &[u8] = b"\x6c\xfc\x9c\x46\xf9\x20\x6a\xa8\x50\x19";

/// What is wrong with a file of the older form.
#[allow(missing_docs)] // The messages say it.
#[derive(Debug, thiserror::Error)]
pub enum LegacyError {
    #[error(transparent)]
    Source(#[from] source::SourceError),
    #[error("its pickle number {place} is not readable: {fault}")]
    Pickle { place: usize, fault: pickle::PickleError },
    #[error("it does not begin with torch's magic number")]
    Magic,
    #[error("its protocol is not 1001")]
    Protocol,
    #[error("its list of storages is not one")]
    StorageKeys,
    #[error("storage `{0}` is listed and no tensor says its size")]
    UnknownStorage(String),
    #[error("storage `{0}` is listed twice, or with two sizes")]
    DuplicateStorage(String),
    #[error("storage `{key}` states {stated} elements where the file has {has}")]
    CountMismatch { key: String, stated: u64, has: i64 },
    #[error("it is cut off in storage `{0}`")]
    Truncated(String),
    #[error("{0} bytes follow the last storage")]
    TrailingBytes(u64),
}

/// The parts of such a file.
pub struct LegacyFile {
    pub arena: Arena,
    pub top: NodeId,
    pub storages: HashMap<String, StorageLocation>,
    /// The length of the pickle in bytes.
    pub pickle_bytes: u64,
}

/// Reads the pickles and finds the storages.
pub fn read_legacy_file(file: &dyn ReadAt) -> Result<LegacyFile, LegacyError> {
    // Magic number, protocol, the machine it was written on, the state, the storages' keys.
    let mut at = 0;
    let mut next = |place| {
        let (arena, top, len) = read_pickle(file, at).map_err(|fault| match fault {
            LegacyError::Pickle { fault, .. } => LegacyError::Pickle { place, fault },
            other => other,
        })?;
        at += len;
        Ok::<_, LegacyError>((arena, top, at))
    };
    let (arena, top, _) = next(1)?;
    match arena.node(top) {
        Node::Long(span) if arena.bytes(span) == MAGIC_NUMBER => {}
        _ => return Err(LegacyError::Magic),
    }
    let (arena, top, _) = next(2)?;
    if !matches!(arena.node(top), Node::Int(1001)) {
        return Err(LegacyError::Protocol);
    }
    let (_, _, start) = next(3)?;
    let (arena, top, end) = next(4)?;
    let (key_arena, keys, at) = next(5)?;
    let keys = key_arena.items(keys).ok_or(LegacyError::StorageKeys)?;
    let keys: Option<Vec<&str>> = keys.iter().map(|&key| key_arena.text(key)).collect();
    let storages =
        find_storages(file, at, &keys.ok_or(LegacyError::StorageKeys)?, &storage_sizes(&arena)?)?;
    Ok(LegacyFile { arena, top, storages, pickle_bytes: end - start })
}

fn read_pickle(file: &dyn ReadAt, at: u64) -> Result<(Arena, NodeId, u64), LegacyError> {
    let rest = file.size().saturating_sub(at).min(MAX_PICKLE_BYTES);
    let mut len = FIRST_READ_BYTES.min(rest);
    loop {
        let mut bytes = vec![0; len as usize];
        file.read_exact_at(&mut bytes, at)?;
        let turn = gate::acquire(len, len);
        let read = pickle::read_pickle(&bytes, len);
        drop(turn);
        match read {
            Ok((arena, top, used)) => return Ok((arena, top, used as u64)),
            Err(pickle::PickleError::Truncated) if len < rest => len = (len * 8).min(rest),
            Err(fault) => return Err(LegacyError::Pickle { place: 0, fault }),
        }
    }
}

/// Elements and bytes per element of every storage that the state names.
fn storage_sizes(arena: &Arena) -> Result<HashMap<String, (u64, u64)>, LegacyError> {
    let mut sizes = HashMap::new();
    for key in arena.persistent_keys() {
        // What is no storage (a class, in its own form) or is not named right takes no room here;
        // a tensor that depends on it is refused by name.
        let Ok(storage) = interpret::storage_ref(arena, key) else {
            continue;
        };
        let size = (storage.element_count, storage.element_bytes);
        if sizes.insert(storage.key.to_owned(), size).is_some_and(|before| before != size) {
            return Err(LegacyError::DuplicateStorage(storage.key.to_owned()));
        }
    }
    Ok(sizes)
}

fn find_storages(
    file: &dyn ReadAt,
    mut at: u64,
    keys: &[&str],
    sizes: &HashMap<String, (u64, u64)>,
) -> Result<HashMap<String, StorageLocation>, LegacyError> {
    let mut storages = HashMap::with_capacity(keys.len());
    for &key in keys {
        let &(count, unit) =
            sizes.get(key).ok_or_else(|| LegacyError::UnknownStorage(key.to_owned()))?;
        let truncated = || LegacyError::Truncated(key.to_owned());
        let start =
            at.checked_add(COUNT_BYTES).filter(|&end| end <= file.size()).ok_or_else(truncated)?;
        let mut raw = [0; COUNT_BYTES as usize];
        file.read_exact_at(&mut raw, at)?;
        let has = i64::from_le_bytes(raw);
        if u64::try_from(has) != Ok(count) {
            return Err(LegacyError::CountMismatch { key: key.to_owned(), stated: count, has });
        }
        let len = count.checked_mul(unit).ok_or_else(truncated)?;
        at = start.checked_add(len).filter(|&end| end <= file.size()).ok_or_else(truncated)?;
        let stored = StorageLocation { origin: OriginId(0), start, len };
        if storages.insert(key.to_owned(), stored).is_some() {
            return Err(LegacyError::DuplicateStorage(key.to_owned()));
        }
    }
    match file.size() - at {
        0 => Ok(storages),
        extra => Err(LegacyError::TrailingBytes(extra)),
    }
}
