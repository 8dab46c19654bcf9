//! How many requests of one store are in flight at once.
//!
//! A store bounds the speed of each connection. The network, the processor or the store bounds all of them together,
//! at an unknown speed. The limit grows while more requests bring more bytes, and is halved when the store asks for less.
//! [`ConcurrencyController`] is a pure state machine; [`RequestGate`] makes readers wait.

use std::sync::Mutex;
use std::sync::atomic::{AtomicUsize, Ordering::Relaxed};
use std::time::{Duration, Instant};

use tokio::sync::{Semaphore, SemaphorePermit};

use crate::threads::lock;

/// 32 connections of 50 MB/s are 13 Gbit/s. A load of 2.2 GB through a mount took 1.06 times as long with 16: it ended before
/// the limit had grown.
const FIRST_LIMIT: usize = 32;

/// The default of the highest limit: at 50 MB/s a connection, 25 Gbit/s.
pub const DEFAULT_MAX_LIMIT: usize = 64;

/// Requests up to this size pass the limit: a reader waits for a page while parts are fetched ahead.
const MAX_SMALL_REQUEST_BYTES: u64 = 1 << 20;

/// Small requests in flight beside parts, unless the user sets a number. The mount has as many threads for them.
const SMALL_REQUEST_COUNT: usize = 32;

/// Minimum gain in speed for which a higher limit is kept.
const MIN_GAIN: f64 = 1.05;

/// Rounds at a limit before a higher one is tried again: other traffic may have ended.
const HOLD_ROUNDS: u32 = 16;

/// The time for which the limit does not grow after a store asked for less.
const BUSY_HOLD_TIMEOUT: Duration = Duration::from_secs(2);

/// Finds the number of requests that brings the most bytes.
#[derive(Debug)]
pub struct ConcurrencyController {
    limit: usize,
    max_limit: usize,
    is_fixed: bool,
    round: Round,
    /// The limit before the last growth, and the bytes a second that it brought.
    before: Option<(usize, f64)>,
    /// Rounds until the limit may grow.
    hold_rounds: u32,
    busy_until: Option<Instant>,
}

/// As many requests as the limit allows at once.
#[derive(Debug, Default)]
struct Round {
    started: Option<Instant>,
    requests: usize,
    bytes: u64,
    /// Whether a request waited for another to end: otherwise the round says nothing about the limit.
    is_full: bool,
}

impl ConcurrencyController {
    /// A controller that never exceeds a limit, or keeps it fixed.
    pub fn new(max_limit: usize, is_fixed: bool) -> ConcurrencyController {
        let limit = if is_fixed { max_limit } else { FIRST_LIMIT.min(max_limit) };
        ConcurrencyController {
            limit,
            max_limit,
            is_fixed,
            round: Round::default(),
            before: None,
            hold_rounds: 0,
            busy_until: None,
        }
    }

    /// The limit now.
    pub fn limit(&self) -> usize {
        self.limit
    }

    /// Records that a request waits for another to end.
    pub fn on_wait(&mut self) {
        self.round.is_full = true;
    }

    /// Records that a request begins while no other is in flight: the time since the last one says nothing about speed.
    pub fn on_start_after_idle(&mut self) {
        self.round = Round::default();
    }

    /// Records the bytes that a request brought.
    pub fn on_complete(&mut self, bytes: u64, now: Instant) {
        let Some(started) = self.round.started else {
            // The round begins when the first request ends: those in flight are then as many as there will be.
            self.round.started = Some(now);
            return;
        };
        self.round.requests += 1;
        self.round.bytes += bytes;
        if self.round.requests < self.limit {
            return;
        }
        let seconds = now.duration_since(started).as_secs_f64().max(f64::EPSILON);
        let round =
            std::mem::replace(&mut self.round, Round { started: Some(now), ..Round::default() });
        if round.is_full && !self.is_fixed {
            self.adapt(round.bytes as f64 / seconds, now);
        }
    }

    /// Records that the store asks for fewer requests.
    pub fn on_busy(&mut self, now: Instant) {
        if self.is_fixed || self.busy_until.is_some_and(|until| now < until) {
            return;
        }
        self.limit = (self.limit / 2).max(1);
        // Measurements of more requests say nothing about half as many.
        (self.before, self.hold_rounds) = (None, 0);
        self.busy_until = Some(now + BUSY_HOLD_TIMEOUT);
        self.round = Round::default();
    }

    fn adapt(&mut self, bytes_per_second: f64, now: Instant) {
        if self.busy_until.is_some_and(|until| now < until) {
            return;
        }
        if let Some((before, speed)) = self.before.take()
            && bytes_per_second < speed * MIN_GAIN
        {
            self.limit = before;
            self.hold_rounds = HOLD_ROUNDS;
            return;
        }
        if self.hold_rounds > 0 {
            self.hold_rounds -= 1;
            return;
        }
        let next = (self.limit + self.limit.div_ceil(2)).min(self.max_limit);
        if next > self.limit {
            self.before = Some((self.limit, bytes_per_second));
            self.limit = next;
        }
    }
}

/// Makes requests wait for one another.
#[derive(Debug)]
pub struct RequestGate {
    /// Requests of every size.
    all: Semaphore,
    /// Requests for parts.
    parts: Semaphore,
    /// Permits of `parts` that are to be taken back when they are free.
    excess: AtomicUsize,
    controller: Mutex<ConcurrencyController>,
}

/// The right to have a request in flight.
pub struct RequestPermit<'a> {
    _any: SemaphorePermit<'a>,
    part: Option<SemaphorePermit<'a>>,
    gate: &'a RequestGate,
}

impl RequestGate {
    /// A gate for a fixed number of requests at once; without a number, it adapts.
    pub fn new(fixed_count: Option<u16>) -> RequestGate {
        let max_limit = fixed_count.map_or(DEFAULT_MAX_LIMIT, usize::from);
        let controller = ConcurrencyController::new(max_limit, fixed_count.is_some());
        let small = if fixed_count.is_some() { 0 } else { SMALL_REQUEST_COUNT };
        RequestGate {
            all: Semaphore::new(max_limit + small),
            parts: Semaphore::new(controller.limit()),
            excess: AtomicUsize::new(0),
            controller: Mutex::new(controller),
        }
    }

    /// Waits for the right to send a request for so many bytes.
    pub async fn permit(&self, bytes: u64) -> RequestPermit<'_> {
        const OPEN: &str = "it is never closed";
        let part = match bytes > MAX_SMALL_REQUEST_BYTES {
            true => Some(match self.parts.try_acquire() {
                Ok(permit) => {
                    let mut controller = lock(&self.controller);
                    if self.parts.available_permits() + 1 >= controller.limit() {
                        controller.on_start_after_idle();
                    }
                    permit
                }
                Err(_) => {
                    lock(&self.controller).on_wait();
                    self.parts.acquire().await.expect(OPEN)
                }
            }),
            false => None,
        };
        RequestPermit { _any: self.all.acquire().await.expect(OPEN), part, gate: self }
    }

    /// Records that the store asks for fewer requests.
    pub fn on_busy(&self) {
        self.change(|controller| controller.on_busy(Instant::now()));
    }

    fn change(&self, change: impl FnOnce(&mut ConcurrencyController)) {
        let mut controller = lock(&self.controller);
        let before = controller.limit();
        change(&mut controller);
        let after = controller.limit();
        // Under the lock: two changes must not pass each other.
        if after > before {
            let mut more = after - before;
            while more > 0 && self.take_excess() {
                more -= 1;
            }
            self.parts.add_permits(more);
        } else {
            let taken = self.parts.forget_permits(before - after);
            self.excess.fetch_add(before - after - taken, Relaxed);
        }
    }

    fn take_excess(&self) -> bool {
        self.excess.fetch_update(Relaxed, Relaxed, |excess| excess.checked_sub(1)).is_ok()
    }
}

impl RequestPermit<'_> {
    /// Records the bytes that the request brought.
    pub fn complete(self, bytes: u64) {
        if self.part.is_some() {
            self.gate.change(|controller| controller.on_complete(bytes, Instant::now()));
        }
    }
}

impl Drop for RequestPermit<'_> {
    fn drop(&mut self) {
        if let Some(permit) = self.part.take()
            && self.gate.take_excess()
        {
            permit.forget();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const PART_BYTES: u64 = 8 << 20;

    /// Runs rounds of a store that gives each connection one speed, and all together another. Returns the limits.
    fn run(controller: &mut ConcurrencyController, rounds: usize, all: f64) -> Vec<usize> {
        let mut now = Instant::now();
        controller.on_complete(0, now);
        let mut limits = Vec::new();
        for _ in 0..rounds {
            let limit = controller.limit();
            let speed = (limit as f64 * 50e6).min(all);
            for _ in 0..limit {
                now += Duration::from_secs_f64(PART_BYTES as f64 / speed);
                controller.on_wait();
                controller.on_complete(PART_BYTES, now);
            }
            limits.push(controller.limit());
        }
        limits
    }

    #[test]
    fn the_limit_grows_to_what_a_fast_network_takes() {
        let mut controller = ConcurrencyController::new(64, false);
        assert_eq!(controller.limit(), FIRST_LIMIT);
        assert_eq!(run(&mut controller, 3, 1e12), [48, 64, 64]);
    }

    #[test]
    fn the_limit_stays_where_more_requests_bring_no_more() {
        let mut controller = ConcurrencyController::new(64, false);
        // 40 connections fill it: 48 bring more than 32, and 64 no more than 48.
        let limits = run(&mut controller, 10, 2e9);
        assert_eq!(limits[..4], [48, 64, 48, 48]);
        assert_eq!(*limits.last().unwrap(), 48);
        // What shared the network is gone.
        assert_eq!(*run(&mut controller, 30, 1e12).last().unwrap(), 64);
    }

    #[test]
    fn rounds_that_wait_for_nothing_change_nothing() {
        let mut controller = ConcurrencyController::new(64, false);
        let mut now = Instant::now();
        for _ in 0..1000 {
            now += Duration::from_millis(50);
            controller.on_complete(PART_BYTES, now);
        }
        assert_eq!(controller.limit(), FIRST_LIMIT);
    }

    #[test]
    fn a_busy_store_halves_the_limit_once_for_all_requests_in_flight() {
        let mut controller = ConcurrencyController::new(64, false);
        run(&mut controller, 5, 1e12);
        let now = Instant::now();
        (0..64).for_each(|_| controller.on_busy(now));
        assert_eq!(controller.limit(), 32);
        for seconds in [3, 6, 9, 12, 15, 18, 21] {
            controller.on_busy(now + Duration::from_secs(seconds));
        }
        assert_eq!(controller.limit(), 1);
    }

    #[test]
    fn a_pause_between_two_loads_does_not_look_slow() {
        let mut controller = ConcurrencyController::new(64, false);
        let mut now = Instant::now();
        for expected in [48, 64] {
            controller.on_start_after_idle();
            for _ in 0..=controller.limit() {
                now += Duration::from_millis(10);
                controller.on_wait();
                controller.on_complete(PART_BYTES * controller.limit() as u64, now);
            }
            assert_eq!(controller.limit(), expected);
            now += Duration::from_secs(60);
        }
    }

    #[test]
    fn a_limit_that_was_halved_grows_again() {
        let mut controller = ConcurrencyController::new(64, false);
        // The last growth brought nothing.
        assert_eq!(run(&mut controller, 3, 2e9), [48, 64, 48]);
        let now = Instant::now() - BUSY_HOLD_TIMEOUT;
        controller.on_busy(now);
        assert_eq!(run(&mut controller, 3, 1e12), [36, 54, 64]);
    }

    #[test]
    fn a_stated_number_is_kept() {
        let mut controller = ConcurrencyController::new(7, true);
        run(&mut controller, 5, 1e12);
        controller.on_busy(Instant::now());
        assert_eq!(controller.limit(), 7);
    }

    #[tokio::test]
    async fn the_gate_follows_the_limit_with_requests_in_flight() {
        let gate = RequestGate::new(None);
        let mut held = Vec::new();
        for _ in 0..FIRST_LIMIT {
            held.push(gate.permit(PART_BYTES).await);
        }
        assert_eq!(gate.parts.available_permits(), 0);
        // A reader of a page does not wait for parts.
        drop(gate.permit(4096).await);
        gate.on_busy();
        held.truncate(17);
        assert_eq!(gate.parts.available_permits(), 0);
        held.truncate(16);
        assert_eq!(gate.parts.available_permits(), 0);
        held.truncate(14);
        assert_eq!(gate.parts.available_permits(), 2);
        held.clear();
        assert_eq!(gate.parts.available_permits(), 16);
    }
}
