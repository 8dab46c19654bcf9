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

/// Merges pieces that are adjacent both in the file and on the device into one copy, within one allocation. Small tensors
/// in the order of the file are then few copies. `allocation_end` returns the end address of the allocation that holds a
/// piece: drivers refuse a copy that spans two.
pub fn merge_adjacent(
    pieces: &[(u64, DeviceDestination)],
    allocation_end: impl Fn(&DeviceDestination) -> u64,
) -> impl Iterator<Item = (u64, DeviceDestination)> {
    let mut rest = pieces;
    std::iter::from_fn(move || {
        let (&(offset, first), others) = rest.split_first()?;
        let mut max_end = None;
        let mut fits = |next: &DeviceDestination| {
            let max_end = *max_end.get_or_insert_with(|| allocation_end(&first));
            next.address.checked_add(next.len).is_some_and(|end| end <= max_end)
        };
        let (mut merged, mut count) = (first, 0);
        for (next_offset, next) in others {
            let follows_in_file = offset.checked_add(merged.len) == Some(*next_offset);
            let follows = merged.address.checked_add(merged.len) == Some(next.address);
            if next.stream != merged.stream || !follows_in_file || !follows || !fits(next) {
                break;
            }
            merged.len += next.len;
            count += 1;
        }
        rest = &others[count..];
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
        // A piece is never cut, even if its allocation seems to end inside it.
        assert_eq!(merged(&pieces, 102), [(10, 100, 4), (14, 104, 7), (22, 111, 3)]);
        assert_eq!(merged(&[], 102), []);
        let mut pieces = pieces;
        pieces[1].1.stream = 1;
        assert_eq!(merged(&pieces, 200).len(), 4);
    }
}
