//! The destination of bytes on a device.

use crate::virtual_file::Target;

/// A range of memory on the device of one stream.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DeviceDestination {
    /// The index of the stream, among those of the load, that copies there.
    pub stream: usize,
    /// The address on the device.
    pub address: u64,
    /// The number of bytes.
    pub len: u64,
}

impl Target for DeviceDestination {
    fn len(&self) -> u64 {
        self.len
    }

    fn split(self, at: u64) -> (Self, Self) {
        let DeviceDestination { stream, address, len } = self;
        let rest = DeviceDestination { stream, address: address + at, len: len - at };
        (DeviceDestination { len: at, ..self }, rest)
    }
}

/// Merges pieces that are adjacent both in the file and on the device. Small tensors in the order of the file are
/// then one copy.
pub fn merge_adjacent(
    pieces: &[(u64, DeviceDestination)],
) -> impl Iterator<Item = (u64, DeviceDestination)> {
    let follows = |(offset, piece): &(u64, DeviceDestination), next: &(u64, DeviceDestination)| {
        let end = offset.checked_add(piece.len);
        let end_address = piece.address.checked_add(piece.len);
        piece.stream == next.1.stream && end == Some(next.0) && end_address == Some(next.1.address)
    };
    pieces.chunk_by(follows).filter_map(|pieces| {
        let (offset, first) = *pieces.first()?;
        let len = pieces.iter().map(|(_, piece)| piece.len).sum();
        Some((offset, DeviceDestination { len, ..first }))
    })
}
