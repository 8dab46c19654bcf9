//! What of an image its readers were given, and so what is not to be fetched ahead: the kernel keeps it.
//!
//! In: the range of each read. Out: what of a range was not read yet. A pure state machine.

use std::ops::Range;

/// What is told apart: the least that the kernel reads ahead.
const CELL: u64 = 128 << 10;

/// Cells of an image at the most, 64 KiB of memory: those of an image of more than 64 GiB are longer.
const MOST_CELLS: u64 = 1 << 19;

#[derive(Debug)]
pub struct Given {
    cell: u64,
    /// A bit for each cell half of which was read at once: programs read from where a tensor begins, and what
    /// another read had of a cell is not worth fetching.
    read: Vec<u64>,
}

impl Given {
    /// Of an image of so many bytes.
    pub fn new(size: u64) -> Given {
        let cell = size.div_ceil(MOST_CELLS).next_power_of_two().max(CELL);
        Given { cell, read: vec![0; size.div_ceil(cell).div_ceil(64) as usize] }
    }

    /// Takes note of a read. Who reads what was read before shows that the kernel has not kept it: then nothing
    /// is known of the rest either.
    pub fn note(&mut self, range: &Range<u64>) {
        let half = self.cell / 2;
        if range.end - range.start < half {
            return;
        }
        let mut whole = range.start.div_ceil(self.cell)..range.end / self.cell;
        if !whole.is_empty() && whole.all(|cell| self.has(cell)) {
            self.read.fill(0);
        }
        for cell in (range.start + half - 1) / self.cell..(range.end + half) / self.cell {
            if let Some(word) = self.read.get_mut((cell / 64) as usize) {
                *word |= 1 << (cell % 64);
            }
        }
    }

    /// The first byte from here on that was not given.
    pub fn next(&self, from: u64) -> u64 {
        let cell = self.next_cell(from / self.cell);
        from.max(cell * self.cell)
    }

    /// Where so many bytes from here on end, of those that were not given.
    pub fn forward(&self, from: u64, bytes: u64) -> u64 {
        let (mut at, mut left) = (self.next(from), bytes);
        loop {
            let end = (at / self.cell + 1) * self.cell;
            if left <= end - at {
                return at + left;
            }
            left -= end - at;
            at = self.next(end);
        }
    }

    fn next_cell(&self, from: u64) -> u64 {
        let mut cell = from;
        while let Some(word) = self.read.get((cell / 64) as usize) {
            let skipped = u64::from((!word >> (cell % 64)).trailing_zeros());
            if skipped < 64 {
                return cell + skipped;
            }
            cell = (cell / 64 + 1) * 64;
        }
        cell
    }

    /// What of a range was not given.
    pub fn left(&self, range: Range<u64>) -> Vec<Range<u64>> {
        let mut left: Vec<Range<u64>> = Vec::new();
        for cell in range.start / self.cell..range.end.div_ceil(self.cell) {
            let start = range.start.max(cell * self.cell);
            let end = range.end.min((cell + 1) * self.cell);
            match left.last_mut() {
                _ if self.has(cell) => {}
                Some(last) if last.end == start => last.end = end,
                _ => left.push(start..end),
            }
        }
        left
    }

    fn has(&self, cell: u64) -> bool {
        self.read.get((cell / 64) as usize).is_some_and(|word| word >> (cell % 64) & 1 == 1)
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn who_reads_again_is_fetched_for_again() {
        let mut given = Given::new(100 * CELL);
        given.note(&(0..50 * CELL));
        let unread = 50 * CELL..60 * CELL;
        assert_eq!(given.left(0..60 * CELL), [unread]);
        given.note(&(10 * CELL..11 * CELL));
        assert_eq!(given.left(0..60 * CELL), [0..10 * CELL, 11 * CELL..60 * CELL]);
    }

    #[test]
    fn what_less_than_half_was_read_of_is_left() {
        let mut given = Given::new(10 * CELL - 5);
        given.note(&(1..2 * CELL - 1));
        given.note(&(3 * CELL + CELL / 3..3 * CELL + CELL * 2 / 3));
        given.note(&(4 * CELL + CELL / 2 + 1..6 * CELL + CELL / 2));
        given.note(&(8 * CELL + CELL / 3..9 * CELL));
        let left = [2 * CELL..5 * CELL, 7 * CELL..8 * CELL, 9 * CELL..10 * CELL - 5];
        assert_eq!(given.left(0..10 * CELL - 5), left);
    }

    #[test]
    fn who_reads_the_other_half_of_a_cell_reads_nothing_again() {
        let mut given = Given::new(100 * CELL);
        given.note(&(0..10 * CELL + CELL / 2));
        given.note(&(10 * CELL + CELL / 2..11 * CELL));
        assert_eq!(given.left(0..11 * CELL), []);
    }

    #[test]
    fn reads_that_follow_one_another_leave_nothing_between_them() {
        let mut given = Given::new(100 * CELL);
        for at in (777..90 * CELL).step_by(8 * CELL as usize) {
            given.note(&(at..at + 8 * CELL));
        }
        assert_eq!(given.left(777..90 * CELL), []);
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
            prop_assert!(given.read.len() <= 1 << 13);
            for (at, len) in reads {
                let start = (size as f64 * at) as u64;
                let read = start..(start + len).min(size);
                given.note(&read);
                let left = given.left(read.clone());
                let bytes: u64 = left.iter().map(|left| left.end - left.start).sum();
                prop_assert!(bytes < given.cell, "less than half of a cell at either end");
                prop_assert!(left.iter().all(|left| read.start <= left.start && left.end <= read.end));
            }
        }
    }
}
