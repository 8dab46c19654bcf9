//! Pieces of tensors in one rank's file: which part of the whole tensor a rank has.
//!
//! torch saves a piece as an object of a class of its own. A `ShardedTensor` states the place of each of its shards. A
//! `DTensor` states the mesh of ranks, this rank's place in it, and how each axis of the mesh cuts the tensor.

use std::collections::BTreeSet;

use crate::checkpoint::refusal::TensorError;
use crate::checkpoint::tensor::{Dtype, Shape};
use crate::source::ReadAt;

use super::interpret::{PickleValue, interpret};
use super::object::{attribute, class_of, entry};
use super::pickle::{Arena, Node, NodeId};
use super::storage_ref::as_count;
use super::tensor_view::{TensorView, as_counts, rank_piece_class, torch_dtype};
use super::values::TorchValues;

/// Maximum number of axes of a mesh. torch's largest have five.
const MAX_MESH_AXIS_COUNT: usize = 16;

/// Maximum number of ranges that an axis of a tensor is cut into for one rank: more than the ranks of any run.
const MAX_RANGE_COUNT: usize = 1 << 16;

/// Maximum number of ranges and boxes of the pieces of a file: for the whole file, and for each piece. Real pieces have
/// a few for each axis.
const MAX_CUT_COUNT: [usize; 2] = [1 << 20, 64];

/// The ranges and boxes that the pieces of a file may still have. A small pickle could otherwise describe boxes without
/// end.
#[derive(Debug)]
pub struct CutBudget(usize);

impl CutBudget {
    /// The budget for a file with this number of pieces.
    pub fn new(piece_count: usize) -> CutBudget {
        let [whole, each] = MAX_CUT_COUNT;
        CutBudget(piece_count.saturating_mul(each).saturating_add(whole))
    }

    fn take(&mut self, count: usize) -> Result<(), TensorError> {
        self.0 = self.0.checked_sub(count).ok_or(TOO_MANY_CUTS)?;
        Ok(())
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
    /// The number of ranks that the tensor is cut over, where that is recorded.
    pub rank_count: Option<u64>,
    /// The type of its elements, where it is recorded beside the parts.
    pub dtype: Option<Dtype>,
}

/// A tensor in this rank's file, and the boxes of the whole tensor that it holds.
#[derive(Debug)]
pub struct LocalPart<'a> {
    pub view: TensorView<'a>,
    pub boxes: Vec<LocalBox>,
}

/// A box of a whole tensor, and its place in the rank's tensor.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct LocalBox {
    pub start: Shape,
    pub counts: Shape,
    /// The first step of each axis in the rank's tensor.
    pub local_start: Shape,
}

const MALFORMED: TensorError = TensorError::Malformed {
    what: "its place in the whole tensor is not stated as torch states it",
};

const TOO_MANY_CUTS: TensorError =
    TensorError::Malformed { what: "it is cut into more pieces than any training run writes" };

/// Whether a file is a torch archive with pieces of tensors, judged by the classes that its pickle names.
pub fn has_rank_pieces(file: &dyn ReadAt) -> bool {
    TorchValues::read_zip(file)
        .is_ok_and(|values| values.arena.globals().any(|class| rank_piece_class(class).is_some()))
}

/// The piece that a node is: a call of torch's function for objects of classes of its own.
pub fn rank_piece<'a>(
    arena: &'a Arena,
    id: NodeId,
    budget: &mut CutBudget,
) -> Result<RankPiece<'a>, TensorError> {
    let Node::Call(_, args) = arena.node(id) else { return Err(MALFORMED) };
    // The function, the class, the arguments of the function, and the attributes.
    let Some(&[_, class, args, state]) = arena.items(args) else { return Err(MALFORMED) };
    let Some(&[_, _, shape, ..]) = arena.items(args) else { return Err(MALFORMED) };
    let shape: Shape = as_counts(arena, shape).ok_or(MALFORMED)?.into();
    match arena.global(class) {
        Some((_, "DTensor")) => dtensor(arena, shape, state, budget),
        Some((_, "ShardedTensor")) => sharded_tensor(arena, shape, state),
        _ => Err(MALFORMED),
    }
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
    Ok(RankPiece {
        shape,
        parts: shards.iter().map(part).collect::<Result<_, _>>()?,
        is_later_replica: false,
        rank_count: world_size.and_then(|id| as_count(arena, id)),
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

fn dtensor<'a>(
    arena: &'a Arena,
    shape: Shape,
    state: NodeId,
    budget: &mut CutBudget,
) -> Result<RankPiece<'a>, TensorError> {
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
    let is_outside_mesh = arena.node(coordinates) == Node::None;
    if is_outside_mesh {
        let (parts, is_later_replica, rank_count, dtype) = (Vec::new(), false, None, None);
        return Ok(RankPiece { shape, parts, is_later_replica, rank_count, dtype });
    }
    let coordinates = as_count_list(arena, coordinates).ok_or(MALFORMED)?;
    let placements = attribute(arena, spec, "placements").and_then(|id| arena.items(id));
    let placements =
        placements.ok_or(MALFORMED)?.iter().map(|&id| placement(arena, id, shape.len()));
    let placements = placements.collect::<Result<Vec<_>, _>>()?;
    let fits = sizes.len() <= MAX_MESH_AXIS_COUNT
        && (sizes.len(), sizes.len()) == (coordinates.len(), placements.len())
        && coordinates.iter().zip(&sizes).all(|(place, size)| place < size);
    if !fits {
        return Err(MALFORMED);
    }
    let ranks = sizes.iter().try_fold(1u64, |n, &size| n.checked_mul(size)).ok_or(MALFORMED)?;
    let mut kept: Vec<Vec<AxisRange>> =
        shape.iter().map(|&size| vec![AxisRange { start: 0, count: size }]).collect();
    let mesh = || sizes.iter().zip(&coordinates).zip(&placements);
    let is_later_replica =
        mesh().any(|((_, &place), placement)| *placement == Placement::Replicate && place > 0);
    let order = recorded_order(arena, spec)?;
    for (axis, kept) in kept.iter_mut().enumerate() {
        // The cuts of the axis, each with its place in the mesh.
        let cuts = (0u64..).zip(mesh()).filter_map(|(n, ((&ranks, &rank), placement))| {
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
            budget.take(kept.len())?;
        }
    }
    let local_shape: Vec<u64> =
        kept.iter().map(|ranges| ranges.iter().map(|range| range.count).sum()).collect();
    if view.shape != local_shape {
        return Err(TensorError::Malformed {
            what: "its shape is not that of this rank's part of the whole tensor",
        });
    }
    let boxes = boxes_of_ranges(&kept).ok_or(TOO_MANY_CUTS)?;
    budget.take(boxes.len())?;
    let parts = vec![LocalPart { view, boxes }];
    Ok(RankPiece { shape, parts, is_later_replica, rank_count: Some(ranks), dtype: None })
}

/// The number of ranks along each axis of a mesh, in the spellings of all versions of torch.
fn mesh_sizes(arena: &Arena, mesh: NodeId) -> Option<Vec<u64>> {
    // Until 2.8: a tensor with the number of each rank.
    if let Some(tensor) = attribute(arena, mesh, "mesh") {
        return tensor_view(arena, tensor).ok().map(|view| view.shape);
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

/// Steps of an axis that follow one another.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct AxisRange {
    start: u64,
    count: u64,
}

/// A cut over some ranks, of which this is one.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct AxisCut {
    ranks: u64,
    rank: u64,
}

/// The cuts of one axis of a tensor, in the order in which they were made. With each comes the number of pieces that it
/// cuts one by one.
///
/// `cuts` has them in the order of the mesh, each with its split factor. A factor is the number of ranks, of later axes
/// of the mesh, that cut before: tensor parallelism before FSDP. If no order gives these factors, they count pieces that
/// no rank cut, such as fused weights.
fn order_cuts(cuts: &[(AxisCut, u64)]) -> Vec<(AxisCut, u64)> {
    let mut ordered: Vec<AxisCut> = Vec::new();
    for &(axis_cut, split_factor) in cuts.iter().rev() {
        // The ranks that cut before each place in the order.
        let before = ordered.iter().scan(1u64, |ranks, cut| {
            *ranks = ranks.saturating_mul(cut.ranks);
            Some(*ranks)
        });
        match std::iter::once(1).chain(before).position(|ranks| ranks == split_factor) {
            Some(place) => ordered.insert(place, axis_cut),
            None => return cuts.to_vec(),
        }
    }
    ordered.into_iter().map(|axis_cut| (axis_cut, 1)).collect()
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

/// The ranges that a rank keeps. The steps are cut into pieces, and each piece is cut over the ranks, as `torch.chunk`
/// cuts: the last part may be smaller, or empty. `None` if that makes too many ranges.
fn cut(ranges: &[AxisRange], axis_cut: AxisCut, pieces: u64) -> Option<Vec<AxisRange>> {
    let AxisCut { ranks, rank } = axis_cut;
    let total: u64 = ranges.iter().map(|range| range.count).sum();
    if pieces.min(total) > MAX_RANGE_COUNT as u64 {
        return None;
    }
    let piece = total.div_ceil(pieces);
    let mut kept = Vec::new();
    let mut cursor = RangeCursor { ranges, used: 0 };
    let mut at = 0;
    while at < total {
        let len = piece.min(total - at);
        let part = len.div_ceil(ranks);
        let start = part.saturating_mul(rank).min(len);
        let count = part.min(len - start);
        cursor.advance(start, |_| {});
        cursor.advance(count, |range| match kept.last_mut() {
            Some(AxisRange { start, count }) if *start + *count == range.start => {
                *count += range.count;
            }
            _ => kept.push(range),
        });
        cursor.advance(len - start - count, |_| {});
        if kept.len() > MAX_RANGE_COUNT {
            return None;
        }
        at += len;
    }
    Some(kept)
}

/// A place in ranges that follow one another.
struct RangeCursor<'a> {
    /// The ranges from the current one on.
    ranges: &'a [AxisRange],
    /// The number of steps of the current range that lie before the place.
    used: u64,
}

impl RangeCursor<'_> {
    /// Advances by some steps, and visits the parts of the ranges that have them.
    fn advance(&mut self, mut steps: u64, mut visit: impl FnMut(AxisRange)) {
        while let Some((first, rest)) = self.ranges.split_first()
            && steps > 0
        {
            let count = (first.count - self.used).min(steps);
            visit(AxisRange { start: first.start + self.used, count });
            (self.used, steps) = (self.used + count, steps - count);
            if self.used == first.count {
                (self.ranges, self.used) = (rest, 0);
            }
        }
    }
}

/// A box for each combination of ranges; `None` if there are too many.
fn boxes_of_ranges(axes: &[Vec<AxisRange>]) -> Option<Vec<LocalBox>> {
    let empty =
        || LocalBox { start: Shape::new(), counts: Shape::new(), local_start: Shape::new() };
    let mut boxes = vec![empty()];
    for ranges in axes {
        if boxes.len().checked_mul(ranges.len())? > MAX_RANGE_COUNT {
            return None;
        }
        let mut wider = Vec::with_capacity(boxes.len() * ranges.len());
        for part in &boxes {
            let mut local = 0;
            for range in ranges {
                let mut part = part.clone();
                part.start.push(range.start);
                part.counts.push(range.count);
                part.local_start.push(local);
                wider.push(part);
                local += range.count;
            }
        }
        boxes = wider;
    }
    Some(boxes)
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

#[cfg(test)]
mod tests {
    use super::*;

    fn rows(ranges: &[AxisRange]) -> Vec<u64> {
        ranges.iter().flat_map(|range| range.start..range.start + range.count).collect()
    }

    /// The rows that torch's two steps give: tensor parallelism cuts first, and FSDP cuts each of these parts.
    fn nested(size: u64, dp: (u64, u64), tp: (u64, u64)) -> Vec<u64> {
        let chunk = |rows: &[u64], n: u64, rank: u64| -> Vec<u64> {
            let part = rows.len().div_ceil(n as usize).max(1);
            rows.chunks(part).nth(rank as usize).map(<[u64]>::to_vec).unwrap_or_default()
        };
        let all: Vec<u64> = (0..size).collect();
        chunk(&chunk(&all, tp.0, tp.1), dp.0, dp.1)
    }

    #[test]
    fn an_axis_is_cut_as_torch_cuts_it() {
        for size in 0..24 {
            let whole = [AxisRange { start: 0, count: size }];
            for (dp, tp) in [(1, 2), (2, 1), (2, 2), (2, 3), (3, 2), (4, 2), (2, 4), (5, 3)] {
                for rank in 0..dp * tp {
                    let (dp_rank, tp_rank) = (rank / tp, rank % tp);
                    let cuts = [
                        (AxisCut { ranks: dp, rank: dp_rank }, tp),
                        (AxisCut { ranks: tp, rank: tp_rank }, 1),
                    ];
                    let mut kept = whole.to_vec();
                    for (axis_cut, pieces) in order_cuts(&cuts) {
                        kept = cut(&kept, axis_cut, pieces).unwrap();
                    }
                    let expected = nested(size, (dp, dp_rank), (tp, tp_rank));
                    assert_eq!(rows(&kept), expected, "{size} rows, dp {dp}, tp {tp}, rank {rank}");
                }
            }
        }
    }

    #[test]
    fn split_factors_state_the_order_of_cuts() {
        let [a, b, c] = [4, 3, 2].map(|ranks| AxisCut { ranks, rank: 0 });
        for (cuts, order) in [
            ([(a, 1), (b, 1), (c, 1)], [a, b, c]),
            ([(a, 2), (b, 2), (c, 1)], [c, a, b]),
            ([(a, 6), (b, 1), (c, 1)], [b, c, a]),
            ([(a, 6), (b, 2), (c, 1)], [c, b, a]),
            ([(a, 3), (b, 1), (c, 1)], [b, a, c]),
        ] {
            assert_eq!(order_cuts(&cuts), order.map(|cut| (cut, 1)), "{cuts:?}");
        }
    }

    #[test]
    fn cuts_of_many_ranges_take_one_pass() {
        let whole = [AxisRange { start: 0, count: 1 << 20 }];
        let half = AxisCut { ranks: 2, rank: 1 };
        let many = cut(&whole, half, MAX_RANGE_COUNT as u64).unwrap();
        assert_eq!(many.len(), MAX_RANGE_COUNT);
        let started = std::time::Instant::now();
        for _ in 0..10 {
            assert_eq!(cut(&many, half, MAX_RANGE_COUNT as u64).unwrap().len(), MAX_RANGE_COUNT);
        }
        assert!(started.elapsed().as_secs() < 5);
    }

    #[test]
    fn cuts_without_bounds_are_refused() {
        let whole = [AxisRange { start: 0, count: u64::MAX }];
        assert_eq!(cut(&whole, AxisCut { ranks: 2, rank: 1 }, u64::MAX), None);
        let many = AxisCut { ranks: u64::MAX, rank: u64::MAX - 1 };
        assert!(cut(&whole, many, 1).is_some());
        let cuts = [(many, 6), (many, 1), (many, 1)];
        assert_eq!(order_cuts(&cuts), cuts);
    }
}
