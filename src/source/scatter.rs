//! Copies bytes of a file to the targets that they belong to.

use std::ops::Range;

/// Copies bytes of a file that begin at an offset to their targets, which are in order. Drops bytes between targets.
pub fn copy_to_targets(bytes: &[u8], offset: u64, targets: &mut [(u64, &mut [u8])]) {
    let end = offset + bytes.len() as u64;
    for (at, target) in targets {
        let (from, to) = ((*at).max(offset), (*at + target.len() as u64).min(end));
        if *at >= end {
            break;
        }
        if from < to {
            let source = &bytes[(from - offset) as usize..(to - offset) as usize];
            target[(from - *at) as usize..(to - *at) as usize].copy_from_slice(source);
        }
    }
}

/// Whether any target has bytes of a range.
pub fn has_targets(range: &Range<u64>, targets: &[(u64, &mut [u8])]) -> bool {
    let has_bytes = |(at, target): &(u64, &mut [u8])| {
        *at < range.end && range.start < *at + target.len() as u64
    };
    targets.iter().any(has_bytes)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bytes_go_to_the_targets_that_they_lie_in() {
        let file: Vec<u8> = (0..100).collect();
        for step in [1, 7, 100] {
            let (mut a, mut b, mut c) = ([0; 10], [0; 0], [0; 20]);
            let mut targets = [(5u64, &mut a[..]), (20, &mut b[..]), (30, &mut c[..])];
            for at in (5..50).step_by(step) {
                copy_to_targets(&file[at..(at + step).min(50)], at as u64, &mut targets);
            }
            assert_eq!((a.as_slice(), c.as_slice()), (&file[5..15], &file[30..50]));
        }
    }

    #[test]
    fn a_range_between_targets_is_not_wanted() {
        let (mut a, mut b) = ([0; 10], [0; 20]);
        let targets = [(5u64, &mut a[..]), (30, &mut b[..])];
        assert!(has_targets(&(0..6), &targets) && has_targets(&(14..15), &targets));
        assert!(!has_targets(&(15..30), &targets) && !has_targets(&(50..60), &targets));
    }
}
