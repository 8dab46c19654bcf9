//! Retries of failed requests: with growing pauses, until the server was silent for too long.

use std::sync::Arc;
use std::time::{Duration, Instant};

use crate::source::request_counters::count_retry;

use super::failure::StoreFailure;
use super::outage::OutageWatch;

/// The first pause. Each further one is twice as long.
const FIRST_RETRY_INTERVAL: Duration = Duration::from_millis(100);

/// The longest pause: a server that is back is noticed within it.
const MAX_RETRY_INTERVAL: Duration = Duration::from_secs(5);

/// The retries of one read.
pub struct RetryBudget {
    outage: Arc<OutageWatch>,
    /// A shorter time than the outage timeout, if this read has one.
    timeout: Option<Duration>,
    last_progress: Instant,
    attempt_start: Instant,
    pause: Duration,
}

impl RetryBudget {
    /// A budget that ends when neither this read nor any other of the store received bytes for the outage timeout, or for
    /// a shorter time.
    pub fn new(
        outage: Arc<OutageWatch>,
        timeout: Option<Duration>,
    ) -> Result<RetryBudget, StoreFailure> {
        let now = Instant::now();
        let (last_progress, attempt_start, pause) = (now, now, FIRST_RETRY_INTERVAL);
        let budget = RetryBudget { outage, timeout, last_progress, attempt_start, pause };
        budget.outage.check(budget.timeout())?;
        Ok(budget)
    }

    fn timeout(&self) -> Duration {
        let allowed = self.outage.timeout();
        self.timeout.map_or(allowed, |timeout| timeout.min(allowed))
    }

    /// Records that bytes came.
    pub fn on_progress(&mut self) {
        self.last_progress = Instant::now();
        self.pause = FIRST_RETRY_INTERVAL;
    }

    /// Waits before the next attempt. The error ends the retries.
    pub async fn wait_after(&mut self, failure: StoreFailure) -> Result<(), StoreFailure> {
        let StoreFailure::Transient { message, retry_after } = failure else {
            return Err(failure);
        };
        let store_outage = self.outage.on_failure(&message, self.attempt_start.elapsed());
        let waited = self.last_progress.elapsed().max(store_outage);
        // A server that asks for more than the rest of the time is asked once more at its end.
        let rest = self.timeout().saturating_sub(waited);
        let pause = match retry_after {
            Some(asked) => asked.min(rest),
            None => with_jitter(self.pause),
        };
        if rest.is_zero() || pause > rest {
            return Err(StoreFailure::Permanent(self.outage.error(waited, message)));
        }
        tracing::debug!(why = message, ?pause, "a request is sent again");
        count_retry();
        tokio::time::sleep(pause).await;
        self.attempt_start = Instant::now();
        self.pause = (self.pause * 2).min(MAX_RETRY_INTERVAL);
        Ok(())
    }
}

/// Between half of a pause and all of it, so that readers that failed together do not return together.
fn with_jitter(pause: Duration) -> Duration {
    let nanos = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH);
    let fraction = nanos.map_or(0, |now| now.subsec_nanos() % 1000);
    pause / 2 + pause / 2 * fraction / 1000
}

#[cfg(test)]
mod tests {
    use super::super::error::RemoteError;
    use super::*;

    #[test]
    fn a_long_wait_that_a_server_asks_for_is_cut_to_the_timeout() {
        let timeout = Duration::from_millis(300);
        let outage = Arc::new(OutageWatch::new("s3://bucket".to_owned(), timeout));
        let mut budget = RetryBudget::new(outage, None).unwrap();
        let busy = || StoreFailure::Transient {
            message: "HTTP 503".to_owned(),
            retry_after: Some(Duration::from_secs(60)),
        };
        let runtime = tokio::runtime::Builder::new_current_thread().enable_time().build().unwrap();
        let began = Instant::now();
        runtime.block_on(budget.wait_after(busy())).unwrap();
        assert!(began.elapsed() >= Duration::from_millis(290));
        let ended = runtime.block_on(budget.wait_after(busy()));
        assert!(matches!(ended, Err(StoreFailure::Permanent(RemoteError::Outage { .. }))));
    }
}
