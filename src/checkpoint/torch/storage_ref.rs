//! Storages as tensors of a pickle refer to them.

use crate::checkpoint::refusal::TensorError;
use crate::checkpoint::tensor::{Dtype, StorageElement};

use super::pickle::{Arena, Node, NodeId};

/// A reference to a storage.
#[derive(Clone, Debug)]
pub struct StorageRef<'a> {
    /// Its name in the file.
    pub key: &'a str,
    /// Bytes of one of its elements.
    pub element_bytes: u64,
    /// Its type, or torch's name for a type that safetensors does not have.
    pub dtype: Result<Dtype, &'static str>,
    /// The number of elements that it states.
    pub element_count: u64,
    /// The visible part: first element and count. In older files, storages are windows themselves.
    pub window: Option<(u64, u64)>,
    /// Whether it is on the meta device, and so has no bytes.
    pub is_meta: bool,
}

/// Reads a persistent id: `('storage', class, key, location, count)` and, in the older form, a window.
pub fn storage_ref(arena: &Arena, id: NodeId) -> Result<StorageRef<'_>, TensorError> {
    let malformed = || TensorError::Malformed { what: "its storage is not named as torch does it" };
    let fields = match arena.node(id) {
        Node::Tuple(_) => arena.items(id).unwrap_or_default(),
        _ => return Err(malformed()),
    };
    let (&[kind, class, key, location, count], rest) =
        fields.split_first_chunk().ok_or_else(malformed)?;
    if arena.text(kind) != Some("storage") {
        return Err(malformed());
    }
    let element = match arena.global(class) {
        Some(("torch" | "torch.cuda" | "torch.storage", name)) => {
            StorageElement::of_class(name).ok_or_else(malformed)?
        }
        _ => return Err(malformed()),
    };
    let window = match rest {
        [] => None,
        &[window] => match (arena.node(window), arena.items(window)) {
            (Node::None, _) => None,
            // The name of the window, its first element, and its count.
            (Node::Tuple(_), Some(&[_, first, len])) => Some((
                as_count(arena, first).ok_or_else(malformed)?,
                as_count(arena, len).ok_or_else(malformed)?,
            )),
            _ => return Err(malformed()),
        },
        _ => return Err(malformed()),
    };
    Ok(StorageRef {
        key: arena.text(key).ok_or_else(malformed)?,
        element_bytes: element.bytes,
        dtype: element.dtype,
        element_count: as_count(arena, count).ok_or_else(malformed)?,
        window,
        is_meta: arena.text(location) == Some("meta"),
    })
}

/// A node as a count: a whole number that is not negative.
pub fn as_count(arena: &Arena, id: NodeId) -> Option<u64> {
    match arena.node(id) {
        Node::Int(n) => u64::try_from(n).ok(),
        _ => None,
    }
}
