//! An open image: answers any read of it from what is at hand, or has it fetched.
//!
//! In order: from blocks that are there; from the sources' own page cache, copied once and kept
//! nowhere; from the disk, into blocks that others then find.

use std::ops::Range;
use std::sync::{Arc, OnceLock};

use crate::image::{Image, Reader, SegmentBytes};

use super::block_table::{Block, BlockId, Found, Joined, Of};
use super::extent_index::Parts;
use super::fill::Why;
use super::pool::Size;
use super::prefetcher::Foresight;
use super::read_plan::Wanted;
use super::reply::{Answer, Done, Gathering, Waiter};
use super::scratch::with_scratch;
use super::source_handle::OpenOrigin;
use super::{Cache, Error, fill};

/// An open image, shared by all who have it open.
pub struct Served {
    pub(super) cache: Arc<Cache>,
    pub(super) reader: Arc<Reader>,
    pub(super) origins: Box<[OpenOrigin]>,
    /// Sets its blocks apart from those of other images.
    pub(super) number: u64,
    /// How large the blocks of strided tensors are.
    pub(super) large: Size,
    pub(super) foresight: Foresight,
    /// Why nothing of it can be read any more.
    broken: OnceLock<Arc<Error>>,
}

impl Served {
    pub(super) fn new(cache: Arc<Cache>, reader: Arc<Reader>, number: u64) -> Served {
        let origins = (0..).zip(reader.image().origins());
        let origins = origins.map(|(n, _)| OpenOrigin::new(&cache, &reader, n)).collect();
        let (_, limit) = cache.store.pool.held_and_limit();
        let large = if limit >= LARGE_FROM { Size::Large } else { Size::Small };
        let broken = OnceLock::new();
        let foresight = Foresight::new(&cache, reader.image());
        Served { cache, reader, origins, number, large, foresight, broken }
    }

    /// What reads the image by itself.
    pub fn reader(&self) -> &Arc<Reader> {
        &self.reader
    }

    /// The image.
    pub fn image(&self) -> &Arc<Image> {
        self.reader.image()
    }

    /// Reads a range, cut at the image's end. `done` is called exactly once with all of its bytes
    /// or with the error: before this returns if everything is at hand, otherwise by another
    /// thread. Never waits for a disk.
    pub fn read(self: &Arc<Self>, offset: u64, len: u32, done: Done) {
        let counting = &self.cache.counting;
        let answer = Answer::new(done, Arc::clone(counting));
        let end = offset.saturating_add(u64::from(len)).min(self.image().size());
        if offset >= end {
            return answer.give(Ok(&[]));
        }
        counting.reads.one();
        if let Some(error) = self.broken.get() {
            counting.refused.one();
            return answer.give(Err(error));
        }
        let range = offset..end;
        if let Some(header) = self.image().header().get(offset as usize..end as usize) {
            counting.hits.one();
            return answer.give(Ok(header));
        }
        self.foresight.note(&range);
        let wanted = self.wanted(&range);
        let found = wanted.as_ref().and_then(|w| self.cache.store.get_all(self.number, &w.pieces));
        let wanted = match (wanted, found) {
            (Some(wanted), Some(found)) => {
                counting.hits.one();
                self.answer_from(range.clone(), wanted, found, answer);
                self.replay();
                let seen = self.see(&range);
                return self.fetch_ahead(&range, seen);
            }
            (wanted, _) => wanted,
        };
        let answer = match self.answer_cached(&range, answer) {
            Ok(()) => return,
            Err(answer) => answer,
        };
        counting.misses.one();
        let seen = self.see(&range);
        match (wanted, self.run_alone(&range)) {
            (None, _) => self.read_in_pieces(range.clone(), answer),
            (Some(wanted), Some((origin, offset)))
                if seen.is_jump && !self.comes_anyway(&wanted) =>
            {
                let (served, len) = (Arc::clone(self), (range.end - range.start) as usize);
                let read = move || served.read_alone(origin, offset, len, answer);
                self.origins[origin as usize].lane.run_now(Box::new(read));
            }
            (Some(wanted), _) => {
                let is_beside = seen.is_around && !self.begins_tensor(&range);
                let why = if is_beside { Why::Soon } else { Why::Now };
                self.join(&range, &wanted, why, answer);
            }
        }
        self.replay();
        self.fetch_ahead(&range, seen);
    }

    /// Answers from blocks all of which are there. Whether their files changed is asked here where
    /// that takes no time, and otherwise by a thread that may wait.
    fn answer_from(
        self: &Arc<Self>,
        range: Range<u64>,
        wanted: Wanted,
        found: Vec<Found>,
        answer: Answer,
    ) {
        let remote = found.iter().map(|found| self.origin_of(found.id)).find(|o| !o.local);
        let Some(remote) = remote else {
            return self.answer_checked(&range, &wanted, &found, answer);
        };
        let served = Arc::clone(self);
        remote.lane.run_now(Box::new(move || {
            served.answer_checked(&range, &wanted, &found, answer);
        }));
    }

    fn answer_checked(&self, range: &Range<u64>, wanted: &Wanted, found: &[Found], answer: Answer) {
        let mut checked = None;
        for Found { id, .. } in found {
            if checked != Some(id.of)
                && let Err(error) = self.check(*id)
            {
                return answer.give(Err(&error));
            }
            checked = Some(id.of);
        }
        if let [Found { block, parts, .. }] = found
            && let [part] = &**parts
            && wanted.at_hand.is_empty()
        {
            return answer.give(Ok(&block.bytes()[part.bytes.clone()]));
        }
        with_scratch((range.end - range.start) as usize, |scratch| {
            for Found { block, parts, .. } in found {
                for part in parts {
                    scratch[part.at..part.at + part.bytes.len()]
                        .copy_from_slice(&block.bytes()[part.bytes.clone()]);
                }
            }
            match self.copy_at_hand(wanted, scratch) {
                Ok(()) => answer.give(Ok(scratch)),
                Err(error) => answer.give(Err(&error)),
            }
        });
    }

    /// Copies what the image itself holds in memory: there is no disk to wait for.
    fn copy_at_hand(&self, wanted: &Wanted, out: &mut [u8]) -> Result<(), Arc<Error>> {
        for (at, range) in &wanted.at_hand {
            let part = &mut out[*at..*at + (range.end - range.start) as usize];
            self.reader.read_at(part, range.start).map_err(|e| self.failed(e.into()))?;
        }
        Ok(())
    }

    /// Answers from the sources' page cache if all of the range is there, and gives the answer
    /// back if not.
    fn answer_cached(&self, range: &Range<u64>, answer: Answer) -> Result<(), Answer> {
        let segments = || self.image().segments(range.clone());
        let local = segments().all(|segment| match segment.bytes {
            SegmentBytes::Header(_) => true,
            SegmentBytes::Run { origin, .. } => self.origins[origin.0 as usize].local,
            SegmentBytes::Tensor { .. } => false,
        });
        if !local {
            return Err(answer);
        }
        with_scratch((range.end - range.start) as usize, |scratch| {
            let mut last = None;
            for segment in segments() {
                let start = (segment.range.start - range.start) as usize;
                let out = &mut scratch[start..(segment.range.end - range.start) as usize];
                match segment.bytes {
                    SegmentBytes::Run { origin, offset } if self.reader.file(origin).is_some() => {
                        let file = &self.origins[origin.0 as usize];
                        if !file.read_cached(&self.reader, out, offset) {
                            return Err(answer);
                        }
                        if last != Some(origin)
                            && let Some(last) = last.replace(origin)
                            && let Err(error) = self.check_origin(last.0)
                        {
                            answer.give(Err(&error));
                            return Ok(());
                        }
                    }
                    _ => {
                        if self.reader.read_at(out, segment.range.start).is_err() {
                            return Err(answer);
                        }
                    }
                }
            }
            let counting = &self.cache.counting;
            counting.cached.one();
            counting.cached_bytes.add(scratch.len() as u64);
            match last.map_or(Ok(()), |origin| self.check_origin(origin.0)) {
                Ok(()) => answer.give(Ok(scratch)),
                Err(error) => answer.give(Err(&error)),
            }
            Ok(())
        })
    }

    /// Waits for the blocks that are not there.
    fn join(self: &Arc<Self>, range: &Range<u64>, wanted: &Wanted, why: Why, answer: Answer) {
        let mut answer = Some(answer);
        // One part of one block is the answer itself; of more it is put together.
        let whole = |parts: Parts| match &*parts {
            [(id, parts)] if parts.len() == 1 && wanted.at_hand.is_empty() => {
                Some(vec![(*id, Waiter::Whole(parts[0].bytes.clone(), answer.take()?))])
            }
            _ => None,
        };
        let joined = self.cache.store.join(self.number, &wanted.pieces, why, whole);
        let joined = joined.or_else(|| self.join_parts(range, wanted, why, answer.take()?));
        let Some(joined) = joined else {
            return;
        };
        for id in joined.to_fill {
            fill::start(self, id, why);
        }
        for (id, block, waiter) in joined.ready {
            let origin = self.origin_of(id);
            if origin.local {
                self.answer_waiter(id, &block, waiter);
            } else {
                let served = Arc::clone(self);
                let job = Box::new(move || served.answer_waiter(id, &block, waiter));
                origin.lane.run_now(job);
            }
        }
    }

    /// The same for what is put together; `None` if that was answered otherwise.
    fn join_parts(
        self: &Arc<Self>,
        range: &Range<u64>,
        wanted: &Wanted,
        why: Why,
        answer: Answer,
    ) -> Option<Joined> {
        let store = &self.cache.store;
        let len = (range.end - range.start) as usize;
        let Some(mut bytes) = Size::of(len).and_then(|size| store.buffer(size)) else {
            self.read_in_pieces(range.clone(), answer);
            return None;
        };
        if let Err(error) = self.copy_at_hand(wanted, &mut bytes) {
            answer.give(Err(&error));
            return None;
        }
        let mut answer = Some(answer);
        let gathered = |parts: Parts| {
            let gathering = Gathering::new(bytes, len, parts.len(), answer.take()?);
            let waiter = |(id, parts)| (id, Waiter::Parts(parts, Arc::clone(&gathering)));
            Some(parts.into_iter().map(waiter).collect())
        };
        let joined = store.join(self.number, &wanted.pieces, why, gathered);
        if let Some(answer) = answer {
            self.read_in_pieces(range.clone(), answer);
        }
        joined
    }

    fn answer_waiter(&self, id: BlockId, block: &Block, waiter: Waiter) {
        match self.check(id) {
            Ok(()) => waiter.answer(Ok(block.bytes())),
            Err(error) => waiter.answer(Err(&error)),
        }
    }

    /// Refuses bytes of a file that changed.
    pub(super) fn check(&self, id: BlockId) -> Result<(), Arc<Error>> {
        match id.of {
            Of::File(origin) => self.check_origin(origin),
            Of::Tensor(place) => {
                self.check_origin(self.image().tensors()[place as usize].bytes.reach().0.0)
            }
        }
    }

    fn check_origin(&self, origin: u32) -> Result<(), Arc<Error>> {
        if let Some(error) = self.broken.get() {
            return Err(Arc::clone(error));
        }
        let unchanged = self.origins[origin as usize].check_unchanged(&self.reader);
        unchanged.map_err(|error| self.failed(error.into()))
    }

    /// An error to be answered. If no later read can do better, all of them get this one.
    pub(super) fn failed(&self, error: Error) -> Arc<Error> {
        let error = Arc::new(error);
        if !error.is_final() {
            if self.cache.may_say(error.path()) {
                tracing::warn!(%error, "a read failed");
            }
            return error;
        }
        let first = self.broken.get_or_init(|| {
            let remedy = error.remedy();
            if self.image().is_plain() {
                // Files that are shown as they are may change: they are then read as they are.
                tracing::debug!(%error, "nothing more is read ahead of this file");
            } else if self.cache.may_say(error.path()) {
                tracing::error!(%error, remedy, "nothing more is read of this image");
            }
            Arc::clone(&error)
        });
        Arc::clone(first)
    }
}

/// Memory from which on gathered tensors have large blocks: they then take an eighth of it at most.
const LARGE_FROM: u64 = 64 << 20;

impl Drop for Served {
    fn drop(&mut self) {
        self.cache.store.forget(self.number);
        self.origins.iter().for_each(|origin| origin.leave(&self.reader));
    }
}
