//! The order in which the parts of an image are first read, and following that of an earlier load.
//!
//! In: the range of each read of one image, whoever asked, and perhaps the order of a load before. Out:
//! the order so far, and the ranges to fetch ahead because that load went on there.
//! A pure state machine, like `readahead`: it reads nothing, knows no clock and cannot fail.
//!
//! Programs take the tensors of a model in an order of their own, and in the same one each time. What
//! streams cannot foresee, where the next tensor lies, is known from the load before. A wrong guess costs
//! little: nothing is fetched before reads are where that load was, the window starts small and doubles as
//! they go on so, and an order that they do not follow is given up.

use std::ops::Range;

use super::chunk_map::{Set, Stretches};

/// Stretches are at least as long as blocks are.
const STRETCH: u64 = 1 << 20;

/// Stretches of an image at the most, so that the number of one takes two bytes: those of an image of
/// more than 64 GiB are longer.
const MOST_STRETCHES: u64 = 1 << 16;

/// Less than this, or than half of the image, is nobody's load.
const LEAST: u64 = 64 << 20;

/// The first window.
const FIRST_WINDOW: u64 = 4 << 20;

/// How far in the order a read may be ahead of those before it: several threads never take turns in the
/// same way twice.
const NEAR: usize = 64;

/// Stretches in a row that are in the order, but not near where it is, after which it is given up.
const STRAYED: u32 = 8;

/// The stretches of an image of so many bytes.
pub fn stretches(size: u64) -> Stretches {
    Stretches::of(size, STRETCH, MOST_STRETCHES)
}

/// What is known of the order in which one open image is read. At its largest, with an order to follow,
/// it takes 520 KiB.
#[derive(Debug)]
pub struct Order {
    stretches: Stretches,
    asked: Set,
    /// The same in order.
    noted: Vec<u16>,
    /// How much was read.
    bytes: u64,
    followed: Option<Followed>,
}

/// The order of an earlier load, and where in it this one is.
#[derive(Debug)]
struct Followed {
    order: Vec<u16>,
    /// Where in it each stretch is; [`NOWHERE`] if it is not.
    places: Box<[u32]>,
    /// Behind the furthest that was read.
    at: usize,
    /// Behind the last that was fetched.
    fetched: usize,
    window: u64,
    /// How many in a row strayed from it.
    strayed: u32,
}

const NOWHERE: u32 = u32::MAX;

impl Order {
    /// Of an image of so many bytes; `None` if it is too small to be remembered.
    pub fn new(size: u64) -> Option<Order> {
        let stretches = stretches(size);
        let (asked, noted) = (Set::of(stretches), Vec::new());
        (size >= LEAST).then_some(Order { stretches, asked, noted, bytes: 0, followed: None })
    }

    pub fn stretches(&self) -> Stretches {
        self.stretches
    }

    /// Follows an order, in which each stretch is at most once, from where reads are by now.
    pub fn follow(&mut self, order: Vec<u16>) {
        let mut places = vec![NOWHERE; self.stretches.count()];
        (0..).zip(&order).for_each(|(place, &stretch)| places[usize::from(stretch)] = place);
        let places = places.into();
        let mut followed = Followed { order, places, at: 0, fetched: 0, window: 0, strayed: 0 };
        let is_followed = self.noted.iter().all(|&stretch| followed.step(stretch));
        self.followed = is_followed.then_some(followed);
    }

    /// Takes note of a read.
    pub fn note(&mut self, range: &Range<u64>) {
        self.bytes = self.bytes.saturating_add(range.end.saturating_sub(range.start));
        for stretch in self.stretches.touched(range) {
            if self.asked.add(stretch) {
                self.noted.push(stretch as u16);
                self.followed.take_if(|followed| !followed.step(stretch as u16));
            }
        }
    }

    /// What to fetch ahead now, earliest first. `widest` are the bytes that may be fetched ahead at once.
    pub fn ahead(&mut self, widest: u64) -> Vec<Range<u64>> {
        let Some(followed) = &mut self.followed else { return Vec::new() };
        let next = followed.next(widest, self.stretches.length);
        let next = followed.order[next].iter().map(|&stretch| usize::from(stretch));
        self.stretches.joined(next.filter(|&stretch| !self.asked.has(stretch)))
    }

    /// What is to be fetched of a range that a stream would read next, whose reader asked for something that begins
    /// there. While an order is followed that is what the load before did not read, or this one passed by: the rest is
    /// fetched in its turn. For a reader who is far ahead of the order its turn may never come.
    pub fn left_to_streams(&self, range: Range<u64>, asked: u64) -> Vec<Range<u64>> {
        let length = self.stretches.length;
        let asked = (asked / length) as usize;
        let under_way =
            |followed: &&Followed| followed.is_under_way(length) && !followed.is_far_from(asked);
        let Some(followed) = self.followed.as_ref().filter(under_way) else { return vec![range] };
        let is_left = |stretch| !followed.comes_to(stretch);
        self.stretches.left(&range, is_left)
    }

    /// The order so far, if that was a load.
    pub fn load(&self) -> Option<&[u16]> {
        let bytes = self.noted.len() as u64 * self.stretches.length;
        // Who reads a little here and there comes by many, and there is nothing to be fetched for them.
        let is_read = self.bytes >= bytes / 2;
        let is_load = is_read && bytes >= LEAST && self.noted.len() * 2 >= self.stretches.count();
        is_load.then_some(&*self.noted)
    }
}

impl Followed {
    /// Whether reads are where it is, it goes on, and there is room to fetch what comes next.
    fn is_under_way(&self, length: u64) -> bool {
        (1..self.order.len()).contains(&self.at) && self.window >= length
    }

    fn comes_to(&self, stretch: usize) -> bool {
        let place = self.places[stretch];
        place != NOWHERE && place as usize >= self.at
    }

    /// Whether it comes to a stretch only when much else was read.
    fn is_far_from(&self, stretch: usize) -> bool {
        let place = self.places.get(stretch).copied().unwrap_or(NOWHERE);
        place != NOWHERE && place as usize >= self.at + NEAR
    }

    /// Whether it is still followed after this stretch. One that is not in the order, or comes later than
    /// it did, says nothing.
    fn step(&mut self, stretch: u16) -> bool {
        let place = self.places[usize::from(stretch)];
        if place == NOWHERE || (place as usize) < self.at {
            return true;
        }
        if place as usize - self.at < NEAR {
            self.at = place as usize + 1;
            self.strayed = 0;
        } else {
            self.strayed += 1;
        }
        self.strayed < STRAYED
    }

    /// Which places of it to fetch now: none until a read was where it starts, or before half of what was
    /// fetched is used up.
    fn next(&mut self, widest: u64, length: u64) -> Range<usize> {
        self.fetched = self.fetched.max(self.at);
        let left = (self.fetched - self.at) as u64 * length;
        if self.at == 0 || left > self.window / 2 {
            return 0..0;
        }
        self.window = (self.window * 2).max(FIRST_WINDOW).min(widest);
        let end = (self.at + (self.window / length) as usize).min(self.order.len());
        let next = self.fetched..end.max(self.fetched);
        self.fetched = next.end;
        next
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    const MIB: u64 = 1 << 20;
    const WIDEST: u64 = 32 * MIB;

    fn mib(n: u64) -> Range<u64> {
        n * MIB..(n + 1) * MIB
    }

    /// The stretches of tensors of 10 MiB each, in this order of tensors.
    fn tensors(order: impl Iterator<Item = u64>) -> Vec<u16> {
        order.flat_map(|tensor| (0..10).map(move |n| (tensor * 10 + n) as u16)).collect()
    }

    fn shuffled() -> Vec<u16> {
        tensors((0..40).map(|n| n * 7 % 40))
    }

    /// Reads stretches; which were fetched, each before which read.
    fn load(order: &mut Order, stretches: &[u16]) -> Vec<Option<usize>> {
        let mut fetched = vec![None; order.stretches().count()];
        for (read, &stretch) in stretches.iter().enumerate() {
            order.note(&mib(stretch.into()));
            for range in order.ahead(WIDEST) {
                for at in range.start / MIB..range.end / MIB {
                    assert_eq!(fetched[at as usize].replace(read), None, "fetched once");
                }
            }
        }
        fetched
    }

    #[test]
    fn a_load_like_the_one_before_is_fetched_ahead_of_from_its_second_stretch_on() {
        let mut order = Order::new(400 * MIB).unwrap();
        assert!(load(&mut order, &shuffled()).iter().all(Option::is_none));
        let remembered = order.load().unwrap().to_vec();
        assert_eq!(remembered, shuffled());
        let mut order = Order::new(400 * MIB).unwrap();
        order.follow(remembered);
        let fetched = load(&mut order, &shuffled());
        for (read, &stretch) in shuffled().iter().enumerate().skip(1) {
            let ahead = read - fetched[usize::from(stretch)].expect("fetched");
            assert!((1..=32).contains(&ahead), "{stretch}: {ahead}");
            assert!(read < 60 || ahead >= 16, "{stretch}: {ahead}");
        }
    }

    #[test]
    fn an_order_that_comes_late_is_followed_from_where_reads_are() {
        let mut order = Order::new(400 * MIB).unwrap();
        load(&mut order, &shuffled()[..100]);
        order.follow(shuffled());
        order.note(&mib(shuffled()[100].into()));
        let next = shuffled()[101];
        assert_eq!(order.ahead(WIDEST)[0].start, u64::from(next) * MIB);
    }

    #[test]
    fn threads_that_take_turns_in_another_way_still_follow() {
        let mut order = Order::new(400 * MIB).unwrap();
        order.follow(shuffled());
        let mut other = shuffled();
        other.chunks_mut(40).for_each(|some| some.rotate_left(20));
        let fetched = load(&mut order, &other);
        assert!(fetched.iter().flatten().count() > 300, "{fetched:?}");
    }

    #[test]
    fn another_order_is_given_up_and_never_followed_again() {
        let mut order = Order::new(400 * MIB).unwrap();
        order.follow(shuffled());
        let other: Vec<u16> =
            (0..=STRAYED as u16).map(|n| shuffled()[100 + usize::from(n)]).collect();
        assert!(load(&mut order, &other).iter().all(Option::is_none));
        assert!(load(&mut order, &shuffled()).iter().all(Option::is_none));
    }

    #[test]
    fn what_was_not_read_then_neither_follows_nor_strays() {
        let mut order = Order::new(400 * MIB).unwrap();
        order.follow(shuffled()[..200].to_vec());
        assert!(load(&mut order, &shuffled()[200..]).iter().all(Option::is_none));
        let fetched = load(&mut order, &shuffled()[..200]);
        assert_eq!(fetched.iter().flatten().count(), 199);
    }

    #[test]
    fn less_than_half_is_no_load_and_a_small_image_none_at_all() {
        assert!(Order::new(LEAST - 1).is_none());
        let mut order = Order::new(400 * MIB).unwrap();
        load(&mut order, &shuffled()[..199]);
        assert_eq!(order.load(), None);
        order.note(&mib(shuffled()[199].into()));
        assert!(order.load().is_some());
        let mut order = Order::new(100 * MIB).unwrap();
        order.note(&(0..63 * MIB));
        assert_eq!(order.load(), None);
        order.note(&mib(63));
        assert_eq!(order.load().unwrap().len(), 64);
    }

    #[test]
    fn a_little_here_and_there_is_no_load() {
        let mut order = Order::new(400 * MIB).unwrap();
        (0..400).for_each(|n| order.note(&(n * MIB..n * MIB + 4096)));
        assert_eq!(order.load(), None);
        (0..400).for_each(|n| order.note(&(n * MIB + 4096..(n + 1) * MIB)));
        assert_eq!(order.load().unwrap().len(), 400);
    }

    #[test]
    fn stretches_of_large_images_are_longer_and_never_more() {
        for (size, count) in
            [(64 << 30, 1 << 16), ((64 << 30) + 1, (1 << 15) + 1), (1 << 40, 1 << 16)]
        {
            let mut order = Order::new(size).unwrap();
            assert_eq!(order.stretches().count(), count);
            order.note(&(0..size));
            assert_eq!(order.load().unwrap().len(), count);
        }
    }

    #[test]
    fn streams_fetch_what_the_order_does_not_come_to() {
        let mut order = Order::new(400 * MIB).unwrap();
        let all = || 5 * MIB + 7..75 * MIB - 7;
        assert_eq!(order.left_to_streams(all(), 10 * MIB), [all()]);
        // Of the first hundred, thirty to forty were not read then.
        order.follow((0..30).chain(40..100).collect());
        assert_eq!(
            order.left_to_streams(all(), 10 * MIB),
            [all()],
            "nothing says yet that it is followed"
        );
        order.note(&(10 * MIB..11 * MIB));
        order.ahead(MIB - 1);
        assert_eq!(
            order.left_to_streams(all(), 10 * MIB),
            [all()],
            "there is no room to follow it with"
        );
        order.ahead(WIDEST);
        // Also what was read before: who reads it again has to be read ahead of again.
        let passed_by = 5 * MIB + 7..11 * MIB;
        assert_eq!(order.left_to_streams(all(), 10 * MIB), [passed_by, 30 * MIB..40 * MIB]);
        assert_eq!(order.left_to_streams(all(), 90 * MIB), [all()], "its turn comes much later");
        order.note(&(0..100 * MIB));
        assert_eq!(order.left_to_streams(all(), 10 * MIB), [all()], "it is over");
    }

    proptest! {
        #[test]
        fn whatever_is_read_what_is_fetched_is_in_the_image_unread_and_bounded(
            remembered in Just((0..300u16).collect::<Vec<_>>()).prop_shuffle(),
            known in 0..300usize,
            reads in prop::collection::vec((0u64..600, 0u64..4), 1..400),
            follows in 0..400usize, widest in 0..WIDEST, ragged in 0..MIB,
        ) {
            let size = 299 * MIB + 1 + ragged;
            let mut order = Order::new(size).unwrap();
            order.follow(remembered[..known].to_vec());
            let (mut asked, mut fetched) = (Set::of(order.stretches()), Set::of(order.stretches()));
            for (n, (at, len)) in reads.into_iter().enumerate() {
                // Some reads go where the order does, the others anywhere, past the end too.
                let at = if n < follows { remembered.get(n).map_or(at, |&s| s.into()) } else { at };
                let range = at * MIB..(at + len).max(at) * MIB;
                order.note(&range);
                for stretch in at..(at + len).min(300) {
                    asked.add(stretch as usize);
                }
                let ahead = order.ahead(widest);
                let bytes: u64 = ahead.iter().map(|range| range.end - range.start).sum();
                prop_assert!(bytes <= widest, "{bytes}");
                for range in ahead {
                    prop_assert!(range.start < range.end && range.end <= size, "{range:?}");
                    for stretch in range.start / MIB..range.end.div_ceil(MIB) {
                        prop_assert!(!asked.has(stretch as usize) && fetched.add(stretch as usize));
                    }
                }
                prop_assert!(order.noted.len() <= 300);
            }
        }
    }
}
