//! Reads bytes in the other byte order.

use crate::source::SourceError;

use super::whole_units::read_whole_units;

/// Fills `out` with bytes from `offset` on, where `read` gives the same bytes with every `unit_bytes` reversed.
pub fn read_swapped(
    unit_bytes: u64,
    offset: u64,
    out: &mut [u8],
    read: impl Fn(&mut [u8], u64) -> Result<(), SourceError>,
) -> Result<(), SourceError> {
    read_whole_units(unit_bytes, offset, out, |units, at| {
        read(units, at)?;
        units.chunks_exact_mut(unit_bytes as usize).for_each(<[u8]>::reverse);
        Ok(())
    })
}
