//! Where bytes belong on a device.
//!
//! In: addresses, and places in a file. Out: the same with those joined that lie together in both.

use crate::loader::Target;

/// Where bytes belong on a device.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DeviceDestination {
    /// Which of the streams of the load copies there.
    pub stream: usize,
    /// The address.
    pub address: u64,
    /// How many.
    pub len: u64,
}

impl Target for DeviceDestination {
    fn len(&self) -> u64 {
        self.len
    }

    fn split(self, at: u64) -> (Self, Self) {
        let DeviceDestination { stream, address: start, len } = self;
        (
            DeviceDestination { len: at, ..self },
            DeviceDestination { stream, address: start + at, len: len - at },
        )
    }
}

/// The pieces, with those that lie one behind the other in the file and on the device as one: small tensors
/// that were given memory in the order of the file are one copy.
pub fn merge_adjacent(
    pieces: &[(u64, DeviceDestination)],
) -> impl Iterator<Item = (u64, DeviceDestination)> {
    let follows = |(at, place): &(u64, DeviceDestination), next: &(u64, DeviceDestination)| {
        let (end, there) = (at.checked_add(place.len), place.address.checked_add(place.len));
        place.stream == next.1.stream && end == Some(next.0) && there == Some(next.1.address)
    };
    pieces.chunk_by(follows).filter_map(|pieces| {
        let (at, first) = *pieces.first()?;
        let len = pieces.iter().map(|(_, place)| place.len).sum();
        Some((at, DeviceDestination { len, ..first }))
    })
}
