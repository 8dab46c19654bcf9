//! Meshes of ranks (`DeviceMesh`), as the pickles of all versions of torch state them.

use super::interpret::{PickleValue, interpret};
use super::object::attribute;
use super::pickle::{Arena, NodeId};
use super::storage_ref::as_count;

/// Maximum number of axes of a mesh. torch's largest have five.
pub const MAX_MESH_AXIS_COUNT: usize = 16;

/// The number of ranks along each axis of a mesh, in the spellings of all versions of torch.
pub fn mesh_sizes(arena: &Arena, mesh: NodeId) -> Option<Vec<u64>> {
    // Until 2.8: a tensor with the number of each rank.
    if let Some(tensor) = attribute(arena, mesh, "mesh") {
        return match interpret(arena, tensor) {
            PickleValue::Tensor(view) => view.ok().map(|view| view.shape),
            _ => None,
        };
    }
    let layout = attribute(arena, mesh, "_layout")?;
    if let Some(axes) = attribute(arena, layout, "axes") {
        let size = |&axis: &NodeId| flat_size(arena, attribute(arena, axis, "shape")?, 2);
        return arena.items(axes)?.iter().map(size).collect();
    }
    let shape = attribute(arena, layout, "shape")?;
    match arena.items(shape) {
        Some(sizes) => sizes.iter().map(|&size| flat_size(arena, size, 2)).collect(),
        None => Some(vec![as_count(arena, shape)?]),
    }
}

/// The product of a whole number or of nested tuples of them.
fn flat_size(arena: &Arena, id: NodeId, depth: u32) -> Option<u64> {
    match arena.items(id) {
        Some(items) => {
            let depth = depth.checked_sub(1)?;
            let sizes = items.iter().take(MAX_MESH_AXIS_COUNT + 1);
            sizes
                .map(|&item| flat_size(arena, item, depth))
                .try_fold(1u64, |n, size| n.checked_mul(size?))
        }
        None => as_count(arena, id),
    }
}

/// The attributes that list the ranks of a mesh, or of the mesh that it was sliced from: since 2.9, and before.
const RANK_LISTS: [&str; 2] = ["_flatten_rank_map", "_flatten_mesh_list"];

/// The ranks of a mesh, or of the mesh that it was sliced from.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct MeshRanks {
    pub highest: u64,
    /// Whether the rank of the file is among them.
    pub has_own_rank: bool,
}

impl MeshRanks {
    /// The ranks that a mesh lists; `None` if it lists none, or in no form that torch writes.
    pub fn read(arena: &Arena, mesh: NodeId, own_rank: u64) -> Option<MeshRanks> {
        let list = RANK_LISTS.iter().find_map(|name| attribute(arena, mesh, name))?;
        let mut ranks: Option<MeshRanks> = None;
        for &rank in arena.items(list)? {
            let rank = as_count(arena, rank)?;
            let known = ranks.unwrap_or(MeshRanks { highest: rank, has_own_rank: false });
            ranks = Some(MeshRanks {
                highest: known.highest.max(rank),
                has_own_rank: known.has_own_rank || rank == own_rank,
            });
        }
        ranks
    }
}
