//! The destination of bytes on a device.

use std::sync::Arc;

use crate::virtual_file::Target;

use super::device_cast::DeviceCast;

/// A range of memory on the device of one stream.
#[derive(Clone, Debug)]
pub struct DeviceDestination {
    /// The index of the stream, among those of the load, that copies there.
    pub stream: usize,
    /// The address on the device.
    pub address: u64,
    /// The number of bytes that go there, before the cast.
    pub len: u64,
    /// The cast of these bytes.
    pub cast: Option<Arc<DeviceCast>>,
}

impl DeviceDestination {
    /// The number of bytes on the device that `len` bytes become.
    fn output_bytes(&self, len: u64) -> u64 {
        self.cast.as_ref().map_or(len, |cast| cast.output_bytes(len))
    }

    /// The end address on the device; `None` if there is none.
    fn end(&self) -> Option<u64> {
        self.address.checked_add(self.output_bytes(self.len))
    }

    fn has_cast_of(&self, other: &DeviceDestination) -> bool {
        self.cast.as_ref().map(Arc::as_ptr) == other.cast.as_ref().map(Arc::as_ptr)
    }
}

impl Target for DeviceDestination {
    fn len(&self) -> u64 {
        self.len
    }

    fn split(self, at: u64) -> (Self, Self) {
        let address = self.address + self.output_bytes(at);
        let rest = DeviceDestination { address, len: self.len - at, ..self.clone() };
        (DeviceDestination { len: at, ..self }, rest)
    }
}

/// Merges pieces that are adjacent both in the file and on the device into one copy, within one allocation. Small tensors
/// in the order of the file are then few copies. `allocation_end` returns the end address of the allocation that holds a
/// piece: drivers refuse a copy that spans two.
pub fn merge_adjacent(
    pieces: &[(u64, DeviceDestination)],
    allocation_end: impl Fn(&DeviceDestination) -> u64,
) -> impl Iterator<Item = (u64, DeviceDestination)> {
    let mut rest = pieces;
    std::iter::from_fn(move || {
        let ((offset, first), others) = rest.split_first()?;
        let mut max_end = None;
        let mut fits = |next: &DeviceDestination| {
            let max_end = *max_end.get_or_insert_with(|| allocation_end(first));
            next.end().is_some_and(|end| end <= max_end)
        };
        let (mut merged, mut count) = (first.clone(), 0);
        for (next_offset, next) in others {
            let follows_in_file = offset.checked_add(merged.len) == Some(*next_offset);
            let follows = merged.end() == Some(next.address);
            let is_alike = next.stream == merged.stream && next.has_cast_of(&merged);
            if !is_alike || !follows_in_file || !follows || !fits(next) {
                break;
            }
            merged.len += next.len;
            count += 1;
        }
        rest = &others[count..];
        Some((*offset, merged))
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn piece(offset: u64, address: u64, len: u64) -> (u64, DeviceDestination) {
        (offset, DeviceDestination { stream: 0, address, len, cast: None })
    }

    fn merged(pieces: &[(u64, DeviceDestination)], end: u64) -> Vec<(u64, u64, u64)> {
        let copies =
            merge_adjacent(pieces, |first| if first.address < end { end } else { u64::MAX });
        copies.map(|(offset, copy)| (offset, copy.address, copy.len)).collect()
    }

    #[test]
    fn adjacent_pieces_of_one_allocation_are_one_copy() {
        let pieces = [piece(10, 100, 4), piece(14, 104, 6), piece(20, 110, 1), piece(22, 111, 3)];
        assert_eq!(merged(&pieces, 200), [(10, 100, 11), (22, 111, 3)]);
        assert_eq!(merged(&pieces, 110), [(10, 100, 10), (20, 110, 1), (22, 111, 3)]);
        // A piece is never cut, even if its allocation seems to end inside it.
        assert_eq!(merged(&pieces, 102), [(10, 100, 4), (14, 104, 7), (22, 111, 3)]);
        assert_eq!(merged(&[], 102), []);
        let mut pieces = pieces;
        pieces[1].1.stream = 1;
        assert_eq!(merged(&pieces, 200).len(), 4);
    }
}
