//! What a load did.

use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use super::Route;
use super::read::Tally;

/// What a load did: how much, how fast, and how each byte was had.
#[derive(Clone, Debug, Default, PartialEq, serde::Serialize)]
#[non_exhaustive]
pub struct Report {
    /// Tensors, or parts of them.
    pub tensors: usize,
    /// Their bytes.
    pub bytes: u64,
    /// How long it took.
    pub seconds: f64,
    /// Bytes copied out of the page cache.
    pub cached: u64,
    /// Bytes read past it.
    pub direct: u64,
    /// Bytes read through it.
    pub buffered: u64,
    /// Bytes put together from pieces, or turned round.
    pub gathered: u64,
    /// Bytes that were in memory already.
    pub memory: u64,
    /// Why the bytes did not come straight from the sources, if they did not.
    pub fallback: Option<String>,
}

impl Report {
    pub(super) fn new(
        tensors: usize,
        bytes: u64,
        time: Duration,
        tally: &Tally,
        route: &Route,
    ) -> Report {
        let of = |count: &AtomicU64| count.load(Ordering::Relaxed);
        Report {
            tensors,
            bytes,
            seconds: time.as_secs_f64(),
            cached: of(&tally.cached),
            direct: of(&tally.direct),
            buffered: of(&tally.buffered),
            gathered: of(&tally.gathered),
            memory: of(&tally.memory),
            fallback: match route {
                Route::Through { why, .. } => Some(why.clone()),
                Route::Plain | Route::Direct { .. } => None,
            },
        }
    }

    /// Adds what another load did.
    pub(super) fn add(&mut self, other: &Report) {
        self.tensors += other.tensors;
        self.bytes += other.bytes;
        self.seconds += other.seconds;
        self.cached += other.cached;
        self.direct += other.direct;
        self.buffered += other.buffered;
        self.gathered += other.gathered;
        self.memory += other.memory;
        self.fallback = self.fallback.take().or_else(|| other.fallback.clone());
    }
}
