//! The ranges of sources that a fetch needs: those that a load of everything reads.

use crate::checkpoint::{ByteRun, TensorBytes};
use crate::virtual_file::{
    PlanItem, ReadExtent, ReadJob, SegmentSource, SplitPolicy, Target, VirtualFileReader, plan_jobs,
};

/// A number of bytes without memory: a fetch only keeps them on disk.
#[derive(Debug)]
pub struct ByteCount(u64);

impl Target for ByteCount {
    fn len(&self) -> u64 {
        self.0
    }

    fn split(self, at: u64) -> (ByteCount, ByteCount) {
        (ByteCount(at), ByteCount(self.0 - at))
    }
}

/// Plans the extents of the files of some readers, in their order. An extent's checkpoint is the index of its reader.
pub fn plan_extents(readers: &[VirtualFileReader]) -> Vec<ReadExtent<ByteCount>> {
    let numbered = readers.iter().enumerate();
    let runs: Vec<(usize, TensorBytes)> =
        numbered.flat_map(|(n, reader)| list_runs(reader).map(move |run| (n, run))).collect();
    let items = runs.iter().map(|(checkpoint, bytes)| {
        let target = ByteCount(bytes.len());
        PlanItem { checkpoint: *checkpoint, bytes, offset: 0, target }
    });
    let extent = |job| match job {
        ReadJob::Extent(extent) => Some(extent),
        // Every item is a run.
        ReadJob::Strided { .. } => None,
    };
    plan_jobs(items.collect(), |_| SplitPolicy::REMOTE).into_iter().filter_map(extent).collect()
}

/// Lists the runs of source files that a virtual file shows. A strided tensor counts as the run from its first byte to
/// its last.
fn list_runs(reader: &VirtualFileReader) -> impl Iterator<Item = TensorBytes> {
    let virtual_file = reader.virtual_file();
    let segments = virtual_file.segments(0..virtual_file.size());
    let runs = segments.flat_map(move |segment| {
        let len = segment.range.end - segment.range.start;
        let (run, tensor) = match segment.bytes {
            SegmentSource::Header(_) => (None, None),
            SegmentSource::Run { origin, offset } => (Some(ByteRun { origin, offset, len }), None),
            SegmentSource::Tensor { index, .. } => (None, Some(&virtual_file.tensors()[index])),
        };
        run.into_iter().chain(tensor.into_iter().flat_map(|tensor| tensor.bytes.extents()))
    });
    let runs = runs.flat_map(move |run| {
        let patched = virtual_file.origins()[run.origin.0 as usize].patched();
        let own = patched.is_none().then_some(run);
        own.into_iter().chain(patched.into_iter().flat_map(|patched| patched.runs()))
    });
    // An origin in memory comes from a file that was read whole.
    runs.filter(|run| reader.file(run.origin).is_some()).map(TensorBytes::Run)
}
