//! Reads any range of bytes that can only be read in whole units, such as values.

use crate::source::SourceError;

/// The largest unit: a complex number of two doubles.
const MAX_UNIT_BYTES: usize = 16;

/// Fills `out` with bytes from `offset` on. `read` fills a buffer with whole units from a multiple of `unit_bytes` on.
pub fn read_whole_units(
    unit_bytes: u64,
    offset: u64,
    out: &mut [u8],
    mut read: impl FnMut(&mut [u8], u64) -> Result<(), SourceError>,
) -> Result<(), SourceError> {
    let size = unit_bytes as usize;
    let into = (offset % unit_bytes) as usize;
    let head_len = if into == 0 { 0 } else { out.len().min(size - into) };
    let (head, rest) = out.split_at_mut(head_len);
    read_part(size, offset, head, &mut read)?;
    let (body, tail) = rest.split_at_mut(rest.len() / size * size);
    let at = offset + head_len as u64;
    if !body.is_empty() {
        read(body, at)?;
    }
    read_part(size, at + body.len() as u64, tail, &mut read)
}

/// Reads a unit that a range cuts, if there is one, and copies a part of it.
fn read_part(
    size: usize,
    from: u64,
    out: &mut [u8],
    read: &mut impl FnMut(&mut [u8], u64) -> Result<(), SourceError>,
) -> Result<(), SourceError> {
    if out.is_empty() {
        return Ok(());
    }
    let mut whole = [0; MAX_UNIT_BYTES];
    let into = from % size as u64;
    read(&mut whole[..size], from - into)?;
    let into = into as usize;
    out.copy_from_slice(&whole[into..into + out.len()]);
    Ok(())
}
