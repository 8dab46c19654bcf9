//! Reads bytes that are cast as they are read.

use crate::checkpoint::tensor::{Dtype, cast_kernel};
use crate::source::SourceError;

use super::whole_units::read_whole_units;

/// Bytes that are read and cast at a time: they stay in the processor's caches.
const CHUNK_BYTES: u64 = 64 << 10;

/// Fills `out` with values cast to the second type, from byte `offset` of these. `read` gives values of the first type.
/// `borrow` returns those that lie in memory, which are cast without a copy.
pub fn read_cast<'a>(
    (from, to): (Dtype, Dtype),
    offset: u64,
    out: &mut [u8],
    is_strided: bool,
    borrow: impl Fn(usize, u64) -> Option<&'a [u8]>,
    read: impl Fn(&mut [u8], u64) -> Result<(), SourceError>,
) -> Result<(), SourceError> {
    let kernel = cast_kernel(from, to).expect("a cast that does not exist was refused");
    let [from_bytes, to_bytes] = [from, to].map(|dtype| u64::from(dtype.bits()) / 8);
    // Strided bytes are gathered at once: each part would read the same source bytes again.
    let max_bytes = if is_strided { CHUNK_BYTES.max(out.len() as u64) } else { CHUNK_BYTES };
    let chunk_values = max_bytes / from_bytes.max(to_bytes);
    // Both ends may cut a value.
    let needed_values = (out.len() as u64 / to_bytes + 2).min(chunk_values);
    let mut scratch = Vec::new();
    read_whole_units(to_bytes, offset, out, |values, at| {
        let mut at = at / to_bytes * from_bytes;
        for values in values.chunks_mut((chunk_values * to_bytes) as usize) {
            let len = values.len() as u64 / to_bytes * from_bytes;
            let chunk = match borrow(len as usize, at) {
                Some(chunk) => chunk,
                None => {
                    scratch.resize((needed_values * from_bytes) as usize, 0);
                    let chunk = &mut scratch[..len as usize];
                    read(chunk, at)?;
                    chunk
                }
            };
            kernel(chunk, values);
            at += len;
        }
        Ok(())
    })
}
