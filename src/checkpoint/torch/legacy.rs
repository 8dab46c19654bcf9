//! Finds the parts of a torch file of the older form: five pickles, then raw storages.
//!
//! In: any [`ReadAt`]. Out: the nodes of the state, and the place of each storage.
//!
//! The storages are little-endian, whatever machine wrote them. torch swaps the bytes when it saves. It also
//! writes the machine's byte order into the file, but never reads it again.

use std::collections::HashMap;

use crate::checkpoint::tensor::OriginId;
use crate::source::{ReadAt, SourceError};

use super::gate;
use super::interpret::{PickleValue, interpret};
use super::pickle::{self, Arena, MAX_PICKLE_BYTES, Node, NodeId, PickleError};
use super::storage_bounds::StorageLocation;
use super::storage_ref::storage_ref;

/// Bytes of the first read of a pickle. Most pickles are shorter; a longer pickle is read again with more bytes.
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
    Source(#[from] SourceError),
    #[error("its pickle number {number} is not readable: {error}")]
    Pickle { number: usize, error: PickleError },
    #[error("it does not begin with torch's magic number")]
    Magic {
        /// The class of the object that it begins with, if it is one.
        class: Option<String>,
    },
    #[error("its protocol is not 1001")]
    Protocol,
    #[error("its list of storages is malformed")]
    StorageKeys,
    #[error("storage `{0}` is listed, but no tensor states its size")]
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

/// The parts of a file of the older form.
pub struct LegacyFile {
    pub arena: Arena,
    pub top: NodeId,
    /// The storages by key.
    pub storages: HashMap<String, StorageLocation>,
    /// The length of the state's pickle in bytes.
    pub pickle_bytes: u64,
}

/// Reads the pickles and finds the storages.
pub fn read_legacy_file(file: &dyn ReadAt) -> Result<LegacyFile, LegacyError> {
    // The pickles: magic number, protocol, the machine that wrote it, the state, the keys of the storages.
    let mut at = 0;
    let mut next = |number| {
        let (arena, top, len) = read_pickle(file, at, number)?;
        at += len;
        Ok::<_, LegacyError>((arena, top, at))
    };
    let (arena, top, _) = next(1)?;
    match arena.node(top) {
        Node::Long(span) if arena.bytes(span) == MAGIC_NUMBER => {}
        _ => {
            let class = match interpret(&arena, top) {
                PickleValue::Object(class) => Some(class),
                _ => None,
            };
            return Err(LegacyError::Magic { class });
        }
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

/// Reads the pickle at an offset: its nodes, the value it stands for, and its length.
fn read_pickle(
    file: &dyn ReadAt,
    at: u64,
    number: usize,
) -> Result<(Arena, NodeId, u64), LegacyError> {
    let rest = file.size().saturating_sub(at).min(MAX_PICKLE_BYTES);
    let mut len = FIRST_READ_BYTES.min(rest);
    loop {
        let mut bytes = vec![0; len as usize];
        file.read_exact_at(&mut bytes, at)?;
        let permit = gate::acquire(len, len);
        let result = pickle::read_pickle(&bytes, len);
        drop(permit);
        match result {
            Ok((arena, top, used)) => return Ok((arena, top, used as u64)),
            Err(PickleError::Truncated) if len < rest => len = (len * 8).min(rest),
            Err(error) => return Err(LegacyError::Pickle { number, error }),
        }
    }
}

/// The element count and element size of every storage that the state names.
fn storage_sizes(arena: &Arena) -> Result<HashMap<String, (u64, u64)>, LegacyError> {
    let mut sizes = HashMap::new();
    for key in arena.persistent_keys() {
        // Other persistent values (a class, say) and malformed references take no bytes of the file. A tensor
        // that depends on one is refused by name.
        let Ok(storage) = storage_ref(arena, key) else {
            continue;
        };
        let size = (storage.element_count, storage.element_bytes);
        if sizes.insert(storage.key.to_owned(), size).is_some_and(|before| before != size) {
            return Err(LegacyError::DuplicateStorage(storage.key.to_owned()));
        }
    }
    Ok(sizes)
}

/// The places of the storages, which lie one after the other, each behind its count.
fn find_storages(
    file: &dyn ReadAt,
    mut at: u64,
    keys: &[&str],
    sizes: &HashMap<String, (u64, u64)>,
) -> Result<HashMap<String, StorageLocation>, LegacyError> {
    let mut storages = HashMap::with_capacity(keys.len());
    for &key in keys {
        let &(count, element_bytes) =
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
        let len = count.checked_mul(element_bytes).ok_or_else(truncated)?;
        at = start.checked_add(len).filter(|&end| end <= file.size()).ok_or_else(truncated)?;
        let location = StorageLocation { origin: OriginId(0), start, len };
        if storages.insert(key.to_owned(), location).is_some() {
            return Err(LegacyError::DuplicateStorage(key.to_owned()));
        }
    }
    match file.size() - at {
        0 => Ok(storages),
        extra => Err(LegacyError::TrailingBytes(extra)),
    }
}
