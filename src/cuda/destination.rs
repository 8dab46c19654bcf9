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

/// The copies that pieces need. Pieces that are adjacent both in the file and on the device are one copy: small tensors
/// in the order of the file need few. `allocation_end` is the address behind the allocation that an address lies in:
/// drivers refuse a copy to two allocations, even if they are adjacent.
pub fn merge_adjacent(
    pieces: &[(u64, DeviceDestination)],
    allocation_end: impl Fn(&DeviceDestination) -> u64,
) -> impl Iterator<Item = (u64, DeviceDestination)> {
    let mut rest = pieces;
    std::iter::from_fn(move || {
        let (&(offset, mut merged), others) = rest.split_first()?;
        let mut max_end = None;
        for (next_offset, next) in others {
            let follows = next.stream == merged.stream
                && offset.checked_add(merged.len) == Some(*next_offset)
                && merged.address.checked_add(merged.len) == Some(next.address);
            if !follows
                || next.address.saturating_add(next.len)
                    > *max_end.get_or_insert_with(|| allocation_end(&merged))
            {
                break;
            }
            merged.len += next.len;
            rest = &rest[1..];
        }
        rest = &rest[1..];
        Some((offset, merged))
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn piece(offset: u64, address: u64, len: u64) -> (u64, DeviceDestination) {
        (offset, DeviceDestination { stream: 0, address, len })
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
        // An allocation ends within a piece, as far as the driver knows: the piece is copied whole.
        assert_eq!(merged(&pieces, 102), [(10, 100, 4), (14, 104, 7), (22, 111, 3)]);
        assert_eq!(merged(&[], 102), []);
        let mut pieces = pieces;
        pieces[1].1.stream = 1;
        assert_eq!(merged(&pieces, 200).len(), 4);
    }
}
