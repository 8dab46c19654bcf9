//! The outage of one store, which its readers share: a late reader does not wait the whole timeout again.
//!
//! An outage begins with a request that fails for now, and ends with the next answer. The log has one line when readers
//! begin to notice it, and one when the server is back. Until a server has answered anything, its address may be wrong: its
//! readers wait for a shorter time.

use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::time::{Duration, Instant};

use crate::threads::lock;

use super::error::RemoteError;
use super::failure::StoreFailure;

/// The shortest outage that is logged: loaded servers answer 503 now and then.
const MIN_LOGGED_INTERVAL: Duration = Duration::from_secs(3);

/// The outage timeout before the first answer of a store, which also bounds the wait for that answer.
pub const FIRST_ANSWER_TIMEOUT: Duration = Duration::from_secs(10);

/// The longest time after a failed request in which others fail with it. Short, so that a server that is back is noticed.
const MAX_SHARED_INTERVAL: Duration = Duration::from_secs(2);

/// Watches whether a store answers.
#[derive(Debug)]
pub struct OutageWatch {
    /// The store, for the log.
    name: String,
    /// The outage timeout. An outage whose last failure is older than it counts as over.
    timeout: Duration,
    has_answered: AtomicBool,
    is_away: AtomicBool,
    outage: Mutex<Option<Outage>>,
}

#[derive(Clone, Debug)]
struct Outage {
    since: Instant,
    failed_at: Instant,
    /// The time that the last request took to fail.
    attempt: Duration,
    message: String,
    is_logged: bool,
}

impl OutageWatch {
    pub fn new(name: String, timeout: Duration) -> OutageWatch {
        let (has_answered, is_away, outage) = Default::default();
        OutageWatch { name, timeout, has_answered, is_away, outage }
    }

    /// The time that a server may give nothing. Before its first answer it is shorter.
    pub fn timeout(&self) -> Duration {
        match self.has_answered.load(Relaxed) {
            true => self.timeout,
            false => self.timeout.min(FIRST_ANSWER_TIMEOUT),
        }
    }

    /// Records that there is a server, even if it answers that it is busy.
    pub fn on_contact(&self) {
        self.has_answered.store(true, Relaxed);
    }

    /// Records that the server answered, or sent bytes.
    pub fn on_answer(&self) {
        if !self.is_away.load(Relaxed) {
            return;
        }
        let ended = {
            let mut outage = lock(&self.outage);
            // Under the lock, so that no failure is recorded in between.
            self.is_away.store(false, Relaxed);
            outage.take()
        };
        if let Some(Outage { since, is_logged: true, .. }) = ended {
            let seconds = since.elapsed().as_secs();
            tracing::warn!("{}: answers again, after {seconds} s", self.name);
        }
    }

    /// Records that a request failed for now, after a time. Returns how long the outage has been.
    pub fn on_failure(&self, message: &str, attempt: Duration) -> Duration {
        let (waited, is_noticed) = self.record(message, attempt, Instant::now());
        if is_noticed {
            let (name, timeout) = (&self.name, self.timeout().as_secs());
            tracing::warn!(
                "{name}: gave nothing for {} s: {message}; reads fail after {timeout} s, and work again when it is back",
                waited.as_secs()
            );
        }
        waited
    }

    /// Records a failure. Returns the length of the outage, and whether to log it now.
    fn record(&self, message: &str, attempt: Duration, now: Instant) -> (Duration, bool) {
        let mut outage = lock(&self.outage);
        let is_same = |outage: &Outage| now.duration_since(outage.failed_at) < self.timeout;
        let (since, was_logged) = match outage.take().filter(is_same) {
            Some(before) => (before.since, before.is_logged),
            None if self.has_answered.load(Relaxed) => (now, false),
            // A server that has never answered is away since the first attempt began.
            None => (now.checked_sub(attempt).unwrap_or(now), false),
        };
        let waited = now.duration_since(since);
        let is_logged = was_logged || waited >= MIN_LOGGED_INTERVAL.min(self.timeout / 2);
        let message = message.to_owned();
        *outage = Some(Outage { since, failed_at: now, attempt, message, is_logged });
        self.is_away.store(true, Relaxed);
        (waited, is_logged && !was_logged)
    }

    /// Fails a request if another has just found out that the server is away.
    pub fn check(&self, timeout: Duration) -> Result<(), StoreFailure> {
        if !self.is_away.load(Relaxed) {
            return Ok(());
        }
        match self.shared_failure(timeout, Instant::now()) {
            None => Ok(()),
            Some((waited, last)) => Err(StoreFailure::Permanent(self.error(waited, last))),
        }
    }

    /// The error of a read that has waited long enough. `last` says how its last attempt failed.
    pub fn error(&self, waited: Duration, last: String) -> RemoteError {
        RemoteError::Outage { waited, last, has_answered: self.has_answered.load(Relaxed) }
    }

    fn shared_failure(&self, timeout: Duration, now: Instant) -> Option<(Duration, String)> {
        let outage = lock(&self.outage).clone()?;
        let waited = now.duration_since(outage.since);
        let is_shared =
            now.duration_since(outage.failed_at) < outage.attempt.min(MAX_SHARED_INTERVAL);
        (waited >= timeout && is_shared).then_some((waited, outage.message))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_outage_is_one_for_all_and_is_logged_once() {
        let seconds = Duration::from_secs;
        let watch = OutageWatch::new("s3://bucket".to_owned(), seconds(60));
        let began = Instant::now();
        watch.on_contact();
        let fail = |at| watch.record("refused", seconds(20), began + seconds(at));
        assert_eq!(fail(0), (seconds(0), false));
        assert_eq!(fail(2), (seconds(2), false));
        assert_eq!(fail(4), (seconds(4), true));
        assert_eq!(fail(50), (seconds(50), false));
        assert!(watch.shared_failure(seconds(60), began + seconds(51)).is_none());
        assert_eq!(fail(61), (seconds(61), false));
        let shared = |at| watch.shared_failure(seconds(60), began + seconds(at));
        assert_eq!(shared(62), Some((seconds(62), "refused".to_owned())));
        assert_eq!(shared(64), None);
        watch.on_answer();
        assert_eq!(shared(62), None);
        assert_eq!(fail(70), (seconds(0), false));
        // A failure of long ago says nothing about now.
        assert_eq!(fail(200), (seconds(0), false));
    }

    #[test]
    fn before_the_first_answer_the_first_attempt_counts_and_waits_are_short() {
        let seconds = Duration::from_secs;
        let watch = OutageWatch::new("s3://bucket".to_owned(), seconds(60));
        assert_eq!(watch.timeout(), FIRST_ANSWER_TIMEOUT);
        // A longer outage timeout would not help.
        let names_option = |watch: &OutageWatch| {
            watch.error(seconds(60), "silent".to_owned()).remedy().contains("--outage-timeout")
        };
        assert!(!names_option(&watch));
        assert!(watch.on_failure("silent", FIRST_ANSWER_TIMEOUT) >= FIRST_ANSWER_TIMEOUT);
        // The next request of the same command does not wait again.
        assert!(watch.check(watch.timeout()).is_err());
        watch.on_contact();
        assert!(names_option(&watch));
        assert_eq!(watch.timeout(), seconds(60));
        assert!(watch.check(watch.timeout()).is_ok());
        let watch = OutageWatch::new("s3://bucket".to_owned(), seconds(60));
        watch.on_contact();
        assert!(watch.on_failure("silent", seconds(20)) < seconds(1));
    }

    #[test]
    fn a_request_that_fails_at_once_is_tried_by_each_reader() {
        let watch = OutageWatch::new("s3://bucket".to_owned(), Duration::from_secs(1));
        let began = Instant::now();
        let attempt = Duration::from_millis(1);
        for at in 0..5 {
            watch.record("refused", attempt, began + Duration::from_millis(at * 400));
        }
        let after = began + Duration::from_millis(1602);
        assert!(watch.shared_failure(Duration::from_secs(1), after).is_none());
    }
}
