//! Pieces of tensors in one rank's file: which part of the whole tensor a rank has.
//!
//! torch saves a piece as an object of a class of its own. A `ShardedTensor` states the place of each of its shards. A
//! `DTensor` states the mesh of ranks, this rank's place in it, and how each axis of the mesh cuts the tensor.

use std::collections::{BTreeSet, HashMap};

use crate::checkpoint::refusal::TensorError;
use crate::checkpoint::tensor::{Dtype, Shape};
use crate::source::ReadAt;

use super::axis_cut::{AxisCut, AxisRange, LocalBox, boxes_of_ranges, cut, order_cuts};
use super::device_mesh::{MAX_MESH_AXIS_COUNT, MeshRanks, mesh_sizes};
use super::interpret::{PickleValue, interpret};
use super::object::{attribute, class_of, entry};
use super::pickle::{Arena, Node, NodeId};
use super::storage_ref::as_count;
use super::tensor_view::{TensorView, as_counts, rank_piece_class, torch_dtype};
use super::values::TorchValues;

/// Maximum number of ranges and boxes of the pieces of a file: for the whole file, and for each piece. Real pieces have
/// a few for each axis.
const MAX_CUT_COUNT: [usize; 2] = [1 << 20, 64];

/// Reads the pieces of one rank's file, within a budget of ranges and boxes. A small pickle could otherwise describe
/// boxes without end.
#[derive(Debug)]
pub struct PieceReader<'a> {
    arena: &'a Arena,
    /// The rank that the name of the file states.
    rank: u64,
    /// The ranges and boxes that the pieces may still have.
    budget: usize,
    /// The ranks of the meshes that were read. Thousands of pieces share a mesh of thousands of ranks.
    meshes: HashMap<NodeId, Option<MeshRanks>>,
}

impl<'a> PieceReader<'a> {
    /// A reader for the file of a rank with this number of pieces.
    pub fn new(arena: &'a Arena, rank: u32, piece_count: usize) -> PieceReader<'a> {
        let [whole, each] = MAX_CUT_COUNT;
        let budget = piece_count.saturating_mul(each).saturating_add(whole);
        PieceReader { arena, rank: rank.into(), budget, meshes: HashMap::new() }
    }

    /// The piece that a node is: a call of torch's function for objects of classes of its own.
    pub fn read(&mut self, id: NodeId) -> Result<RankPiece<'a>, TensorError> {
        let arena = self.arena;
        let Node::Call(_, args) = arena.node(id) else { return Err(MALFORMED) };
        // The function, the class, the arguments of the function, and the attributes.
        let Some(&[_, class, args, state]) = arena.items(args) else { return Err(MALFORMED) };
        let Some(&[_, dtype, shape, ..]) = arena.items(args) else { return Err(MALFORMED) };
        let shape: Shape = as_counts(arena, shape).ok_or(MALFORMED)?.into();
        match arena.global(class) {
            Some((_, "DTensor")) => self.dtensor(shape, dtype, state),
            Some((_, "ShardedTensor")) => sharded_tensor(arena, shape, state),
            _ => Err(MALFORMED),
        }
    }

    fn take(&mut self, count: usize) -> Result<(), TensorError> {
        self.budget = self.budget.checked_sub(count).ok_or(TOO_MANY_CUTS)?;
        Ok(())
    }

    fn mesh_ranks(&mut self, mesh: NodeId) -> Option<MeshRanks> {
        let (arena, rank) = (self.arena, self.rank);
        *self.meshes.entry(mesh).or_insert_with(|| MeshRanks::read(arena, mesh, rank))
    }

    /// What a mesh with this number of ranks records of the run. `is_member` says whether this rank is in it.
    ///
    /// Ranks are counted over all processes. A file whose mesh has higher ranks alone counts otherwise: then the size of
    /// the mesh is all that is known.
    fn recorded_ranks(&mut self, mesh: NodeId, size: u64, is_member: bool) -> RecordedRanks {
        let recorded = |min_count| RecordedRanks { min_count, ..RecordedRanks::default() };
        let Some(ranks) = self.mesh_ranks(mesh) else { return recorded(size) };
        let count = ranks.highest.saturating_add(1);
        match is_member && !ranks.has_own_rank {
            true if count <= self.rank => {
                RecordedRanks { excess_of: Some(count), ..recorded(size) }
            }
            true => recorded(size),
            false => recorded(count.max(size)),
        }
    }

    fn dtensor(
        &mut self,
        shape: Shape,
        dtype: NodeId,
        state: NodeId,
    ) -> Result<RankPiece<'a>, TensorError> {
        let arena = self.arena;
        // A dictionary of attributes, or a pair: a dictionary, and one for slots.
        let parts = match arena.node(state) {
            Node::Tuple(_) => arena.items(state).unwrap_or_default(),
            _ => std::slice::from_ref(&state),
        };
        let field = |name| parts.iter().find_map(|&part| entry(arena, part, name)).ok_or(MALFORMED);
        let view = tensor_view(arena, field("_local_tensor")?)?;
        let spec = field("_spec")?;
        let mesh = attribute(arena, spec, "mesh").ok_or(MALFORMED)?;
        let sizes = mesh_sizes(arena, mesh).ok_or(MALFORMED)?;
        let coordinates = attribute(arena, mesh, "_coordinate_on_dim").ok_or(MALFORMED)?;
        if sizes.len() > MAX_MESH_AXIS_COUNT {
            return Err(MALFORMED);
        }
        let size = sizes.iter().try_fold(1u64, |n, &size| n.checked_mul(size)).ok_or(MALFORMED)?;
        let is_member = arena.node(coordinates) != Node::None;
        let ranks = self.recorded_ranks(mesh, size, is_member);
        if !is_member {
            let (parts, dtype) = (Vec::new(), torch_dtype(arena, dtype).ok());
            return Ok(RankPiece { shape, parts, is_later_replica: false, ranks, dtype });
        }
        let coordinates = as_count_list(arena, coordinates).ok_or(MALFORMED)?;
        let placements = attribute(arena, spec, "placements").and_then(|id| arena.items(id));
        let placements =
            placements.ok_or(MALFORMED)?.iter().map(|&id| placement(arena, id, shape.len()));
        let placements = placements.collect::<Result<Vec<_>, _>>()?;
        let fits = (sizes.len(), sizes.len()) == (coordinates.len(), placements.len())
            && coordinates.iter().zip(&sizes).all(|(place, size)| place < size);
        if !fits {
            return Err(MALFORMED);
        }
        let mut kept: Vec<Vec<AxisRange>> =
            shape.iter().map(|&size| vec![AxisRange { start: 0, count: size }]).collect();
        let axes = || sizes.iter().zip(&coordinates).zip(&placements);
        let is_later_replica =
            axes().any(|((_, &place), placement)| *placement == Placement::Replicate && place > 0);
        let order = recorded_order(arena, spec)?;
        for (axis, kept) in kept.iter_mut().enumerate() {
            // The cuts of the axis, each with its place in the mesh.
            let cuts = (0u64..).zip(axes()).filter_map(|(n, ((&ranks, &rank), placement))| {
                let (cut, split_factor) = match *placement {
                    Placement::Replicate => return None,
                    Placement::Shard { axis } => (axis, 1),
                    Placement::StridedShard { axis, split_factor } => (axis, split_factor),
                };
                (cut == axis).then_some((n, (AxisCut { ranks, rank }, split_factor)))
            });
            let cuts: Vec<(u64, (AxisCut, u64))> = cuts.collect();
            let ordered = match &order {
                None => order_cuts(&cuts.iter().map(|(_, cut)| *cut).collect::<Vec<_>>()),
                Some(order) => {
                    let own = order.iter().find(|order| order.axis == axis as u64);
                    let own = own.map_or(&[][..], |order| &order.mesh_axes);
                    let of_place = |n: &u64| cuts.iter().find(|(place, _)| place == n);
                    let ordered: Option<Vec<_>> = own.iter().map(of_place).collect();
                    let distinct: BTreeSet<&u64> = own.iter().collect();
                    let ordered =
                        ordered.filter(|_| (distinct.len(), own.len()) == (cuts.len(), cuts.len()));
                    ordered.ok_or(MALFORMED)?.into_iter().map(|(_, cut)| *cut).collect()
                }
            };
            for (axis_cut, pieces) in ordered {
                *kept = cut(kept, axis_cut, pieces).ok_or(TOO_MANY_CUTS)?;
                self.take(kept.len())?;
            }
        }
        let local_shape: Vec<u64> =
            kept.iter().map(|ranges| ranges.iter().map(|range| range.count).sum()).collect();
        // torch keeps an empty piece in a tensor of any empty shape.
        let is_empty = local_shape.contains(&0);
        if is_empty && view.shape.contains(&0) {
            let parts = vec![LocalPart { view, boxes: Vec::new() }];
            return Ok(RankPiece { shape, parts, is_later_replica, ranks, dtype: None });
        }
        if view.shape != local_shape {
            return Err(TensorError::Malformed {
                what: "its shape is not that of this rank's part of the whole tensor",
            });
        }
        let boxes = boxes_of_ranges(&kept).ok_or(TOO_MANY_CUTS)?;
        self.take(boxes.len())?;
        let parts = vec![LocalPart { view, boxes }];
        Ok(RankPiece { shape, parts, is_later_replica, ranks, dtype: None })
    }
}

/// A piece: the shape of the whole tensor, and the parts that this rank has.
#[derive(Debug)]
pub struct RankPiece<'a> {
    /// The shape of the whole tensor, in elements as torch counts them.
    pub shape: Shape,
    pub parts: Vec<LocalPart<'a>>,
    /// Whether another rank has the same part, and comes first.
    pub is_later_replica: bool,
    pub ranks: RecordedRanks,
    /// The type of its elements, where it is recorded beside the parts.
    pub dtype: Option<Dtype>,
}

/// What a piece records of the ranks of its run.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct RecordedRanks {
    /// The number of ranks, where it is recorded. The size of a mesh is not: a mesh may have some of the ranks.
    pub world_size: Option<u64>,
    /// The smallest number of ranks that the run can have had.
    pub min_count: u64,
    /// The number of ranks, if the file states that it is of one of them, and its own rank is too high for that.
    pub excess_of: Option<u64>,
}

/// A tensor in this rank's file, and the boxes of the whole tensor that it holds.
#[derive(Debug)]
pub struct LocalPart<'a> {
    pub view: TensorView<'a>,
    pub boxes: Vec<LocalBox>,
}

const MALFORMED: TensorError = TensorError::Malformed {
    what: "its place in the whole tensor is not stated as torch states it",
};

const TOO_MANY_CUTS: TensorError =
    TensorError::Malformed { what: "it is cut into more pieces than any training run writes" };

/// Whether a file is of torch, with pieces of tensors, judged by the classes that its pickle names.
pub fn has_rank_pieces(file: &dyn ReadAt) -> bool {
    TorchValues::read(file)
        .is_ok_and(|values| values.arena.globals().any(|class| rank_piece_class(class).is_some()))
}

fn tensor_view(arena: &Arena, id: NodeId) -> Result<TensorView<'_>, TensorError> {
    match interpret(arena, id) {
        PickleValue::Tensor(view) => view,
        _ => Err(MALFORMED),
    }
}

/// The piece of a `ShardedTensor`, whose shards state their places.
fn sharded_tensor(
    arena: &Arena,
    shape: Shape,
    state: NodeId,
) -> Result<RankPiece<'_>, TensorError> {
    let Some(&[shards, metadata, ref rest @ ..]) = arena.items(state) else {
        return Err(MALFORMED);
    };
    let part = |&shard: &NodeId| {
        let place = attribute(arena, shard, "metadata").ok_or(MALFORMED)?;
        let counts = |name| attribute(arena, place, name).and_then(|id| as_count_list(arena, id));
        let start: Shape = counts("shard_offsets").ok_or(MALFORMED)?.into();
        let counts: Shape = counts("shard_sizes").ok_or(MALFORMED)?.into();
        let view = tensor_view(arena, attribute(arena, shard, "tensor").ok_or(MALFORMED)?)?;
        if *view.shape != *counts {
            return Err(MALFORMED);
        }
        let local_start = counts.iter().map(|_| 0).collect();
        Ok(LocalPart { view, boxes: vec![LocalBox { start, counts, local_start }] })
    };
    let shards = arena.items(shards).ok_or(MALFORMED)?;
    let size = attribute(arena, metadata, "size").and_then(|size| as_counts(arena, size));
    if size.is_some_and(|size| *size != *shape) {
        return Err(MALFORMED);
    }
    // A rank may have no shard. The tensor's properties, of which the first is the type, are recorded all the same.
    let properties = attribute(arena, metadata, "tensor_properties");
    let properties = properties.and_then(|id| arena.items(arena.state(id)?));
    let dtype = properties.and_then(|fields| torch_dtype(arena, *fields.first()?).ok());
    let world_size = rest.iter().find_map(|&group| attribute(arena, group, "global_world_size"));
    let world_size = world_size.and_then(|id| as_count(arena, id));
    let min_count = world_size.unwrap_or(0);
    Ok(RankPiece {
        shape,
        parts: shards.iter().map(part).collect::<Result<_, _>>()?,
        is_later_replica: false,
        ranks: RecordedRanks { world_size, min_count, excess_of: None },
        dtype,
    })
}

/// How an axis of a mesh cuts a tensor.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Placement {
    Replicate,
    Shard {
        axis: usize,
    },
    /// The axis is cut into `split_factor` pieces first, and each of these is cut over the ranks.
    StridedShard {
        axis: usize,
        split_factor: u64,
    },
}

fn placement(arena: &Arena, id: NodeId, axis_count: usize) -> Result<Placement, TensorError> {
    let count = |name| attribute(arena, id, name).and_then(|id| as_count(arena, id));
    let axis = || {
        let axis = count("dim").and_then(|axis| usize::try_from(axis).ok());
        axis.filter(|axis| *axis < axis_count).ok_or(MALFORMED)
    };
    match class_of(arena, id) {
        Some((_, "Replicate")) => Ok(Placement::Replicate),
        Some((_, "Shard")) => Ok(Placement::Shard { axis: axis()? }),
        Some((_, "_StridedShard")) => {
            let split_factor =
                count("split_factor").filter(|factor| *factor > 0).ok_or(MALFORMED)?;
            Ok(Placement::StridedShard { axis: axis()?, split_factor })
        }
        Some((_, "Partial")) => Err(TensorError::UnsupportedKind {
            kind: "a partial sum, one of several that make the values".to_owned(),
        }),
        _ => Err(MALFORMED),
    }
}

/// The order in which axes of the mesh cut one axis of a tensor.
#[derive(Debug)]
struct CutOrder {
    axis: u64,
    mesh_axes: Vec<u64>,
}

/// The recorded order of cuts; `None` if it follows from the placements.
fn recorded_order(arena: &Arena, spec: NodeId) -> Result<Option<Vec<CutOrder>>, TensorError> {
    let Some(order) = attribute(arena, spec, "shard_order") else { return Ok(None) };
    if arena.node(order) == Node::None {
        return Ok(None);
    }
    let cut_order = |&entry: &NodeId| {
        let Node::Call(class, args) = arena.node(entry) else { return None };
        let is_entry = arena.global(class).is_some_and(|(_, name)| name == "ShardOrderEntry");
        match arena.items(args)? {
            &[axis, cuts] if is_entry => {
                Some(CutOrder { axis: as_count(arena, axis)?, mesh_axes: as_counts(arena, cuts)? })
            }
            _ => None,
        }
    };
    let entries = arena.items(order).filter(|entries| entries.len() <= MAX_MESH_AXIS_COUNT);
    let entries = entries.ok_or(MALFORMED)?.iter().map(cut_order).collect::<Option<Vec<_>>>();
    entries.map(Some).ok_or(MALFORMED)
}

/// A tuple or a list of counts.
fn as_count_list(arena: &Arena, id: NodeId) -> Option<Vec<u64>> {
    match arena.node(id) {
        Node::List(_) => {
            let items = arena.items(id)?;
            (items.len() <= MAX_AXIS_COUNT).then_some(())?;
            items.iter().map(|&item| as_count(arena, item)).collect()
        }
        _ => as_counts(arena, id),
    }
}

/// Maximum number of axes of a tensor, and so of a place in it: torch's own limit.
const MAX_AXIS_COUNT: usize = 64;
