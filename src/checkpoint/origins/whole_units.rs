//! Reads any range of bytes that can only be read in whole units, such as values.

use crate::source::SourceError;

/// The largest unit: a complex number of two doubles.
const MAX_UNIT_BYTES: usize = 16;

/// Fills `out` with bytes from `offset` on. `read` fills a buffer with whole units from a multiple of `unit_bytes` on.
pub fn read_whole_units(
    unit_bytes: u64,
    offset: u64,
    out: &mut [u8],
    read: impl Fn(&mut [u8], u64) -> Result<(), SourceError>,
) -> Result<(), SourceError> {
    let size = unit_bytes as usize;
    // Reads a unit that the range cuts, and copies a part of it.
    let part = |out: &mut [u8], from: u64| {
        let mut whole = [0; MAX_UNIT_BYTES];
        read(&mut whole[..size], from / unit_bytes * unit_bytes)?;
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
    let (body, tail) = rest.split_at_mut(rest.len() / size * size);
    let at = offset + head_len as u64;
    if !body.is_empty() {
        read(body, at)?;
    }
    if !tail.is_empty() {
        part(tail, at + body.len() as u64)?;
    }
    Ok(())
}
