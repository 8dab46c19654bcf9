//! Collects the bytes of a tensor that do not lie one after the other.
//!
//! A range of a strided tensor is cut into boxes: in each, every axis is either fixed, or whole, or
//! (the outermost) a stretch. Within a box the source is read in its own order, as many axes at a
//! time as lie close together, and spread out in memory. So a transposed matrix is not read element
//! by element, and the memory it takes is no more than the request.

use crate::source::{ReadAt, SourceError};

use super::Grid;

/// Bytes are read that are not wanted as long as at least one in this many is: a read costs about
/// as much as copying some kilobytes.
const MAX_READ_AMPLIFICATION: u64 = 8;

/// The largest unit of a swap.
const MAX_SWAP_UNIT_BYTES: usize = 16;

/// An axis of a box: steps, bytes between them in the source, bytes between them in memory.
#[derive(Clone, Copy, Debug)]
struct BoxAxis {
    count: u64,
    source: u64,
    memory: u64,
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
    let most = out.len() as u64;
    let mut rest = out;
    // The end of a piece that starts before the range.
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
        let (base, axes, pieces) = next_box(grid, first, todo.len() as u64 / run);
        let (part, after) = todo.split_at_mut((pieces * run) as usize);
        read_box(source, base, axes, run, part, &mut scratch, most)?;
        first += pieces;
        todo = after;
    }
    // The start of a piece that ends after the range.
    if !tail.is_empty() {
        source.read_exact_at(tail, piece_offset(grid, first))?;
    }
    Ok(())
}

/// The source byte where a piece starts, by its number.
fn piece_offset(grid: &Grid, mut number: u64) -> u64 {
    let mut at = grid.base;
    for axis in grid.axes.iter().rev() {
        at += number % axis.count * axis.stride;
        number /= axis.count;
    }
    at
}

/// The largest box that starts at a piece and has no more than `most` of them: the source byte of
/// its first piece, its axes outermost first, and its pieces.
fn next_box(grid: &Grid, first: u64, most: u64) -> (u64, Vec<BoxAxis>, u64) {
    let mut axes = Vec::with_capacity(grid.axes.len());
    // Pieces in one step of the axis at hand; `first` is a multiple of it.
    let mut pieces = 1;
    for axis in grid.axes.iter().rev() {
        let index = first / pieces % axis.count;
        let count = (axis.count - index).min(most / pieces);
        axes.push(BoxAxis { count, source: axis.stride, memory: pieces * grid.piece_bytes });
        pieces *= count;
        if count < axis.count {
            break;
        }
    }
    axes.reverse();
    (piece_offset(grid, first), axes, pieces)
}

/// Reads a box in the order of the source, no more than `most` bytes at a time.
fn read_box(
    source: &dyn ReadAt,
    base: u64,
    mut axes: Vec<BoxAxis>,
    run: u64,
    out: &mut [u8],
    scratch: &mut Vec<u8>,
    most: u64,
) -> Result<(), SourceError> {
    axes.retain(|axis| axis.count > 1);
    axes.sort_by_key(|axis| std::cmp::Reverse(axis.source));
    // Axes that repeat the same bytes are filled in memory, from bytes already there.
    let repeats = axes.split_off(axes.partition_point(|axis| axis.source != 0));
    let all = axes.clone();
    // The closest axes are read at once as long as what is read is dense and not too much.
    let mut near: Vec<BoxAxis> = Vec::new();
    let (mut span, mut wanted) = (run, run);
    while let Some(&axis) = axes.last() {
        let dense = span.max(axis.source) <= wanted.saturating_mul(MAX_READ_AMPLIFICATION);
        let steps = most.saturating_sub(span) / axis.source + 1;
        if !dense || steps < 2 {
            break;
        }
        axes.pop();
        near.insert(0, BoxAxis { count: axis.count.min(steps), ..axis });
        if steps < axis.count {
            // Only some of its steps fit: the others are read in further turns.
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
        wanted *= axis.count;
    }
    read_near(source, base, 0, &axes, &near, run, out, scratch)?;
    fill_repeats(&all, &repeats, run, out);
    Ok(())
}

/// Reads what the near axes span at once, for every combination of the far ones.
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
    let direct = near.is_empty();
    if !direct {
        scratch.resize(span as usize, 0);
    }
    visit_steps(far, base, memory, &mut |from, to| {
        let to = to as usize;
        if direct {
            return source.read_exact_at(&mut out[to..to + run as usize], from);
        }
        source.read_exact_at(scratch, from)?;
        scatter(near, run, scratch, &mut out[to..]);
        Ok(())
    })
}

/// Calls `visit` with source and memory offsets of every combination of the axes' steps.
fn visit_steps(
    axes: &[BoxAxis],
    source: u64,
    memory: u64,
    visit: &mut dyn FnMut(u64, u64) -> Result<(), SourceError>,
) -> Result<(), SourceError> {
    let Some((axis, inner)) = axes.split_first() else {
        return visit(source, memory);
    };
    for step in 0..axis.count {
        visit_steps(inner, source + step * axis.source, memory + step * axis.memory, visit)?;
    }
    Ok(())
}

/// Spreads what was read over memory.
fn scatter(axes: &[BoxAxis], run: u64, from: &[u8], to: &mut [u8]) {
    // The innermost loop knows the size of what it copies, which makes it a load and a store.
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

/// Fills the steps after the first of the repeating axes from the first.
fn fill_repeats(axes: &[BoxAxis], repeats: &[BoxAxis], run: u64, out: &mut [u8]) {
    // An axis is filled once all those before it in this order are, and copies what they filled.
    let mut filled = axes.to_vec();
    for &axis in repeats {
        let nothing_fails = visit_steps(&filled, 0, 0, &mut |_, at| {
            let at = at as usize;
            for step in 1..axis.count {
                out.copy_within(at..at + run as usize, at + (step * axis.memory) as usize);
            }
            Ok(())
        });
        debug_assert!(nothing_fails.is_ok());
        filled.push(axis);
    }
}

/// Fills `out` with the bytes from `offset` on of something whose every `unit` bytes are reversed.
pub fn read_swapped(
    unit: u64,
    offset: u64,
    out: &mut [u8],
    read: impl Fn(&mut [u8], u64) -> Result<(), SourceError>,
) -> Result<(), SourceError> {
    let size = unit as usize;
    // A unit that the range cuts is read whole, aside.
    let part = |out: &mut [u8], from: u64| {
        let mut whole = [0; MAX_SWAP_UNIT_BYTES];
        read(&mut whole[..size], from / unit * unit)?;
        whole[..size].reverse();
        let into = (from % unit) as usize;
        out.copy_from_slice(&whole[into..into + out.len()]);
        Ok::<(), SourceError>(())
    };
    let into = (offset % unit) as usize;
    let head_len = if into == 0 { 0 } else { out.len().min(size - into) };
    let (head, rest) = out.split_at_mut(head_len);
    if !head.is_empty() {
        part(head, offset)?;
    }
    let whole = rest.len() / size * size;
    let (body, tail) = rest.split_at_mut(whole);
    let at = offset + head_len as u64;
    if !body.is_empty() {
        read(body, at)?;
        body.chunks_exact_mut(size).for_each(<[u8]>::reverse);
    }
    if !tail.is_empty() {
        part(tail, at + whole as u64)?;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::checkpoint::{Axis, OriginId};

    /// Byte by byte, from the definition.
    fn plainly(source: &[u8], grid: &Grid) -> Vec<u8> {
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
        fn any_part_of_any_grid_is_what_its_definition_says(
            grid in any_grid(), start in 0.0..1.0f64, len in 0.0..1.0f64, unit in prop::sample::select(vec![1u64, 2, 4, 8])
        ) {
            let source: Vec<u8> = (0..grid.base + grid.span()).map(|n| (n * 31 % 251) as u8).collect();
            let mut whole = plainly(&source, &grid);
            let start = (start * whole.len() as f64) as usize;
            let end = start + (len * (whole.len() - start) as f64) as usize;
            let mut got = vec![0; end - start];
            read_strided(&source, &grid, start as u64, &mut got).unwrap();
            prop_assert_eq!(&got, &whole[start..end]);

            if grid.piece_bytes % unit == 0 {
                whole.chunks_exact_mut(unit as usize).for_each(<[u8]>::reverse);
                read_swapped(unit, start as u64, &mut got, |out, from| read_strided(&source, &grid, from, out)).unwrap();
                prop_assert_eq!(&got, &whole[start..end]);
            }
        }
    }
}
