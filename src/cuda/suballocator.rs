//! Memory for many tensors on a device: large ones have memory of their own, small ones share blocks, because
//! drivers give memory in large steps and slowly.
//!
//! In: lengths, in the order in which the bytes lie in their files. Out: a [`Piece`] for each, which keeps its
//! block.

use std::sync::Arc;

use super::driver::Device;
use super::zero_copy::SharedMemory;
use super::{CudaError, DeviceMemory};

/// From here on a tensor has memory of its own; smaller ones share blocks of no more than [`BLOCK`].
const MIN_OWN_BLOCK_BYTES: usize = 1 << 20;

/// What one small tensor keeps alive at the most.
const MAX_SHARED_BLOCK_BYTES: usize = 4 << 20;

/// Where pieces begin: as kernels expect of memory of a device.
const ALIGNMENT_BYTES: usize = 256;

/// Memory of a device, or, of one that has none of its own, of the host and the device.
#[derive(Debug)]
enum DeviceBlock {
    Device(DeviceMemory),
    Shared(SharedMemory),
}

/// The memory of one tensor on a device.
#[derive(Clone, Debug)]
pub struct DeviceSlice {
    block: Arc<DeviceBlock>,
    start: usize,
    len: usize,
}

impl DeviceSlice {
    /// Its address on the device.
    pub fn address(&self) -> u64 {
        self.start as u64
            + match &*self.block {
                DeviceBlock::Device(memory) => memory.address(),
                DeviceBlock::Shared(memory) => memory.address(),
            }
    }

    /// How many bytes.
    pub fn len(&self) -> usize {
        self.len
    }

    /// Whether there are none.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// Its device.
    pub fn device(&self) -> &Arc<Device> {
        match &*self.block {
            DeviceBlock::Device(memory) => memory.device(),
            DeviceBlock::Shared(memory) => memory.device(),
        }
    }

    /// A copy of its bytes on the host.
    pub fn to_host(&self) -> Result<Vec<u8>, CudaError> {
        match &*self.block {
            DeviceBlock::Device(memory) => memory.copy_part_to_host(self.start, self.len),
            DeviceBlock::Shared(memory) => memory.copy_part_to_host(self.start, self.len),
        }
    }

    /// Where its bytes are on the host, if they are there.
    pub(super) fn host_bytes(&self) -> Option<*mut [u8]> {
        match &*self.block {
            DeviceBlock::Device(_) => None,
            DeviceBlock::Shared(memory) => Some(memory.host_part(self.start, self.len)),
        }
    }
}

impl Device {
    /// Memory of each length.
    pub fn allocate_slices(
        self: &Arc<Self>,
        lengths: &[usize],
    ) -> Result<Vec<DeviceSlice>, CudaError> {
        let mut pieces = Vec::with_capacity(lengths.len());
        let mut rest = lengths;
        while let Some(&first) = rest.first() {
            let count = if first >= MIN_OWN_BLOCK_BYTES { 1 } else { count_in_block(rest) };
            let (here, others) = rest.split_at(count);
            let starts = here.iter().scan(0, |end, len| {
                let start = *end;
                *end += len.next_multiple_of(ALIGNMENT_BYTES);
                Some(start)
            });
            let starts: Vec<usize> = starts.collect();
            let size = starts.last().zip(here.last()).map_or(0, |(start, len)| start + len);
            let block = Arc::new(match self.is_integrated() && size > 0 {
                true => DeviceBlock::Shared(self.allocate_shared(size)?),
                false => DeviceBlock::Device(self.allocate(size)?),
            });
            let made = starts.into_iter().zip(here);
            pieces.extend(made.map(|(start, &len)| DeviceSlice {
                block: Arc::clone(&block),
                start,
                len,
            }));
            rest = others;
        }
        Ok(pieces)
    }
}

/// How many of the first lengths share a block.
fn count_in_block(lengths: &[usize]) -> usize {
    let mut size = 0;
    let fits = |len: &&usize| {
        size += len.next_multiple_of(ALIGNMENT_BYTES);
        **len < MIN_OWN_BLOCK_BYTES && size <= MAX_SHARED_BLOCK_BYTES
    };
    lengths.iter().take_while(fits).count().max(1)
}
