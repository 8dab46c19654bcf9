//! What of an image its readers were given, and so what is not to be fetched ahead: the kernel keeps it.
//!
//! In: the range of each read. Out: what of a range was not read yet. A pure state machine.

use std::ops::Range;

use super::stretches::{Set, Stretches};

/// What is told apart: the least that the kernel reads ahead.
const CELL: u64 = 128 << 10;

/// Cells of an image at the most, 64 KiB of memory: those of an image of more than 64 GiB are longer.
const MOST_CELLS: u64 = 1 << 19;

/// How much is read again, with nothing new between, before that shows that the kernel keeps nothing. It lets go of
/// some pages of every load, where memory is short or what fits is apart: their being read again shows nothing.
const LOST: u64 = 16 << 20;

#[derive(Debug)]
pub struct Given {
    cells: Stretches,
    /// Half of these was read at once: programs read from where a tensor begins, and what another read had of a
    /// cell is not worth fetching.
    read: Set,
    /// Bytes that were read again, less those that were new since.
    again: u64,
}

impl Given {
    /// Of an image of so many bytes.
    pub fn new(size: u64) -> Given {
        let cells = Stretches::of(size, CELL, MOST_CELLS);
        Given { cells, read: Set::of(cells), again: 0 }
    }

    /// Takes note of a read. Who reads much of what was read before shows that the kernel has not kept it: then
    /// nothing is known of the rest either.
    pub fn note(&mut self, range: &Range<u64>) {
        let (cell, half) = (self.cells.length, self.cells.length / 2);
        let bytes = range.end - range.start;
        if bytes < half {
            return;
        }
        let mut whole = range.start.div_ceil(cell)..range.end / cell;
        if !whole.is_empty() && whole.all(|cell| self.read.has(cell as usize)) {
            self.again += bytes;
        } else {
            self.again = self.again.saturating_sub(bytes);
        }
        if self.again >= LOST {
            self.read.clear();
            self.again = 0;
        }
        for cell in (range.start + half - 1) / cell..(range.end + half) / cell {
            self.read.add(cell as usize);
        }
    }

    /// The first byte from here on that was not given.
    pub fn next(&self, from: u64) -> u64 {
        let cell = self.read.next_missing((from / self.cells.length) as usize);
        from.max(cell as u64 * self.cells.length)
    }

    /// Where so many bytes from here on end, of those that were not given.
    pub fn forward(&self, from: u64, bytes: u64) -> u64 {
        let (mut at, mut left) = (self.next(from), bytes);
        loop {
            let end = (at / self.cells.length + 1) * self.cells.length;
            if left <= end - at {
                return at + left;
            }
            left -= end - at;
            at = self.next(end);
        }
    }

    /// What of a range was not given.
    pub fn left(&self, range: &Range<u64>) -> Vec<Range<u64>> {
        self.cells.left(range, |cell| !self.read.has(cell))
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn who_reads_again_is_fetched_for_again() {
        let (mut given, lost) = (Given::new(4 * LOST), LOST / CELL);
        given.note(&(0..2 * LOST));
        for n in 0..lost - 1 {
            given.note(&(n * CELL..(n + 1) * CELL));
        }
        let unread = 2 * LOST..4 * LOST;
        assert_eq!(given.left(&(0..4 * LOST)), [unread]);
        given.note(&(LOST - CELL..LOST));
        assert_eq!(given.left(&(0..4 * LOST)), [0..LOST - CELL, LOST..4 * LOST]);
    }

    #[test]
    fn pages_that_the_kernel_let_go_of_say_nothing_of_the_others() {
        let mut given = Given::new(1 << 30);
        given.note(&(0..1 << 29));
        for n in 0..1 << 10 {
            given.note(&(n * CELL..(n + 1) * CELL));
            given.note(&((1 << 29) + n * CELL..(1 << 29) + (n + 1) * CELL));
        }
        assert_eq!(given.next(0), (1 << 29) + (CELL << 10));
    }

    #[test]
    fn what_less_than_half_was_read_of_is_left() {
        let mut given = Given::new(10 * CELL - 5);
        given.note(&(1..2 * CELL - 1));
        given.note(&(3 * CELL + CELL / 3..3 * CELL + CELL * 2 / 3));
        given.note(&(4 * CELL + CELL / 2 + 1..6 * CELL + CELL / 2));
        given.note(&(8 * CELL + CELL / 3..9 * CELL));
        let left = [2 * CELL..5 * CELL, 7 * CELL..8 * CELL, 9 * CELL..10 * CELL - 5];
        assert_eq!(given.left(&(0..10 * CELL - 5)), left);
    }

    #[test]
    fn who_reads_the_other_half_of_a_cell_reads_nothing_again() {
        let mut given = Given::new(100 * CELL);
        given.note(&(0..10 * CELL + CELL / 2));
        given.note(&(10 * CELL + CELL / 2..11 * CELL));
        assert_eq!(given.left(&(0..11 * CELL)), []);
    }

    #[test]
    fn reads_that_follow_one_another_leave_nothing_between_them() {
        let mut given = Given::new(100 * CELL);
        for at in (777..90 * CELL).step_by(8 * CELL as usize) {
            given.note(&(at..at + 8 * CELL));
        }
        assert_eq!(given.left(&(777..90 * CELL)), []);
    }

    #[test]
    fn what_was_given_is_passed_over() {
        let mut given = Given::new(1000 * CELL);
        assert_eq!((given.next(5), given.forward(5, 300 * CELL)), (5, 300 * CELL + 5));
        given.note(&(2 * CELL..500 * CELL));
        assert_eq!((given.next(CELL), given.next(3 * CELL + 1)), (CELL, 500 * CELL));
        assert_eq!(given.forward(CELL, CELL), 2 * CELL);
        assert_eq!(given.forward(CELL, CELL + 1), 500 * CELL + 1);
        assert_eq!(given.forward(400 * CELL, 10 * CELL), 510 * CELL);
        given.note(&(500 * CELL..1000 * CELL));
        assert!(given.next(7 * CELL) >= 1000 * CELL && given.forward(7 * CELL, 1) > 1000 * CELL);
        assert!(given.next(u64::MAX) == u64::MAX);
    }

    proptest! {
        #[test]
        fn what_is_left_is_what_no_read_had(
            size in 1u64..1 << 40, reads in prop::collection::vec((0f64..1.0, 0u64..1 << 30), 0..20),
        ) {
            let mut given = Given::new(size);
            prop_assert!(given.cells.count().div_ceil(64) <= 1 << 13);
            for (at, len) in reads {
                let start = (size as f64 * at) as u64;
                let read = start..(start + len).min(size);
                given.note(&read);
                let left = given.left(&read);
                let bytes: u64 = left.iter().map(|left| left.end - left.start).sum();
                prop_assert!(bytes < given.cells.length, "less than half of a cell at either end");
                prop_assert!(left.iter().all(|left| read.start <= left.start && left.end <= read.end));
            }
        }
    }
}
