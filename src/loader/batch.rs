//! Loads from several checkpoints at once: one plan, one set of threads, one bound of memory.
//!
//! In: tensors, or parts of them, each with the [`Opened`] that has it, and memory. Out: a [`Report`]. What
//! an `Opened` loads by itself goes the same way. Threads and memory are those with which the first was opened.

use std::collections::HashMap;
use std::sync::atomic::AtomicBool;
use std::time::Instant;

use crate::checkpoint::Tensor;

use super::execute::{LoadContext, LoadSource, MAX_EXTENT_BYTES, execute};
use super::plan::{PlanItem, SplitPolicy, Target, plan_jobs};
use super::sink::Sink;
use super::{LoadError, LoadReport, OpenCheckpoint, TensorBuffer};

/// Bytes that nobody wants and that are read all the same: a disk reads as many in the time that it
/// takes to be asked once more.
const MAX_GAP_BYTES: u64 = 64 << 10;

/// A tensor, or a part of one, and where it belongs.
#[derive(Debug)]
pub struct LoadRequest<'a> {
    /// The checkpoint that has it.
    pub checkpoint: &'a OpenCheckpoint,
    /// It.
    pub tensor: &'a Tensor,
    /// Memory of exactly its length.
    pub target: &'a mut [u8],
}

/// Loads tensors of any number of checkpoints, one checkpoint after the other and each in the order in which
/// its bytes lie, until it is done or whoever wants it sets `stop`; on so many threads at the most if they
/// are said. After an error what is there is of no worth.
///
/// ```no_run
/// # fn main() -> Result<(), Box<dyn std::error::Error>> {
/// use ckptfs::loader::{Memory, Wanted, load_many};
///
/// let parts = ["pipeline/unet", "pipeline/vae"].map(|path| ckptfs::open(path.as_ref()));
/// let parts = parts.into_iter().collect::<Result<Vec<_>, _>>()?;
/// let all = || parts.iter().flat_map(|of| of.tensors().iter().map(move |tensor| (of, tensor)));
/// let mut memory: Vec<Vec<u8>> = all().map(|(_, t)| vec![0; t.bytes.len() as usize]).collect();
/// let wanted = all().zip(&mut memory).map(|((of, tensor), target)| Wanted { of, tensor, target });
/// let report = load_many(wanted, &false.into(), None)?;
/// # Ok(())
/// # }
/// ```
pub fn load_many<'a>(
    wanted: impl IntoIterator<Item = LoadRequest<'a>>,
    stop: &AtomicBool,
    threads: Option<usize>,
) -> Result<LoadReport, LoadError> {
    let mut wanted = wanted.into_iter().peekable();
    let Some(LoadRequest { checkpoint: of, .. }) = wanted.peek() else {
        return Ok(LoadReport::default());
    };
    let stage = of.buffers();
    let wanted = wanted.map(|LoadRequest { checkpoint: of, tensor, target }| (of, tensor, target));
    load_with_sink(wanted, stage, stop, threads)
}

/// The same, by way of a stage that knows where the targets are.
pub fn load_with_sink<'a, T: Target + Send>(
    wanted: impl IntoIterator<Item = (&'a OpenCheckpoint, &'a Tensor, T)>,
    stage: &impl Sink<T>,
    stop: &AtomicBool,
    threads: Option<usize>,
) -> Result<LoadReport, LoadError> {
    let begun = Instant::now();
    let (mut places, mut all) = (HashMap::new(), Vec::new());
    let mut wants = Vec::new();
    let (mut bytes, mut tensors) = (0, Vec::new());
    for (of, tensor, target) in wanted {
        let (needs, given) = (tensor.bytes.len(), target.len());
        if needs != given {
            let (path, name) = (of.path().to_path_buf(), tensor.name.to_string());
            return Err(LoadError::TargetLength { path, name, needs, given });
        }
        let place = *places.entry(std::ptr::from_ref(of)).or_insert_with(|| {
            all.push(of);
            tensors.push(0);
            all.len() - 1
        });
        bytes += needs;
        tensors[place] += 1;
        wants.push(PlanItem { checkpoint: place, bytes: &tensor.bytes, target });
    }
    let Some(first) = all.first() else { return Ok(LoadReport::default()) };
    let with =
        LoadContext { concurrency: first.concurrency().with_threads(threads), sink: stage, stop };
    let from: Vec<LoadSource<'_>> = all.iter().map(|opened| opened.load_source()).collect();
    execute(
        &from,
        plan_jobs(
            wants,
            SplitPolicy { boundary_bytes: MAX_EXTENT_BYTES, max_gap_bytes: MAX_GAP_BYTES },
        ),
        &with,
    )?;
    let mut report =
        LoadReport { bytes, seconds: begun.elapsed().as_secs_f64(), ..LoadReport::default() };
    for ((opened, from), tensors) in all.iter().zip(from).zip(tensors) {
        report.add_checkpoint(tensors, &from.tally, opened.route());
    }
    Ok(report)
}

/// The same, each into memory of its own.
pub fn load_many_owned(
    tensors: &[(&OpenCheckpoint, &Tensor)],
    stop: &AtomicBool,
    threads: Option<usize>,
) -> Result<(Vec<TensorBuffer>, LoadReport), LoadError> {
    let memory = tensors.iter().map(|(of, tensor)| of.allocate(tensor));
    let mut memory = memory.collect::<Result<Vec<_>, _>>()?;
    let targets = tensors.iter().zip(memory.iter_mut().map(|memory| &mut memory[..]));
    let wanted =
        targets.map(|(&(of, tensor), target)| LoadRequest { checkpoint: of, tensor, target });
    let report = load_many(wanted, stop, threads)?;
    Ok((memory, report))
}
