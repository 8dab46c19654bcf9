//! Writes the header of the virtual file.

use std::collections::BTreeMap;
use std::io::Write;

use crate::checkpoint::{MAX_HEADER, Tensor};

/// The data starts at a multiple of this: readers that bypass the page cache, and mappings, then
/// meet aligned data. The format lets the header be filled up with spaces, and nothing else.
pub const DATA_ALIGNMENT: usize = 4096;

/// Bytes of the length in front.
const LENGTH: usize = 8;

/// The whole header, its length first; `None` if it would be longer than readers take. `starts` are the tensors' starts in the data, and the end.
pub fn write(
    tensors: &[Tensor],
    starts: &[u64],
    metadata: &BTreeMap<String, String>,
) -> Option<Vec<u8>> {
    let mut header = vec![0; LENGTH];
    write_json(&mut header, tensors, starts, metadata).ok()?;
    header.resize(header.len().next_multiple_of(DATA_ALIGNMENT), b' ');
    let len = (header.len() - LENGTH) as u64;
    header[..LENGTH].copy_from_slice(&len.to_le_bytes());
    (len <= MAX_HEADER).then_some(header)
}

/// Writing to memory fails in one way: it is stopped where the header is longer than it can be.
fn write_json(
    out: &mut Vec<u8>,
    tensors: &[Tensor],
    starts: &[u64],
    metadata: &BTreeMap<String, String>,
) -> std::io::Result<()> {
    out.extend_from_slice(b"{\"__metadata__\":");
    serde_json::to_writer(&mut *out, metadata)?;
    for (tensor, range) in tensors.iter().zip(starts.windows(2)) {
        if out.len() as u64 > MAX_HEADER {
            return Err(std::io::ErrorKind::FileTooLarge.into());
        }
        out.push(b',');
        serde_json::to_writer(&mut *out, &tensor.name)?;
        write!(out, ":{{\"dtype\":\"{}\",\"shape\":[", tensor.dtype.name())?;
        for (n, dim) in tensor.shape.iter().enumerate() {
            write!(out, "{}{dim}", if n == 0 { "" } else { "," })?;
        }
        write!(out, "],\"data_offsets\":[{},{}]}}", range[0], range[1])?;
    }
    out.push(b'}');
    Ok(())
}
