//! What is fetched before it is asked for: what `readahead` says of the streams that readers are, the tensors that come
//! next by `tensor_predictor`, and what the load before went on with by `access_trace`.
//!
//! In: each read of an open image. Out: blocks that are about to be filled.

use std::ops::Range;
use std::sync::{Arc, Mutex, OnceLock};

use crate::image::Image;
use crate::threads::lock;

use super::access_trace::Order;
use super::cached_file::Served;
use super::delivered_ranges::Given;
use super::fill::Why;
use super::readahead::{Ends, Planner, Seen};
use super::tensor_predictor::Course;
use super::trace_store::Kept;
use super::{Cache, fill};

/// A tensor of less comes with others in one read: which one comes next says little.
const LARGE_TENSOR: u64 = 1 << 20;

/// What is known of how an open image is read.
pub(super) struct Foresight {
    planner: Mutex<Planner>,
    given: Mutex<Given>,
    course: OnceLock<Mutex<Course>>,
    /// In which order it is read, if that is remembered.
    kept: Option<Arc<Kept>>,
}

impl Foresight {
    pub(super) fn new(cache: &Cache, image: &Image) -> Foresight {
        // A file as it is has no layout that would be known again.
        let orders = cache.orders.as_ref().filter(|_| !image.is_plain());
        let kept =
            orders.and_then(|orders| Some(orders.keep(image.layout(), Order::new(image.size())?)));
        let (planner, given, course) = Default::default();
        Foresight { planner, given, course, kept }
    }

    /// Takes note of a read, for the load after this one.
    pub(super) fn note(&self, range: &Range<u64>) {
        if let Some(kept) = &self.kept {
            lock(&kept.order).note(range);
        }
    }
}

impl Served {
    /// What a read turns out to be among those before it.
    pub(super) fn see(&self, range: &Range<u64>) -> Seen {
        let mut given = lock(&self.foresight.given);
        let (_, limit) = self.cache.store.pool.held_and_limit();
        let image = self.image();
        let tensor = image.tensor_at(range.start).map(|place| image.tensor_range(place));
        let ends = Ends { tensor, image: image.size() };
        let seen = lock(&self.foresight.planner).read(
            range,
            ends,
            &given,
            self.cache.readahead,
            limit / 2,
        );
        given.note(range);
        seen
    }

    /// Whether the first page of a tensor is in it.
    pub(super) fn begins_tensor(&self, range: &Range<u64>) -> bool {
        let last = self.image().tensor_at(range.end - 1);
        last.is_some_and(|place| self.image().tensor_range(place).start >= range.start)
    }

    /// Has fetched what the load before went on with.
    pub(super) fn replay(self: &Arc<Self>) {
        let Some(kept) = &self.foresight.kept else { return };
        let ahead = lock(&kept.order).ahead(self.widest());
        ahead.into_iter().for_each(|range| self.fetch_blocks(range, &(0..0), Why::Remembered));
    }

    /// Has fetched what will probably be read next.
    pub(super) fn fetch_ahead(self: &Arc<Self>, range: &Range<u64>, seen: Seen) {
        if let Some(ahead) = seen.ahead {
            self.fetch_left(&ahead, u64::MAX, range);
        }
        if seen.comes
            && let Some(place) = self.image().tensor_at(range.start)
        {
            for (next, bytes) in self.foresee(place as u32) {
                let next = self.image().tensor_range(next as usize);
                self.fetch_left(&next, bytes, range);
            }
        }
    }

    /// The tensors that will probably be read after one, and how much of each to fetch.
    fn foresee(&self, place: u32) -> Vec<(u32, u64)> {
        let image = self.image();
        let range = |place: u32| image.tensor_range(place as usize);
        let is_large = |place: u32| range(place).end - range(place).start >= LARGE_TENSOR;
        if !is_large(place) {
            return Vec::new();
        }
        let name = |place: u32| &*image.tensors()[place as usize].name;
        let course = self.foresight.course.get_or_init(|| {
            let all = 0..image.tensors().len() as u32;
            Mutex::new(Course::new(all.filter(|&n| is_large(n)).map(|n| (n, name(n)))))
        });
        let left = |place| {
            let left = lock(&self.foresight.given).left(&range(place));
            left.into_iter().map(|left| left.end - left.start).sum()
        };
        lock(course).come(place, name(place), self.widest(), left)
    }

    /// What may be fetched ahead otherwise than for streams: half of what those may take together, which go on beside it.
    fn widest(&self) -> u64 {
        let (_, limit) = self.cache.store.pool.held_and_limit();
        self.cache.readahead.min(limit / 4)
    }

    /// Has fetched so many bytes at the most of what was not given of a range, as is expected to be asked for by who
    /// asked for another.
    fn fetch_left(self: &Arc<Self>, range: &Range<u64>, most: u64, asked: &Range<u64>) {
        let left = lock(&self.foresight.given).left(range);
        let mut room = most;
        for left in left {
            if room == 0 {
                break;
            }
            let left = left.start..left.end.min(left.start.saturating_add(room));
            room -= left.end - left.start;
            let left = match &self.foresight.kept {
                Some(kept) => lock(&kept.order).left_to_streams(left, asked.start),
                None => vec![left],
            };
            left.into_iter().for_each(|range| self.fetch_blocks(range, asked, Why::Ahead));
        }
    }

    /// Has filled what no block has of a range, nor is about to.
    fn fetch_blocks(self: &Arc<Self>, range: Range<u64>, asked: &Range<u64>, why: Why) {
        let new = self.cache.store.announce(self.number, &self.to_fetch(range, asked));
        new.into_iter().for_each(|id| fill::start(self, id, why));
    }
}
