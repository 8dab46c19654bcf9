//! What of a virtual file its readers were given, and so what is not to be fetched ahead: the kernel keeps it.
//!
//! In: the range of each read. Out: what of a range was not read yet. A pure state machine.

use std::collections::BTreeMap;
use std::ops::Range;

/// What lies between two ranges that were read counts as read too if it is less than this: it is not worth fetching.
const MIN_GAP_BYTES: u64 = 64 << 10;

/// Ranges at the most, half a mebibyte of memory. Of a virtual file that is read in more places those that come later
/// are not noted.
const MAX_RANGE_COUNT: usize = 1 << 14;

/// How much is read again, with nothing new between, before that shows that the kernel keeps nothing. It lets go of
/// some pages of every load, where memory is short or what fits is apart: their being read again shows nothing.
const REREAD_RESET_BYTES: u64 = 16 << 20;

#[derive(Debug, Default)]
pub struct DeliveredRanges {
    /// The end of each range by its start. Between any two lies a speck at least.
    ranges: BTreeMap<u64, u64>,
    /// Bytes that were read again, less those that were read since of what was not given yet.
    reread_bytes: u64,
}

impl DeliveredRanges {
    /// Takes note of a read. Who reads much of what was read before shows that the kernel has not kept it: then
    /// nothing is known of the rest either.
    pub fn record(&mut self, range: &Range<u64>) {
        let bytes = range.end - range.start;
        if self.range_at(range.start).is_some_and(|known| known.end >= range.end) {
            self.reread_bytes += bytes;
            if self.reread_bytes < REREAD_RESET_BYTES {
                return;
            }
            (self.ranges, self.reread_bytes) = Default::default();
        } else {
            self.reread_bytes = self.reread_bytes.saturating_sub(bytes);
        }
        let (from, to) = (
            range.start.saturating_sub(MIN_GAP_BYTES - 1),
            range.end.saturating_add(MIN_GAP_BYTES - 1),
        );
        let mut joined = range.clone();
        while let Some((&start, &end)) = self.ranges.range(..=to).next_back()
            && end >= from
        {
            self.ranges.remove(&start);
            joined = joined.start.min(start)..joined.end.max(end);
        }
        if self.ranges.len() < MAX_RANGE_COUNT {
            self.ranges.insert(joined.start, joined.end);
        }
    }

    /// The first byte from here on that was not given.
    pub fn next_undelivered(&self, from: u64) -> u64 {
        self.range_at(from).map_or(from, |known| known.end)
    }

    /// Where so many bytes from here on end, of those that were not given.
    pub fn advance(&self, from: u64, bytes: u64) -> u64 {
        let (mut at, mut left) = (self.next_undelivered(from), bytes);
        for (&start, &end) in self.ranges.range(at..) {
            if left <= start - at {
                break;
            }
            left -= start - at;
            at = end;
        }
        at.saturating_add(left)
    }

    /// What of a range was not given.
    pub fn undelivered(&self, range: &Range<u64>) -> Vec<Range<u64>> {
        let (mut at, mut left) = (self.next_undelivered(range.start), Vec::new());
        while at < range.end {
            let known = self.ranges.range(at..range.end).next();
            let (start, end) = known.map_or((range.end, range.end), |(&start, &end)| (start, end));
            left.push(at..start);
            at = end;
        }
        left
    }

    /// The known range that has this byte.
    fn range_at(&self, at: u64) -> Option<Range<u64>> {
        let (&start, &end) = self.ranges.range(..=at).next_back()?;
        (at < end).then_some(start..end)
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    const MIB: u64 = 1 << 20;

    #[test]
    fn who_reads_again_is_fetched_for_again() {
        let mut given = DeliveredRanges::default();
        given.record(&(0..2 * REREAD_RESET_BYTES));
        for at in (0..REREAD_RESET_BYTES - MIB).step_by(MIB as usize) {
            given.record(&(at..at + MIB));
        }
        let unread = 2 * REREAD_RESET_BYTES..4 * REREAD_RESET_BYTES;
        assert_eq!(given.undelivered(&(0..4 * REREAD_RESET_BYTES)), [unread]);
        given.record(&(REREAD_RESET_BYTES - MIB..REREAD_RESET_BYTES));
        assert_eq!(
            given.undelivered(&(0..4 * REREAD_RESET_BYTES)),
            [0..REREAD_RESET_BYTES - MIB, REREAD_RESET_BYTES..4 * REREAD_RESET_BYTES]
        );
    }

    #[test]
    fn pages_that_the_kernel_let_go_of_say_nothing_of_the_others() {
        let mut given = DeliveredRanges::default();
        given.record(&(0..512 * MIB));
        for n in 0..200 {
            given.record(&(n * MIB..(n + 1) * MIB));
            given.record(&((512 + n) * MIB..(513 + n) * MIB));
        }
        assert_eq!(given.next_undelivered(0), 712 * MIB);
    }

    #[test]
    fn what_is_left_between_reads_is_left_to_the_byte_but_for_specks() {
        let mut given = DeliveredRanges::default();
        given.record(&(MIB..2 * MIB));
        given.record(&(4 * MIB..5 * MIB));
        given.record(&(2 * MIB + MIN_GAP_BYTES - 1..3 * MIB));
        given.record(&(3 * MIB + MIN_GAP_BYTES..3 * MIB + MIN_GAP_BYTES + 1));
        let left = [
            7..MIB,
            3 * MIB..3 * MIB + MIN_GAP_BYTES,
            3 * MIB + MIN_GAP_BYTES + 1..4 * MIB,
            5 * MIB..6 * MIB,
        ];
        assert_eq!(given.undelivered(&(7..6 * MIB)), left);
        assert_eq!(given.undelivered(&(MIB..3 * MIB)), []);
    }

    #[test]
    fn what_was_given_is_passed_over() {
        let mut given = DeliveredRanges::default();
        assert_eq!((given.next_undelivered(5), given.advance(5, 300 * MIB)), (5, 300 * MIB + 5));
        given.record(&(2 * MIB..500 * MIB));
        assert_eq!(
            (given.next_undelivered(MIB), given.next_undelivered(3 * MIB + 1)),
            (MIB, 500 * MIB)
        );
        assert_eq!(given.advance(MIB, MIB), 2 * MIB);
        assert_eq!(given.advance(MIB, MIB + 1), 500 * MIB + 1);
        assert_eq!(given.advance(400 * MIB, 10 * MIB), 510 * MIB);
        assert_eq!(
            (given.next_undelivered(u64::MAX), given.advance(u64::MAX, 1)),
            (u64::MAX, u64::MAX)
        );
    }

    proptest! {
        #[test]
        fn what_is_left_is_what_no_read_had(
            reads in prop::collection::vec((0u64..200, 1u64..40, 0u64..6), 0..24),
        ) {
            const PAGE: u64 = 16 << 10;
            let (mut given, mut pages) = (DeliveredRanges::default(), [false; 300]);
            for (start, len, from) in reads {
                given.record(&(start * PAGE..(start + len) * PAGE));
                pages[start as usize..(start + len) as usize].fill(true);
                let mut left = [false; 300];
                for range in given.undelivered(&(from * PAGE..300 * PAGE)) {
                    prop_assert!(!range.is_empty());
                    left[(range.start / PAGE) as usize..(range.end / PAGE) as usize].fill(true);
                }
                for n in from as usize..300 {
                    let before = pages[..n].iter().rposition(|&read| read);
                    let after = pages[n..].iter().position(|&read| read);
                    let is_speck =
                        before.zip(after).is_some_and(|(before, after)| n + after - before <= 4);
                    prop_assert_eq!(left[n], !pages[n] && !is_speck, "{}", n);
                }
                let ends: Vec<_> = given.ranges.iter().collect();
                prop_assert!(ends.windows(2).all(|two| two[1].0 - two[0].1 >= MIN_GAP_BYTES));
                let forward = given.advance(from * PAGE, 20 * PAGE);
                let passed: u64 =
                    given.undelivered(&(from * PAGE..forward)).iter().map(|left| left.end - left.start).sum();
                prop_assert_eq!(passed, 20 * PAGE);
            }
        }
    }
}
