//! Where the bytes of a source belong in a strided tensor: the places of a gather, seen from the source.
//!
//! A gather reads a source once for each range of the tensor. Where each request costs, as in a store, the source is read
//! in its own order instead, in parts of any length. Each part is copied to all its places, and each byte is read once.

use std::ops::Range;

use crate::checkpoint::tensor::{
    OriginId, TensorBox, TensorBytes, next_box, strides_of_items, value_index,
};

use super::boxes_read::Intersection;
use super::strided_read::{BoxAxis, next_grid_box, piece_offset, scatter, visit_steps};

/// Maximum ranges of one scatter that are listed apart. If there were more, what lies between some of them is read too.
const MAX_RANGE_COUNT: u64 = 1 << 16;

/// Pieces of one length: where each lies in an origin, and where it belongs in a target.
#[derive(Debug)]
pub struct Scatter {
    /// The origin that has the pieces.
    pub origin: OriginId,
    /// The offsets of the first piece, in the origin and in the target.
    source: u64,
    memory: u64,
    /// By their strides in the source, the largest first.
    axes: Vec<BoxAxis>,
    piece_bytes: u64,
}

impl Scatter {
    fn new(
        origin: OriginId,
        source: u64,
        memory: u64,
        axes: impl IntoIterator<Item = BoxAxis>,
        piece_bytes: u64,
    ) -> Scatter {
        let mut axes: Vec<BoxAxis> = axes.into_iter().filter(|axis| axis.count > 1).collect();
        axes.sort_by_key(|axis| std::cmp::Reverse(axis.source));
        let mut merged: Vec<BoxAxis> = Vec::with_capacity(axes.len());
        for axis in axes {
            match merged.last_mut() {
                Some(outer)
                    if outer.source == axis.source * axis.count
                        && outer.memory == axis.memory * axis.count =>
                {
                    *outer = BoxAxis { count: outer.count * axis.count, ..axis };
                }
                _ => merged.push(axis),
            }
        }
        let is_adjacent =
            |axis: &mut BoxAxis| axis.source == piece_bytes && axis.memory == piece_bytes;
        let count = merged.pop_if(is_adjacent).map_or(1, |axis| axis.count);
        Scatter { origin, source, memory, axes: merged, piece_bytes: piece_bytes * count }
    }

    /// The ranges of the origin that have all pieces, in any order. Bytes between two pieces are in a range if there are
    /// at most `max_gap_bytes` of them.
    pub fn ranges(&self, max_gap_bytes: u64) -> Vec<Range<u64>> {
        let mut far = &self.axes[..self.axes.partition_point(|axis| axis.source != 0)];
        let mut span = self.piece_bytes;
        let count = |far: &[BoxAxis]| far.iter().fold(1u64, |n, axis| n.saturating_mul(axis.count));
        while let Some((axis, outer)) = far.split_last()
            && (axis.source <= span + max_gap_bytes || count(far) > MAX_RANGE_COUNT)
        {
            span += (axis.count - 1) * axis.source;
            far = outer;
        }
        let mut ranges = Vec::new();
        visit_steps(far, self.source, 0, &mut |from, _| ranges.push(from..from + span));
        ranges
    }

    /// Copies the bytes of the origin from `start` on to their places in the target.
    pub fn copy(&self, start: u64, bytes: &[u8], target: &mut [u8]) {
        let part = OriginPart { range: start..start + bytes.len() as u64, bytes };
        self.copy_axes(&self.axes, self.source, self.memory, &part, target);
    }

    fn copy_axes(
        &self,
        axes: &[BoxAxis],
        source: u64,
        memory: u64,
        part: &OriginPart<'_>,
        target: &mut [u8],
    ) {
        let span = span_of(axes, self.piece_bytes);
        if source >= part.range.end || source + span <= part.range.start {
            return;
        }
        if source >= part.range.start && source + span <= part.range.end {
            let from = (source - part.range.start) as usize;
            return scatter(
                axes,
                self.piece_bytes,
                &part.bytes[from..],
                &mut target[memory as usize..],
            );
        }
        let Some((axis, inner)) = axes.split_first() else {
            // The part has some bytes of the piece.
            let (from, until) = (source.max(part.range.start), (source + span).min(part.range.end));
            let bytes = &part.bytes
                [(from - part.range.start) as usize..(until - part.range.start) as usize];
            let to = (memory + from - source) as usize;
            return target[to..to + bytes.len()].copy_from_slice(bytes);
        };
        let (steps, whole) = steps_within(axis, source, span_of(inner, self.piece_bytes), part);
        let mut copy_steps = |steps: Range<u64>, inner: &[BoxAxis]| {
            for step in steps {
                let (source, memory) = (source + step * axis.source, memory + step * axis.memory);
                self.copy_axes(inner, source, memory, part, target);
            }
        };
        copy_steps(steps.start..whole.start, inner);
        copy_steps(whole.end..steps.end, inner);
        if !whole.is_empty() {
            let mut whole_axes = axes.to_vec();
            whole_axes[0].count = whole.end - whole.start;
            let (source, memory) =
                (source + whole.start * axis.source, memory + whole.start * axis.memory);
            self.copy_axes(&whole_axes, source, memory, part, target);
        }
    }
}

/// Bytes of an origin, and their range there.
struct OriginPart<'a> {
    range: Range<u64>,
    bytes: &'a [u8],
}

/// Bytes from the first byte of the first piece to just past the last.
fn span_of(axes: &[BoxAxis], piece_bytes: u64) -> u64 {
    axes.iter().fold(piece_bytes, |span, axis| span + (axis.count - 1) * axis.source)
}

/// The steps of an axis with bytes in a part, and those of them that lie in it whole. `span` are the bytes of one step.
fn steps_within(
    axis: &BoxAxis,
    source: u64,
    span: u64,
    part: &OriginPart<'_>,
) -> (Range<u64>, Range<u64>) {
    let BoxAxis { count, source: stride, .. } = *axis;
    if stride == 0 {
        return (0..count, count..count);
    }
    let Range { start, end } = part.range;
    let steps_up_to = |at: u64| at.saturating_sub(source).div_ceil(stride).min(count);
    let any = steps_up_to((start + 1).saturating_sub(span))..steps_up_to(end);
    let last_whole = (end + 1).saturating_sub(span);
    let whole = steps_up_to(start)..steps_up_to(last_whole);
    if whole.is_empty() { (any.clone(), any.end..any.end) } else { (any, whole) }
}

/// The scatters of a range of bytes into a target of as many. `None` if they can only be gathered: some are reversed, or
/// the range ends within values of boxes.
pub fn scatters_of(bytes: &TensorBytes, offset: u64, len: u64) -> Option<Vec<Scatter>> {
    let mut scatters = Vec::new();
    add_scatters(bytes, offset..offset + len, 0, &mut scatters)?;
    Some(scatters)
}

fn add_scatters(
    bytes: &TensorBytes,
    range: Range<u64>,
    memory: u64,
    scatters: &mut Vec<Scatter>,
) -> Option<()> {
    if range.is_empty() {
        return Some(());
    }
    match bytes {
        TensorBytes::Run(run) => {
            let (source, len) = (run.offset + range.start, range.end - range.start);
            scatters.push(Scatter::new(run.origin, source, memory, [], len));
        }
        TensorBytes::Grid(grid) => {
            let run = grid.piece_bytes;
            let mut at = range.start;
            let place = |at: u64| memory + (at - range.start);
            while at < range.end {
                let (piece, into) = (at / run, at % run);
                let pieces = (range.end - at) / run;
                if into != 0 || pieces == 0 {
                    // The end of the piece before the range, or the start of the one behind it.
                    let len = (run - into).min(range.end - at);
                    let source = piece_offset(grid, piece) + into;
                    scatters.push(Scatter::new(grid.origin, source, place(at), [], len));
                    at += len;
                } else {
                    let (source, axes, pieces) = next_grid_box(grid, piece, pieces);
                    scatters.push(Scatter::new(grid.origin, source, place(at), axes, run));
                    at += pieces * run;
                }
            }
        }
        TensorBytes::Boxes(boxes) if boxes.are_contiguous() => {
            for part in boxes.boxes() {
                let start = boxes.offset_of(part);
                let (from, until) =
                    (range.start.max(start), range.end.min(start + part.bytes.len()));
                if from < until {
                    let place = memory + from - range.start;
                    add_scatters(&part.bytes, from - start..until - start, place, scatters)?;
                }
            }
        }
        TensorBytes::Boxes(boxes) => {
            let item_bytes = boxes.item_bytes();
            let cuts_value = |at: &u64| !at.is_multiple_of(item_bytes);
            if [range.start, range.end].iter().any(cuts_value) {
                return None;
            }
            let mut at = range.start;
            while at < range.end {
                let values = (range.end - at) / item_bytes;
                let (start, counts) = next_box(boxes.dims(), at / item_bytes, values);
                let place = memory + at - range.start;
                for part in boxes.boxes() {
                    if let Some(common) = Intersection::find(part, &start, &counts) {
                        scatters.push(scatter_of_box(&common, part, item_bytes, place)?);
                    }
                }
                at += counts.iter().product::<u64>() * item_bytes;
            }
        }
        TensorBytes::Swapped { .. } | TensorBytes::Cast { .. } => return None,
    }
    Some(())
}

/// The scatter of a box's part to a box that begins at `place` in the target.
fn scatter_of_box(
    common: &Intersection<'_>,
    part: &TensorBox,
    item_bytes: u64,
    place: u64,
) -> Option<Scatter> {
    let (origin, base, strides) = strides_of_items(&part.bytes, &part.counts, item_bytes)?;
    let in_source = common.in_part.iter().zip(&strides);
    let source = in_source.fold(base, |at, (slice, stride)| at + slice.start * stride);
    let memory = place + value_index(common.request_counts, &common.in_request) * item_bytes;
    let mut memory_stride = item_bytes;
    let mut axes = Vec::with_capacity(strides.len());
    for ((slice, stride), size) in
        common.in_part.iter().zip(&strides).zip(common.request_counts).rev()
    {
        axes.push(BoxAxis { count: slice.count, source: *stride, memory: memory_stride });
        memory_stride *= size;
    }
    Some(Scatter::new(origin, source, memory, axes, item_bytes))
}

/// Reads by scatters of parts of `part_bytes`, for tests beside those of gathers. Unwanted bytes of up to `max_gap_bytes`
/// are read with the others.
#[cfg(test)]
pub fn read_by_scatters(
    origins: &super::OpenOrigins,
    bytes: &TensorBytes,
    range: Range<u64>,
    part_bytes: u64,
    max_gap_bytes: u64,
) -> Option<Vec<u8>> {
    let mut target = vec![0; (range.end - range.start) as usize];
    for scatter in scatters_of(bytes, range.start, range.end - range.start)? {
        for Range { start, end } in scatter.ranges(max_gap_bytes) {
            for at in (start..end).step_by(part_bytes as usize) {
                let mut part = vec![0; part_bytes.min(end - at) as usize];
                origins.origin(scatter.origin).read_exact_at(&mut part, at).unwrap();
                scatter.copy(at, &part, &mut target);
            }
        }
    }
    Some(target)
}
