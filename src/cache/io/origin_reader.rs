//! Reads one origin of an open virtual file on the threads of its device.

use std::ops::Range;
use std::sync::Arc;

use crate::checkpoint::OriginId;
use crate::source::{
    ActiveRead, FileReader, PageCacheGuard, PreferredRequests, SourceError, Storage,
};
use crate::virtual_file::VirtualFileReader;

use super::executor::{DeviceKind, ExecutorSet, IoExecutor};

/// Reads one origin: a file, memory, or a tensor that deltas change.
pub struct OriginReader {
    pub id: OriginId,
    /// Whether calls to its filesystem never wait for another program or machine. Those of a patched tensor
    /// may: other threads wait for the one that decodes it.
    pub is_local: bool,
    pub executor: Arc<IoExecutor>,
    /// The file, if it is one.
    pub file: Option<(FileReader, PageCacheGuard)>,
}

impl OriginReader {
    pub fn new(
        id: OriginId,
        reader: &VirtualFileReader,
        executors: &ExecutorSet,
        memory_limit: u64,
    ) -> OriginReader {
        let origins = reader.origins();
        let is_patched = origins.is_patched(id);
        // A patched tensor is read on the threads of its first file.
        let first_file = origins.read_origins(id).find_map(|origin| origins.file(origin));
        let file = reader.file(id).map(|file| {
            let file = FileReader::new(file);
            let guard = file.guard_reads();
            (file, guard)
        });
        let device = first_file.map(|file| file.file().identity().dev);
        let is_disk = first_file.is_none_or(|file| FileReader::new(file).is_local());
        let kind = match first_file.map(|file| file.storage()) {
            Some(Storage::Store(preferred)) => DeviceKind::store(preferred.max_count, memory_limit),
            Some(Storage::Filesystem) if !is_disk => DeviceKind::Network,
            Some(Storage::Filesystem | Storage::DiskCache) | None => DeviceKind::Disk,
        };
        let executor = executors.for_device(device, kind);
        OriginReader { id, is_local: is_disk && !is_patched, executor, file }
    }

    pub fn preferred_requests(&self) -> Option<PreferredRequests> {
        self.file.as_ref()?.0.preferred_requests()
    }

    /// Fills `out` through the page cache, and evicts what that brought in.
    pub fn read_through(
        &self,
        reader: &VirtualFileReader,
        out: &mut [u8],
        offset: u64,
    ) -> Result<(), SourceError> {
        let Some((file, guard)) = &self.file else {
            return reader.origins().origin(self.id).read_exact_at(out, offset);
        };
        let range = offset..offset + out.len() as u64;
        guard.read_through(file.open_file(), &range, || file.read_without_readahead(out, offset))
    }

    /// To be called before reads through the page cache that return to the same pages, and held until they are over.
    /// The pages are evicted when the file is closed.
    pub fn retain_pages(&self, range: &Range<u64>) -> Option<ActiveRead<'_>> {
        let (file, guard) = self.file.as_ref()?;
        Some(guard.retain(file.open_file(), range))
    }
}
