//! The ranges of sources that a fetch needs: those that a load of everything reads.

use crate::checkpoint::{ByteRun, TensorBytes};
use crate::loader::{LoadExtent, LoadJob, PlanItem, SplitPolicy, Target, plan_jobs};
use crate::virtual_file::{SegmentSource, VirtualFileReader};

/// A number of bytes, which are kept and go nowhere.
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
pub fn plan_extents(readers: &[VirtualFileReader]) -> Vec<LoadExtent<ByteCount>> {
    let numbered = readers.iter().enumerate();
    let runs: Vec<(usize, TensorBytes)> =
        numbered.flat_map(|(n, reader)| runs_of(reader).map(move |run| (n, run))).collect();
    let items = runs.iter().map(|(checkpoint, bytes)| {
        let target = ByteCount(bytes.len());
        PlanItem { checkpoint: *checkpoint, bytes, target }
    });
    let extent = |job| match job {
        LoadJob::Extent(extent) => Some(extent),
        // Only of bytes that are no run.
        LoadJob::Strided { .. } => None,
    };
    plan_jobs(items.collect(), SplitPolicy::REMOTE).into_iter().filter_map(extent).collect()
}

/// The runs of files that the bytes of a virtual file are made of. A strided tensor has the run from its first byte to
/// its last.
fn runs_of(reader: &VirtualFileReader) -> impl Iterator<Item = TensorBytes> {
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
    // Bytes in memory come from a file that was read whole.
    runs.filter(|run| reader.file(run.origin).is_some()).map(TensorBytes::Run)
}
