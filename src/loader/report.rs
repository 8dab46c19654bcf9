//! What a load did.

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicU64, Ordering};

use super::Route;
use super::execute::ByteTally;

/// What a load did: how much, how fast, and how each byte was had.
#[derive(Clone, Debug, Default, PartialEq, serde::Serialize)]
#[non_exhaustive]
pub struct LoadReport {
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
    /// Bytes that storage wrote to a device by itself.
    pub gpudirect: u64,
    /// Bytes read through it.
    pub buffered: u64,
    /// Bytes put together from pieces, or turned round.
    pub gathered: u64,
    /// Bytes that were in memory already.
    pub memory: u64,
    /// Why bytes did not come straight from the sources, and of how many tensors.
    pub fallbacks: BTreeMap<String, usize>,
    /// Why bytes that were to be read to a device came by way of the host's memory: the first reason.
    pub without_gpudirect: Option<String>,
}

impl LoadReport {
    /// Adds so many tensors of one checkpoint.
    pub(super) fn add_checkpoint(&mut self, tensors: usize, tally: &ByteTally, route: &Route) {
        let of = |count: &AtomicU64| count.load(Ordering::Relaxed);
        self.tensors += tensors;
        self.cached += of(&tally.cached);
        self.direct += of(&tally.direct);
        self.gpudirect += of(&tally.gpudirect);
        self.buffered += of(&tally.buffered);
        self.gathered += of(&tally.gathered);
        self.memory += of(&tally.memory);
        if let Route::ThroughMount { reason: why } = route {
            *self.fallbacks.entry(why.clone()).or_default() += tensors;
        }
    }

    /// Adds what another load did.
    pub(super) fn merge(&mut self, other: &LoadReport) {
        self.tensors += other.tensors;
        self.bytes += other.bytes;
        self.seconds += other.seconds;
        self.cached += other.cached;
        self.direct += other.direct;
        self.gpudirect += other.gpudirect;
        self.buffered += other.buffered;
        self.gathered += other.gathered;
        self.memory += other.memory;
        for (why, tensors) in &other.fallbacks {
            *self.fallbacks.entry(why.clone()).or_default() += tensors;
        }
        if self.without_gpudirect.is_none() {
            self.without_gpudirect.clone_from(&other.without_gpudirect);
        }
    }
}
