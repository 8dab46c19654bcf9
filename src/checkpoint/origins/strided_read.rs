//! Gathers the bytes of strided tensors.
//!
//! A range of a strided tensor is cut into boxes. In a box, every axis is fixed or whole, but for the outermost, of
//! which it has some steps. A box is read in the order of the source, as many axes at a time as lie close
//! together, and scattered in memory. So a transposed matrix is not read element by element, and the scratch
//! memory never exceeds the request.

use crate::source::{ReadAt, SourceError};

use crate::checkpoint::tensor::Grid;

/// Maximum bytes read for each byte of the request. A read costs about as much as copying some kilobytes, so that
/// reading the bytes between two pieces is cheaper than a second read.
const MAX_READ_AMPLIFICATION: u64 = 8;

/// An axis of a box: the number of steps, and the stride in the source and in memory.
#[derive(Clone, Copy, Debug)]
pub struct BoxAxis {
    pub count: u64,
    pub source: u64,
    pub memory: u64,
}

/// Fills `out` with the tensor's bytes from `offset` on.
pub fn read_strided(
    source: &dyn ReadAt,
    grid: &Grid,
    offset: u64,
    out: &mut [u8],
) -> Result<(), SourceError> {
    let run = grid.piece_bytes;
    let mut at = offset;
    let max_bytes = out.len() as u64;
    let mut rest = out;
    // The end of the piece that starts before the range.
    let into = at % run;
    if into != 0 {
        let (head, after) = rest.split_at_mut(rest.len().min((run - into) as usize));
        source.read_exact_at(head, piece_offset(grid, at / run) + into)?;
        at += head.len() as u64;
        rest = after;
    }
    let whole = rest.len() as u64 / run * run;
    let (body, tail) = rest.split_at_mut(whole as usize);
    let mut scratch = Vec::new();
    let mut first = at / run;
    let mut todo = body;
    while !todo.is_empty() {
        let (base, axes, pieces) = next_grid_box(grid, first, todo.len() as u64 / run);
        let (part, after) = todo.split_at_mut((pieces * run) as usize);
        read_box(source, base, axes, run, part, &mut scratch, max_bytes)?;
        first += pieces;
        todo = after;
    }
    // The start of the piece that ends after the range.
    if !tail.is_empty() {
        source.read_exact_at(tail, piece_offset(grid, first))?;
    }
    Ok(())
}

/// The source byte where a piece starts, by its number.
pub fn piece_offset(grid: &Grid, mut number: u64) -> u64 {
    let mut at = grid.base;
    for axis in grid.axes.iter().rev() {
        at += number % axis.count * axis.stride;
        number /= axis.count;
    }
    at
}

/// The largest box of at most `max_pieces` that starts at a piece. Returns the source byte of its first piece, its axes
/// outermost first, and its number of pieces.
pub fn next_grid_box(grid: &Grid, first: u64, max_pieces: u64) -> (u64, Vec<BoxAxis>, u64) {
    let mut axes = Vec::with_capacity(grid.axes.len());
    // Pieces in one step of the current axis; `first` is a multiple of it.
    let mut pieces = 1;
    for axis in grid.axes.iter().rev() {
        let index = first / pieces % axis.count;
        let count = (axis.count - index).min(max_pieces / pieces);
        axes.push(BoxAxis { count, source: axis.stride, memory: pieces * grid.piece_bytes });
        pieces *= count;
        if count < axis.count {
            break;
        }
    }
    axes.reverse();
    (piece_offset(grid, first), axes, pieces)
}

/// Reads a box in the order of the source, at most `max_bytes` at a time.
fn read_box(
    source: &dyn ReadAt,
    base: u64,
    mut axes: Vec<BoxAxis>,
    run: u64,
    out: &mut [u8],
    scratch: &mut Vec<u8>,
    max_bytes: u64,
) -> Result<(), SourceError> {
    axes.retain(|axis| axis.count > 1);
    axes.sort_by_key(|axis| std::cmp::Reverse(axis.source));
    // Axes that repeat the same bytes are filled by copies in memory.
    let repeats = axes.split_off(axes.partition_point(|axis| axis.source != 0));
    let all = axes.clone();
    // The axes of the smallest strides are read at once, as long as the read is dense and not too long.
    let mut near: Vec<BoxAxis> = Vec::new();
    let (mut span, mut useful) = (run, run);
    while let Some(&axis) = axes.last() {
        let is_dense = span.max(axis.source) <= useful.saturating_mul(MAX_READ_AMPLIFICATION);
        let steps = max_bytes.saturating_sub(span) / axis.source + 1;
        if !is_dense || steps < 2 {
            break;
        }
        axes.pop();
        near.insert(0, BoxAxis { count: axis.count.min(steps), ..axis });
        if steps < axis.count {
            // Only some of its steps fit into one read.
            let mut done = 0;
            while done < axis.count {
                near[0].count = steps.min(axis.count - done);
                let (from, to) = (base + done * axis.source, done * axis.memory);
                read_near(source, from, to, &axes, &near, run, out, scratch)?;
                done += near[0].count;
            }
            fill_repeats(&all, &repeats, run, out);
            return Ok(());
        }
        span += (axis.count - 1) * axis.source;
        useful *= axis.count;
    }
    read_near(source, base, 0, &axes, &near, run, out, scratch)?;
    fill_repeats(&all, &repeats, run, out);
    Ok(())
}

/// Reads the span of the near axes at once, for every combination of the far axes.
#[allow(clippy::too_many_arguments)] // The parts of one box; a struct of them would be used once.
fn read_near(
    source: &dyn ReadAt,
    base: u64,
    memory: u64,
    far: &[BoxAxis],
    near: &[BoxAxis],
    run: u64,
    out: &mut [u8],
    scratch: &mut Vec<u8>,
) -> Result<(), SourceError> {
    let span = near.iter().fold(run, |span, axis| span + (axis.count - 1) * axis.source);
    let is_direct = near.is_empty();
    if !is_direct {
        scratch.resize(span as usize, 0);
    }
    try_visit_steps(far, base, memory, &mut |from, to| {
        let to = to as usize;
        if is_direct {
            return source.read_exact_at(&mut out[to..to + run as usize], from);
        }
        source.read_exact_at(scratch, from)?;
        scatter(near, run, scratch, &mut out[to..]);
        Ok(())
    })
}

/// Calls `visit` with the source and memory offsets of every combination of the axes' steps.
fn try_visit_steps(
    axes: &[BoxAxis],
    source: u64,
    memory: u64,
    visit: &mut dyn FnMut(u64, u64) -> Result<(), SourceError>,
) -> Result<(), SourceError> {
    let Some((axis, inner)) = axes.split_first() else {
        return visit(source, memory);
    };
    for step in 0..axis.count {
        try_visit_steps(inner, source + step * axis.source, memory + step * axis.memory, visit)?;
    }
    Ok(())
}

/// The same, of a `visit` that cannot fail.
pub fn visit_steps(axes: &[BoxAxis], source: u64, memory: u64, visit: &mut dyn FnMut(u64, u64)) {
    let mut visit_all = |source, memory| {
        visit(source, memory);
        Ok(())
    };
    let result = try_visit_steps(axes, source, memory, &mut visit_all);
    debug_assert!(result.is_ok());
}

/// Copies the pieces of a read to their places in memory.
pub fn scatter(axes: &[BoxAxis], run: u64, from: &[u8], to: &mut [u8]) {
    // A constant size makes the copy of the innermost loop a load and a store.
    match run {
        1 => scatter_by(axes, from, to, &|f, t| t[0] = f[0]),
        2 => scatter_by(axes, from, to, &|f, t| t[..2].copy_from_slice(&f[..2])),
        4 => scatter_by(axes, from, to, &|f, t| t[..4].copy_from_slice(&f[..4])),
        8 => scatter_by(axes, from, to, &|f, t| t[..8].copy_from_slice(&f[..8])),
        run => scatter_by(axes, from, to, &|f, t| {
            t[..run as usize].copy_from_slice(&f[..run as usize])
        }),
    }
}

fn scatter_by(axes: &[BoxAxis], from: &[u8], to: &mut [u8], copy: &impl Fn(&[u8], &mut [u8])) {
    let Some((axis, inner)) = axes.split_first() else {
        return copy(from, to);
    };
    for step in 0..axis.count {
        let (f, t) = ((step * axis.source) as usize, (step * axis.memory) as usize);
        scatter_by(inner, &from[f..], &mut to[t..], copy);
    }
}

/// Copies the first step of each repeating axis to its other steps.
fn fill_repeats(axes: &[BoxAxis], repeats: &[BoxAxis], run: u64, out: &mut [u8]) {
    // Each axis copies what the axes before it filled.
    let mut filled = axes.to_vec();
    for &axis in repeats {
        visit_steps(&filled, 0, 0, &mut |_, at| {
            let at = at as usize;
            for step in 1..axis.count {
                out.copy_within(at..at + run as usize, at + (step * axis.memory) as usize);
            }
        });
        filled.push(axis);
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::super::scatter::read_by_scatters;
    use super::super::swapped_read::read_swapped;
    use super::*;
    use crate::checkpoint::{Axis, OpenOrigins, Origin, OriginId, TensorBytes};

    /// Byte by byte, from the definition.
    fn by_definition(source: &[u8], grid: &Grid) -> Vec<u8> {
        let pieces = grid.len() / grid.piece_bytes;
        (0..pieces)
            .flat_map(|n| {
                source[piece_offset(grid, n) as usize..][..grid.piece_bytes as usize].to_vec()
            })
            .collect()
    }

    fn any_grid() -> impl Strategy<Value = Grid> {
        let axis = (2u64..7, 0u64..40).prop_map(|(count, stride)| Axis { count, stride });
        (
            prop::collection::vec(axis, 1..5),
            prop::sample::select(vec![1u64, 2, 4, 6, 8, 16]),
            0u64..9,
        )
            .prop_map(|(axes, run, base)| Grid {
                origin: OriginId(0),
                base,
                axes: axes.into(),
                piece_bytes: run,
            })
    }

    proptest! {
        #[test]
        fn any_part_of_any_grid_matches_its_definition(
            grid in any_grid(), start in 0.0..1.0f64, len in 0.0..1.0f64, unit in prop::sample::select(vec![1u64, 2, 4, 8]),
            (part, gap) in (1u64..100, 0u64..50),
        ) {
            let source: Vec<u8> = (0..grid.base + grid.span()).map(|n| (n * 31 % 251) as u8).collect();
            let mut whole = by_definition(&source, &grid);
            let start = (start * whole.len() as f64) as usize;
            let end = start + (len * (whole.len() - start) as f64) as usize;
            let mut got = vec![0; end - start];
            read_strided(&source, &grid, start as u64, &mut got).unwrap();
            prop_assert_eq!(&got, &whole[start..end]);

            let origins = OpenOrigins::open(&[Origin::Memory(source.clone().into())], None).unwrap();
            let bytes = TensorBytes::Grid(Box::new(grid.clone()));
            let got_parts = read_by_scatters(&origins, &bytes, start as u64..end as u64, part, gap);
            prop_assert_eq!(&got_parts.unwrap(), &got);

            if grid.piece_bytes % unit == 0 {
                whole.chunks_exact_mut(unit as usize).for_each(<[u8]>::reverse);
                read_swapped(unit, start as u64, &mut got, |out, from| read_strided(&source, &grid, from, out)).unwrap();
                prop_assert_eq!(&got, &whole[start..end]);
            }
        }
    }
}
