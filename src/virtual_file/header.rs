//! Encodes the header of a virtual file.

use std::collections::BTreeMap;

use crate::checkpoint::{MAX_HEADER_BYTES, Tensor};

/// The data starts at a multiple of this, so that direct reads and mappings are aligned. Spaces pad the header: the
/// format permits no other padding.
pub const DATA_ALIGNMENT_BYTES: usize = 4096;

/// Bytes of the length before the JSON.
const LENGTH_BYTES: usize = 8;

/// Encodes a header, its length first; `None` if it would be longer than readers take.
///
/// `starts` are the starts of the tensors in the data, and the end of the data.
pub fn encode_header(
    tensors: &[Tensor],
    starts: &[u64],
    metadata: &BTreeMap<String, String>,
) -> Option<Vec<u8>> {
    let mut header = vec![0; LENGTH_BYTES];
    encode_json(&mut header, tensors, starts, metadata).ok()?;
    header.resize(header.len().next_multiple_of(DATA_ALIGNMENT_BYTES), b' ');
    let len = (header.len() - LENGTH_BYTES) as u64;
    header[..LENGTH_BYTES].copy_from_slice(&len.to_le_bytes());
    (len <= MAX_HEADER_BYTES).then_some(header)
}

/// An upper bound for the length of a header, however many characters of its names are escaped.
#[derive(Default)]
pub struct HeaderBound(u64);

impl HeaderBound {
    /// Adds a tensor.
    pub fn add_tensor(&mut self, tensor: &Tensor) {
        // A character takes at most six bytes, a number at most 20. The rest is punctuation and keys.
        self.0 += escaped_bytes(&tensor.name) + 21 * tensor.shape.len() as u64 + 100;
    }

    /// The bound for the tensors so far, the metadata, and everything around them.
    pub fn max_header_bytes(&self, metadata: &BTreeMap<String, String>) -> u64 {
        let pairs =
            metadata.iter().map(|(key, value)| escaped_bytes(key) + escaped_bytes(value) + 6);
        self.0 + pairs.sum::<u64>() + (LENGTH_BYTES + DATA_ALIGNMENT_BYTES + 20) as u64
    }
}

fn escaped_bytes(text: &str) -> u64 {
    6 * text.len() as u64
}

/// Appends the JSON. Fails only if the header is too long.
fn encode_json(
    out: &mut Vec<u8>,
    tensors: &[Tensor],
    starts: &[u64],
    metadata: &BTreeMap<String, String>,
) -> std::io::Result<()> {
    out.extend_from_slice(b"{\"__metadata__\":");
    serde_json::to_writer(&mut *out, metadata)?;
    for (tensor, range) in tensors.iter().zip(starts.windows(2)) {
        if out.len() as u64 > MAX_HEADER_BYTES {
            return Err(std::io::ErrorKind::FileTooLarge.into());
        }
        out.push(b',');
        serde_json::to_writer(&mut *out, &*tensor.name)?;
        out.extend_from_slice(b":{\"dtype\":\"");
        out.extend_from_slice(tensor.dtype.name().as_bytes());
        out.extend_from_slice(b"\",\"shape\":");
        serde_json::to_writer(&mut *out, &*tensor.shape)?;
        out.extend_from_slice(b",\"data_offsets\":");
        serde_json::to_writer(&mut *out, range)?;
        out.push(b'}');
    }
    out.push(b'}');
    Ok(())
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::checkpoint::{ByteRun, Dtype, OriginId, TensorBytes};

    proptest! {
        #[test]
        fn no_header_is_longer_than_it_can_be(
            names in prop::collection::vec(".*", 0..9),
            dims in prop::collection::vec(any::<u64>(), 0..9),
            metadata in prop::collection::btree_map(".*", "[\\x00-\\x20\"]*", 0..5),
        ) {
            let bytes = TensorBytes::Run(ByteRun { origin: OriginId(0), offset: 0, len: 0 });
            let tensor = |name: &String| Tensor {
                name: name.as_str().into(),
                dtype: Dtype::F8E4M3Fnuz,
                shape: dims.clone().into(),
                bytes: bytes.clone(),
            };
            let tensors: Vec<Tensor> = names.iter().map(tensor).collect();
            let starts = vec![u64::MAX; tensors.len() + 1];
            let header = encode_header(&tensors, &starts, &metadata).unwrap();
            let mut bound = HeaderBound::default();
            tensors.iter().for_each(|tensor| bound.add_tensor(tensor));
            prop_assert!(header.len() as u64 <= bound.max_header_bytes(&metadata));
        }
    }
}
