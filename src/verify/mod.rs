//! Reads a whole virtual file, and compares two of them.
//!
//! Tensors are compared one by one, whatever the formats and the order of the two.

use std::collections::{HashMap, HashSet};
use std::ops::Range;
use std::sync::Mutex;

use crate::checkpoint::Tensor;
use crate::threads::lock;
use crate::virtual_file::{ChunkReader, Progress, VirtualFileError, VirtualFileReader};

/// Bytes read at a time by each thread.
const CHUNK_BYTES: u64 = 4 << 20;

/// Maximum bytes of all windows in memory at once: the larger parts of tensors that are strided in a store.
const MAX_WINDOW_BYTES: u64 = 512 << 20;

/// Threads that read from a disk: enough to keep a disk busy from one process, and few enough for two cores.
const DISK_THREADS: usize = 4;

/// One way in which two checkpoints differ.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Difference {
    /// The tensor is in the first only.
    #[error("`{tensor}` is only in the first")]
    OnlyFirst {
        /// The name of the tensor.
        tensor: String,
    },
    /// The tensor is in the second only.
    #[error("`{tensor}` is only in the second")]
    OnlySecond {
        /// The name of the tensor.
        tensor: String,
    },
    /// The element types or shapes differ.
    #[error("`{tensor}` is {first} in the first and {second} in the second")]
    Type {
        /// The name of the tensor.
        tensor: String,
        /// Type and shape in the first.
        first: String,
        /// Type and shape in the second.
        second: String,
    },
    /// The values differ.
    #[error("`{tensor}` differs in its values, first in element {element}")]
    Values {
        /// The name of the tensor.
        tensor: String,
        /// The first element that differs, counted in C order.
        element: u64,
    },
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

/// Reads every byte. Returns whether it got to the end without being stopped.
pub fn read_all(
    reader: &VirtualFileReader,
    progress: &dyn Progress,
) -> Result<bool, VirtualFileError> {
    let chunk_reader = ChunkReader::new(CHUNK_BYTES, MAX_WINDOW_BYTES);
    let chunks = chunk_reader.chunks(reader);
    let threads = reader.chunk_threads(DISK_THREADS);
    let should_stop = || progress.should_stop();
    chunk_reader.for_each(&chunks, threads, should_stop, |[buffer], chunk| {
        let read = chunk_reader.read(reader, &chunks[chunk], buffer, should_stop)?;
        progress.on_bytes(read.map_or(0, |bytes| bytes.len() as u64));
        Ok(())
    })
}

/// Compares by name, type, shape and bytes. The differences are in the order of the names; `None` if stopped.
pub fn compare(
    first: &VirtualFileReader,
    second: &VirtualFileReader,
    progress: &dyn Progress,
) -> Result<Option<Vec<Difference>>, VirtualFileError> {
    let (first_file, second_file) = (first.virtual_file(), second.virtual_file());
    let (mut differences, pairs) = pair_tensors(first_file.tensors(), second_file.tensors());
    let chunk_reader = ChunkReader::new(CHUNK_BYTES, MAX_WINDOW_BYTES / 2);
    // Large tensors are compared in chunks, so that one of them does not leave the readers idle.
    let (mut compared, mut chunks) = (Vec::new(), Vec::new());
    for (index, other) in pairs {
        let len = first_file.tensors()[index].bytes.len();
        let windows = [(first, index), (second, other)];
        let window = windows.map(|(reader, tensor)| chunk_reader.window_bytes(reader, tensor));
        let chunk_bytes = window.into_iter().max().unwrap_or(CHUNK_BYTES);
        for start in (0..len).step_by(chunk_bytes as usize) {
            compared.push((index, other));
            chunks.push(start..(start + chunk_bytes).min(len));
        }
    }
    // The first bit that differs, by tensor. Elements of less than a byte begin at its low bits.
    let differing: Mutex<HashMap<usize, u64>> = Mutex::default();
    let threads = [first, second].map(|reader| reader.chunk_threads(DISK_THREADS));
    let threads = threads.into_iter().max().unwrap_or(1);
    let should_stop = || progress.should_stop();
    let is_complete = chunk_reader.for_each(&chunks, threads, should_stop, |[a, b], chunk| {
        let (index, other) = compared[chunk];
        let Range { start, end } = chunks[chunk];
        let read = |reader: &VirtualFileReader, tensor, buffer| {
            let at = reader.virtual_file().tensor_range(tensor).start;
            chunk_reader.read(reader, &(at + start..at + end), buffer, should_stop)
        };
        let (Some(a), Some(b)) = (read(first, index, a)?, read(second, other, b)?) else {
            return Ok(());
        };
        progress.on_bytes(end - start);
        if a != b {
            let mut differing_bits = a.iter().zip(b.iter()).map(|(a, b)| a ^ b).enumerate();
            let (byte, bits) = differing_bits.find(|(_, bits)| *bits != 0).unwrap_or_default();
            let bit = (start + byte as u64) * 8 + u64::from(bits.trailing_zeros());
            let mut differing = lock(&differing);
            differing.entry(index).and_modify(|first| *first = bit.min(*first)).or_insert(bit);
        }
        Ok::<_, VirtualFileError>(())
    })?;
    if !is_complete {
        return Ok(None);
    }
    let differing = differing.into_inner().unwrap_or_else(|poisoned| poisoned.into_inner());
    differences.extend(differing.into_iter().map(|(index, bit)| {
        let tensor = &first_file.tensors()[index];
        let element = bit / u64::from(tensor.dtype.bits());
        Difference::Values { tensor: tensor.name.to_string(), element }
    }));
    differences.sort_by(|a, b| a.tensor().cmp(b.tensor()));
    Ok(Some(differences))
}

/// The tensors of equal name, type and shape, by index; and the differences of the others.
fn pair_tensors(first: &[Tensor], second: &[Tensor]) -> (Vec<Difference>, Vec<(usize, usize)>) {
    let (mut differences, mut pairs) = (Vec::new(), Vec::new());
    let others: HashMap<&str, usize> =
        second.iter().enumerate().map(|(index, tensor)| (&*tensor.name, index)).collect();
    for (index, tensor) in first.iter().enumerate() {
        let name = || tensor.name.to_string();
        match others.get(&*tensor.name).map(|&other| (other, &second[other])) {
            None => differences.push(Difference::OnlyFirst { tensor: name() }),
            Some((_, other)) if (other.dtype, &other.shape) != (tensor.dtype, &tensor.shape) => {
                differences.push(Difference::Type {
                    tensor: name(),
                    first: type_and_shape(tensor),
                    second: type_and_shape(other),
                });
            }
            Some((other, _)) => pairs.push((index, other)),
        }
    }
    let names: HashSet<&str> = first.iter().map(|tensor| &*tensor.name).collect();
    let only_second = second.iter().filter(|tensor| !names.contains(&*tensor.name));
    differences.extend(
        only_second.map(|tensor| Difference::OnlySecond { tensor: tensor.name.to_string() }),
    );
    (differences, pairs)
}

fn type_and_shape(tensor: &Tensor) -> String {
    format!("{} {:?}", tensor.dtype, tensor.shape)
}
