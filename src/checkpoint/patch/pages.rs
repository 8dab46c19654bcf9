//! Changes of a tensor's bytes, in pages. A page with few changes holds their offsets and values, any other a value for
//! each of its bytes. So the merged changes of one encoding take at most 9/8 of the bytes of the tensor.

use std::ops::Range;

use crate::checkpoint::tensor::DeltaEncoding;

/// Bytes of a tensor that a page covers: an offset in it takes two bytes.
pub const PAGE_BYTES: u64 = 1 << 16;

/// The number of changes from which a value for each byte takes less memory.
const MIN_DENSE_CHANGES: usize = PAGE_BYTES as usize / 3;

/// Approximate bytes of memory of a page, without its changes.
const PAGE_OVERHEAD_BYTES: u64 = size_of::<Page>() as u64 + 32;

/// The decoded changes of a range of a tensor.
#[derive(Debug)]
pub struct Patch {
    /// The bytes of the tensor whose changes are here, from a multiple of [`PAGE_BYTES`] on.
    range: Range<u64>,
    /// In the order in which they are applied.
    groups: Vec<PageGroup>,
}

impl Patch {
    pub fn new(range: Range<u64>, groups: Vec<PageGroup>) -> Patch {
        Patch { range, groups }
    }

    /// The bytes of the tensor whose changes are here.
    pub fn range(&self) -> &Range<u64> {
        &self.range
    }

    /// The approximate bytes of memory that it takes.
    pub fn memory_bytes(&self) -> u64 {
        self.groups.iter().map(PageGroup::memory_bytes).sum()
    }

    /// Applies the changes to bytes of the tensor from `offset` on, which must lie in the range.
    pub fn apply(&self, offset: u64, bytes: &mut [u8]) {
        for group in &self.groups {
            let (mut at, mut rest) = (offset - self.range.start, &mut *bytes);
            while !rest.is_empty() {
                let (page, from) = ((at / PAGE_BYTES) as usize, (at % PAGE_BYTES) as usize);
                let len = rest.len().min(PAGE_BYTES as usize - from);
                let (now, after) = rest.split_at_mut(len);
                group.pages[page].apply(group.encoding, from, now);
                (at, rest) = (at + len as u64, after);
            }
        }
    }
}

/// The changes by consecutive deltas of one encoding, merged.
#[derive(Debug)]
pub struct PageGroup {
    pub encoding: DeltaEncoding,
    pages: Vec<Page>,
}

impl PageGroup {
    /// A group of pages without changes.
    pub fn new(encoding: DeltaEncoding, pages: usize) -> PageGroup {
        PageGroup {
            encoding,
            pages: (0..pages).map(|_| Page::Sparse(Changes::default())).collect(),
        }
    }

    /// Merges later changes into a page. Returns the change of its memory, in bytes.
    pub fn merge(&mut self, page: usize, changes: Changes) -> i64 {
        if changes.offsets.is_empty() {
            return 0;
        }
        let page = &mut self.pages[page];
        let before = page.memory_bytes();
        let old = std::mem::replace(page, Page::Sparse(Changes::default()));
        *page = old.merged(self.encoding, changes);
        page.memory_bytes() as i64 - before as i64
    }

    /// Drops the pages from one on. Returns the bytes of memory that they took.
    pub fn truncate(&mut self, pages: usize) -> u64 {
        let dropped = self.pages.get(pages..).unwrap_or_default();
        let bytes = dropped.iter().map(Page::memory_bytes).sum();
        self.pages.truncate(pages);
        bytes
    }

    /// The approximate bytes of memory that it takes.
    pub fn memory_bytes(&self) -> u64 {
        self.pages.iter().map(Page::memory_bytes).sum()
    }
}

/// Changes of a page, by ascending offsets.
#[derive(Debug, Default)]
pub struct Changes {
    pub offsets: Vec<u16>,
    pub values: Vec<u8>,
}

impl Changes {
    /// The changes in XORed bytes, the first of which begins a page.
    pub fn from_difference(difference: &[u8]) -> Changes {
        let mut changes = Changes::default();
        let mut push = |start: usize, bytes: &[u8]| {
            for (n, &value) in bytes.iter().enumerate().filter(|(_, value)| **value != 0) {
                changes.offsets.push((start + n) as u16);
                changes.values.push(value);
            }
        };
        let (words, tail) = difference.as_chunks::<8>();
        for (n, word) in words.iter().enumerate() {
            // Few bytes change, so most words are zero.
            if u64::from_ne_bytes(*word) != 0 {
                push(8 * n, word);
            }
        }
        push(8 * words.len(), tail);
        changes
    }
}

/// The changes of [`PAGE_BYTES`] bytes of a tensor.
#[derive(Debug)]
enum Page {
    Sparse(Changes),
    Dense(Box<DensePage>),
}

/// A value for each byte of a page.
#[derive(Debug)]
struct DensePage {
    values: Box<[u8]>,
    /// A bit for each byte that changes. Empty for XOR, where a zero changes nothing.
    mask: Box<[u64]>,
}

impl Page {
    fn memory_bytes(&self) -> u64 {
        let own = match self {
            Page::Sparse(changes) => 2 * changes.offsets.capacity() + changes.values.capacity(),
            Page::Dense(dense) => dense.values.len() + size_of_val(&*dense.mask),
        };
        PAGE_OVERHEAD_BYTES + own as u64
    }

    /// The page with later changes.
    fn merged(self, encoding: DeltaEncoding, later: Changes) -> Page {
        match self {
            Page::Sparse(earlier) if earlier.offsets.is_empty() => Page::packed(encoding, later),
            Page::Sparse(earlier) => Page::packed(encoding, merge(encoding, &earlier, &later)),
            Page::Dense(mut dense) => {
                dense.add(encoding, &later);
                Page::Dense(dense)
            }
        }
    }

    /// The page of some changes, in the form that takes less memory.
    fn packed(encoding: DeltaEncoding, mut changes: Changes) -> Page {
        if changes.offsets.len() < MIN_DENSE_CHANGES {
            changes.offsets.shrink_to_fit();
            changes.values.shrink_to_fit();
            return Page::Sparse(changes);
        }
        let mask_words = match encoding {
            DeltaEncoding::Xor => 0,
            DeltaEncoding::Overwrite => PAGE_BYTES as usize / 64,
        };
        let values = vec![0; PAGE_BYTES as usize].into();
        let mut dense = DensePage { values, mask: vec![0; mask_words].into() };
        dense.add(encoding, &changes);
        Page::Dense(Box::new(dense))
    }

    /// Changes bytes from an offset in the page on.
    fn apply(&self, encoding: DeltaEncoding, from: usize, bytes: &mut [u8]) {
        match self {
            Page::Sparse(Changes { offsets, values }) => {
                let first = offsets.partition_point(|&offset| usize::from(offset) < from);
                for (&offset, &value) in offsets[first..].iter().zip(&values[first..]) {
                    let Some(byte) = bytes.get_mut(usize::from(offset) - from) else { return };
                    change(encoding, byte, value);
                }
            }
            Page::Dense(dense) => {
                let values = &dense.values[from..from + bytes.len()];
                match encoding {
                    DeltaEncoding::Xor => {
                        bytes.iter_mut().zip(values).for_each(|(byte, value)| *byte ^= value);
                    }
                    DeltaEncoding::Overwrite => {
                        for (n, (byte, value)) in bytes.iter_mut().zip(values).enumerate() {
                            if dense.mask[(from + n) / 64] >> ((from + n) % 64) & 1 != 0 {
                                *byte = *value;
                            }
                        }
                    }
                }
            }
        }
    }
}

impl DensePage {
    fn add(&mut self, encoding: DeltaEncoding, changes: &Changes) {
        for (&offset, &value) in changes.offsets.iter().zip(&changes.values) {
            let offset = usize::from(offset);
            change(encoding, &mut self.values[offset], value);
            if let Some(word) = self.mask.get_mut(offset / 64) {
                *word |= 1 << (offset % 64);
            }
        }
    }
}

fn change(encoding: DeltaEncoding, byte: &mut u8, value: u8) {
    match encoding {
        DeltaEncoding::Xor => *byte ^= value,
        DeltaEncoding::Overwrite => *byte = value,
    }
}

/// Earlier changes, then later ones, as one list.
fn merge(encoding: DeltaEncoding, earlier: &Changes, later: &Changes) -> Changes {
    let most = earlier.offsets.len() + later.offsets.len();
    let mut merged =
        Changes { offsets: Vec::with_capacity(most), values: Vec::with_capacity(most) };
    let (mut a, mut b) = (0, 0);
    loop {
        let (offset, value) = match (earlier.offsets.get(a), later.offsets.get(b)) {
            (None, None) => return merged,
            (Some(&first), Some(&second)) if first == second => {
                let mut value = earlier.values[a];
                change(encoding, &mut value, later.values[b]);
                (a, b) = (a + 1, b + 1);
                (first, value)
            }
            (Some(&first), second) if second.is_none_or(|&second| first < second) => {
                a += 1;
                (first, earlier.values[a - 1])
            }
            (_, Some(&second)) => {
                b += 1;
                (second, later.values[b - 1])
            }
            // An earlier change without a later one is the case before.
            (Some(_), None) => return merged,
        };
        merged.offsets.push(offset);
        merged.values.push(value);
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn any_changes() -> impl Strategy<Value = Vec<(u16, u8)>> {
        // Few, many in a small range, or most of a page.
        let offsets = prop_oneof![
            prop::collection::btree_map(any::<u16>(), any::<u8>(), 0..50),
            prop::collection::btree_map(0u16..300, any::<u8>(), 0..200),
            (0u16..4, any::<u8>()).prop_map(|(step, value)| (0..65_535)
                .step_by(1 + usize::from(step))
                .map(|n| (n, value))
                .collect()),
        ];
        offsets.prop_map(|changes| changes.into_iter().collect())
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(64))]
        #[test]
        fn merged_pages_change_what_their_parts_change_one_after_the_other(
            layers in prop::collection::vec(any_changes(), 1..5), is_xor: bool, from in 0usize..65_536, len in 0usize..4096,
        ) {
            let encoding = if is_xor { DeltaEncoding::Xor } else { DeltaEncoding::Overwrite };
            let mut group = PageGroup::new(encoding, 1);
            let mut expected: Vec<u8> = (0..PAGE_BYTES).map(|n| (n * 7) as u8).collect();
            let original = expected.clone();
            let mut bytes = group.memory_bytes() as i64;
            for layer in layers {
                for &(offset, value) in &layer {
                    change(encoding, &mut expected[usize::from(offset)], value);
                }
                let (offsets, values) = layer.into_iter().unzip();
                bytes += group.merge(0, Changes { offsets, values });
            }
            prop_assert_eq!(bytes as u64, group.memory_bytes());
            prop_assert!(group.memory_bytes() <= PAGE_BYTES * 9 / 8 + PAGE_OVERHEAD_BYTES);
            let patch = Patch::new(0..PAGE_BYTES, vec![group]);
            let end = (from + len).min(PAGE_BYTES as usize);
            let mut part = original[from..end].to_vec();
            patch.apply(from as u64, &mut part);
            prop_assert_eq!(&part[..], &expected[from..end]);
        }

        #[test]
        fn a_difference_is_its_bytes_that_are_not_zero(bytes in prop::collection::vec(prop_oneof![9 => Just(0u8), 1 => any::<u8>()], 0..200)) {
            let changes = Changes::from_difference(&bytes);
            let mut all = vec![0; bytes.len()];
            changes.offsets.iter().zip(&changes.values).for_each(|(&n, &value)| all[usize::from(n)] = value);
            prop_assert!(changes.values.iter().all(|&value| value != 0));
            prop_assert_eq!(all, bytes);
        }
    }
}
