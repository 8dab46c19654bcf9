//! The report of a load: how much was loaded, how fast, and how each byte was read.

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicU64, Ordering};

/// How much a load loaded, how fast, and how each byte was read.
#[derive(Clone, Debug, Default, PartialEq, serde::Serialize)]
#[non_exhaustive]
pub struct LoadReport {
    /// The number of tensors, or of slices of tensors.
    pub tensors: usize,
    /// The number of their bytes.
    pub bytes: u64,
    /// The duration of the load.
    pub seconds: f64,
    /// Bytes copied out of the page cache.
    pub cached: u64,
    /// Bytes read past the page cache.
    pub direct: u64,
    /// Bytes that storage wrote to a device by itself.
    pub gpudirect: u64,
    /// Bytes read through the page cache.
    pub buffered: u64,
    /// Bytes that are strided or byte-swapped in their files.
    pub gathered: u64,
    /// Bytes that were in memory already.
    pub memory: u64,
    /// Why bytes were not read from the sources themselves, and of how many tensors.
    pub fallbacks: BTreeMap<String, usize>,
    /// The first reason why bytes for a device went through the host's memory although GPUDirect was asked for.
    pub without_gpudirect: Option<String>,
}

/// Bytes by how they were read.
#[derive(Debug, Default)]
pub struct ByteTally {
    pub cached: AtomicU64,
    pub direct: AtomicU64,
    pub gpudirect: AtomicU64,
    pub buffered: AtomicU64,
    pub gathered: AtomicU64,
    pub memory: AtomicU64,
}

impl LoadReport {
    /// Adds so many tensors of one checkpoint. `fallback` is why they were read through a mount.
    pub fn add_checkpoint(&mut self, tensors: usize, tally: &ByteTally, fallback: Option<&str>) {
        let ByteTally { cached, direct, gpudirect, buffered, gathered, memory } = tally;
        let read = |count: &AtomicU64| count.load(Ordering::Relaxed);
        self.tensors += tensors;
        self.cached += read(cached);
        self.direct += read(direct);
        self.gpudirect += read(gpudirect);
        self.buffered += read(buffered);
        self.gathered += read(gathered);
        self.memory += read(memory);
        if let Some(reason) = fallback {
            *self.fallbacks.entry(reason.to_owned()).or_default() += tensors;
        }
    }

    /// Adds what another load did.
    pub fn merge(&mut self, other: &LoadReport) {
        let LoadReport {
            tensors,
            bytes,
            seconds,
            cached,
            direct,
            gpudirect,
            buffered,
            gathered,
            memory,
            fallbacks,
            without_gpudirect,
        } = other;
        self.tensors += tensors;
        self.bytes += bytes;
        self.seconds += seconds;
        self.cached += cached;
        self.direct += direct;
        self.gpudirect += gpudirect;
        self.buffered += buffered;
        self.gathered += gathered;
        self.memory += memory;
        for (reason, tensors) in fallbacks {
            *self.fallbacks.entry(reason.clone()).or_default() += tensors;
        }
        if self.without_gpudirect.is_none() {
            self.without_gpudirect.clone_from(without_gpudirect);
        }
    }
}
