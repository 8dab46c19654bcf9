//! Reads bytes in the other byte order.

use crate::source::SourceError;

/// The largest unit of a swap.
const MAX_SWAP_UNIT_BYTES: usize = 16;

/// Fills `out` with bytes from `offset` on, where `read` gives the same bytes with every `unit_bytes` reversed.
pub fn read_swapped(
    unit_bytes: u64,
    offset: u64,
    out: &mut [u8],
    read: impl Fn(&mut [u8], u64) -> Result<(), SourceError>,
) -> Result<(), SourceError> {
    let size = unit_bytes as usize;
    // Reads a unit that the range cuts, and copies a part of it.
    let part = |out: &mut [u8], from: u64| {
        let mut whole = [0; MAX_SWAP_UNIT_BYTES];
        read(&mut whole[..size], from / unit_bytes * unit_bytes)?;
        whole[..size].reverse();
        let into = (from % unit_bytes) as usize;
        out.copy_from_slice(&whole[into..into + out.len()]);
        Ok::<(), SourceError>(())
    };
    let into = (offset % unit_bytes) as usize;
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
