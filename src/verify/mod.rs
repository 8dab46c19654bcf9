//! Reads a whole virtual file, and compares two.
//!
//! In: opened virtual files ([`Reader`]). Out: that every byte could be read, or how they differ:
//! tensor by tensor, whatever the formats and the order of the two.

use std::collections::HashMap;
use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};

use crate::checkpoint::Tensor;
use crate::threads::{join, try_spawn};
use crate::virtual_file::{VirtualFileError, VirtualFileReader};

/// Bytes read at a time by each reader.
const CHUNK_BYTES: u64 = 4 << 20;

/// Readers at once: enough to keep a disk busy from one process, and few enough for two cores.
const MAX_READER_THREADS: usize = 4;

/// One way in which two checkpoints differ.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Difference {
    /// In the first only.
    #[error("`{tensor}` is only in the first")]
    OnlyFirst {
        /// The tensor.
        tensor: String,
    },
    /// In the second only.
    #[error("`{tensor}` is only in the second")]
    OnlySecond {
        /// The tensor.
        tensor: String,
    },
    /// Another element type or shape.
    #[error("`{tensor}` is {first} in the first and {second} in the second")]
    Type {
        /// The tensor.
        tensor: String,
        /// Type and shape in the first.
        first: String,
        /// Type and shape in the second.
        second: String,
    },
    /// Other values.
    #[error("`{tensor}` differs in its values, first in element {element}")]
    Values {
        /// The tensor.
        tensor: String,
        /// The first element that differs, counted in C order.
        element: u64,
    },
}

/// What the reader tells, and asks, while it works.
pub trait VerifyProgress: Sync {
    /// So many more bytes are read.
    fn add_bytes(&self, bytes: u64);
    /// Whether to give up.
    fn should_stop(&self) -> bool;
}

/// Reads every byte. False if told to stop.
pub fn read_all(
    reader: &VirtualFileReader,
    progress: &dyn VerifyProgress,
) -> Result<bool, VirtualFileError> {
    let size = reader.virtual_file().size();
    let steps = size.div_ceil(CHUNK_BYTES) as usize;
    in_parallel(
        steps,
        progress,
        || vec![0; CHUNK_BYTES.min(size) as usize],
        |buffer, step| {
            let read = reader.read_at(buffer, step as u64 * CHUNK_BYTES)?;
            progress.add_bytes(read as u64);
            Ok(())
        },
    )
}

/// Compares by name, type, shape and bytes. The differences are in the order of the names;
/// `None` if told to stop.
pub fn compare(
    first: &VirtualFileReader,
    second: &VirtualFileReader,
    progress: &dyn VerifyProgress,
) -> Result<Option<Vec<Difference>>, VirtualFileError> {
    let mut differences = Vec::new();
    let others: HashMap<&str, usize> = second
        .virtual_file()
        .tensors()
        .iter()
        .enumerate()
        .map(|(place, tensor)| (&*tensor.name, place))
        .collect();
    let mut pairs = Vec::new();
    for (place, tensor) in first.virtual_file().tensors().iter().enumerate() {
        let name = || tensor.name.to_string();
        match others
            .get(&*tensor.name)
            .map(|&other| (other, &second.virtual_file().tensors()[other]))
        {
            None => differences.push(Difference::OnlyFirst { tensor: name() }),
            Some((_, other)) if (other.dtype, &other.shape) != (tensor.dtype, &tensor.shape) => {
                differences.push(Difference::Type {
                    tensor: name(),
                    first: type_and_shape(tensor),
                    second: type_and_shape(other),
                });
            }
            Some((other, _)) => pairs.push((place, other)),
        }
    }
    let names: std::collections::HashSet<&str> =
        first.virtual_file().tensors().iter().map(|t| &*t.name).collect();
    let only_second = second.virtual_file().tensors().iter().filter(|t| !names.contains(&*t.name));
    differences.extend(only_second.map(|t| Difference::OnlySecond { tensor: t.name.to_string() }));

    // Large tensors are compared in parts, so that one of them does not leave the readers idle.
    let parts: Vec<(usize, usize, u64)> = pairs
        .iter()
        .flat_map(|&(place, other)| {
            let len = first.virtual_file().tensors()[place].bytes.len();
            (0..len).step_by(CHUNK_BYTES as usize).map(move |from| (place, other, from))
        })
        .collect();
    // The first byte that differs, by tensor.
    let differing: Mutex<HashMap<usize, u64>> = Mutex::default();
    let buffers = || (vec![0; CHUNK_BYTES as usize], vec![0; CHUNK_BYTES as usize]);
    let done = in_parallel(parts.len(), progress, buffers, |(a, b), n| {
        let (place, other, from) = parts[n];
        let (range, other) =
            (first.virtual_file().tensor_range(place), second.virtual_file().tensor_range(other));
        let len = (range.end - range.start - from).min(CHUNK_BYTES) as usize;
        first.read_at(&mut a[..len], range.start + from)?;
        second.read_at(&mut b[..len], other.start + from)?;
        progress.add_bytes(len as u64);
        if a[..len] != b[..len] {
            let at = from + a.iter().zip(b.iter()).take_while(|(a, b)| a == b).count() as u64;
            let mut differing = differing.lock().unwrap_or_else(|poisoned| poisoned.into_inner());
            differing.entry(place).and_modify(|before| *before = at.min(*before)).or_insert(at);
        }
        Ok(())
    })?;
    if !done {
        return Ok(None);
    }
    let differing = differing.into_inner().unwrap_or_else(|poisoned| poisoned.into_inner());
    differences.extend(differing.into_iter().map(|(place, byte)| {
        let tensor = &first.virtual_file().tensors()[place];
        let element = byte * 8 / u64::from(tensor.dtype.bits());
        Difference::Values { tensor: tensor.name.to_string(), element }
    }));
    differences.sort_by(|a, b| a.tensor().cmp(b.tensor()));
    Ok(Some(differences))
}

impl Difference {
    /// The tensor that differs.
    pub fn tensor(&self) -> &str {
        match self {
            Difference::OnlyFirst { tensor }
            | Difference::OnlySecond { tensor }
            | Difference::Type { tensor, .. }
            | Difference::Values { tensor, .. } => tensor,
        }
    }
}

fn type_and_shape(tensor: &Tensor) -> String {
    format!("{} {:?}", tensor.dtype, tensor.shape)
}

/// Does `steps` pieces of work on a few threads, each with a buffer of its own, until all are done
/// (true), one fails, or the caller wants to stop (false).
fn in_parallel<B>(
    steps: usize,
    progress: &dyn VerifyProgress,
    buffer: impl Fn() -> B + Sync,
    work: impl Fn(&mut B, usize) -> Result<(), VirtualFileError> + Sync,
) -> Result<bool, VirtualFileError> {
    let next = AtomicUsize::new(0);
    let over = AtomicBool::new(false);
    let one = || {
        let mut buffer = buffer();
        while !over.load(Ordering::Relaxed) && !progress.should_stop() {
            let step = next.fetch_add(1, Ordering::Relaxed);
            if step >= steps {
                return Ok(true);
            }
            work(&mut buffer, step).inspect_err(|_| over.store(true, Ordering::Relaxed))?;
        }
        Ok(false)
    };
    std::thread::scope(|scope| {
        let others: Vec<_> =
            (1..MAX_READER_THREADS.min(steps)).map_while(|_| try_spawn(scope, one)).collect();
        let mut answers = vec![one()];
        answers.extend(others.into_iter().map(join));
        // Each that returned true saw the end of the work; an error of any is the answer.
        Ok(answers
            .into_iter()
            .collect::<Result<Vec<bool>, VirtualFileError>>()?
            .into_iter()
            .all(|done| done))
    })
}
