//! Memory for many tensors on a device. Large tensors have memory of their own, small ones share blocks: drivers
//! allocate in large steps, and slowly.

use std::sync::Arc;

use super::driver::Device;
use super::error::CudaError;
use super::memory::DeviceMemory;
use super::zero_copy::SharedMemory;

/// A tensor of this size has memory of its own; smaller ones share blocks.
const MIN_OWN_BLOCK_BYTES: usize = 1 << 20;

/// The size of a shared block: one small tensor keeps no more than this alive.
const MAX_SHARED_BLOCK_BYTES: usize = 4 << 20;

/// The alignment of tensors, which kernels expect of device memory.
const ALIGNMENT_BYTES: usize = 256;

/// Memory of a device, or of the host for a device that has none.
#[derive(Debug)]
enum DeviceBlock {
    Device(DeviceMemory),
    Shared(SharedMemory),
}

/// The memory of one tensor on a device. It keeps its block alive.
#[derive(Clone, Debug)]
pub struct DeviceSlice {
    block: Arc<DeviceBlock>,
    start: usize,
    len: usize,
}

impl DeviceSlice {
    /// Allocates memory for tensors of these lengths, in the order of their files.
    pub fn allocate(
        device: &Arc<Device>,
        lengths: &[usize],
    ) -> Result<Vec<DeviceSlice>, CudaError> {
        let mut slices = Vec::with_capacity(lengths.len());
        let mut rest = lengths;
        while let Some(&first) = rest.first() {
            let count = if first >= MIN_OWN_BLOCK_BYTES { 1 } else { count_in_block(rest) };
            let (in_block, others) = rest.split_at(count);
            let starts = in_block.iter().scan(0, |end, len| {
                let start = *end;
                *end += len.next_multiple_of(ALIGNMENT_BYTES);
                Some(start)
            });
            let starts: Vec<usize> = starts.collect();
            let size = starts.last().zip(in_block.last()).map_or(0, |(start, len)| start + len);
            let block = Arc::new(match device.is_integrated() && size > 0 {
                true => DeviceBlock::Shared(SharedMemory::allocate(device, size)?),
                false => DeviceBlock::Device(DeviceMemory::allocate(device, size)?),
            });
            slices.extend(starts.into_iter().zip(in_block).map(|(start, &len)| DeviceSlice {
                block: Arc::clone(&block),
                start,
                len,
            }));
            rest = others;
        }
        Ok(slices)
    }

    /// The address on the device.
    pub fn address(&self) -> u64 {
        self.start as u64
            + match &*self.block {
                DeviceBlock::Device(memory) => memory.address(),
                DeviceBlock::Shared(memory) => memory.address(),
            }
    }

    /// The number of bytes.
    pub fn len(&self) -> usize {
        self.len
    }

    /// Whether there are no bytes.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// The device of the memory.
    pub fn device(&self) -> &Arc<Device> {
        match &*self.block {
            DeviceBlock::Device(memory) => memory.device(),
            DeviceBlock::Shared(memory) => memory.device(),
        }
    }

    /// Copies the bytes to the host.
    pub fn to_host(&self) -> Result<Vec<u8>, CudaError> {
        match &*self.block {
            DeviceBlock::Device(memory) => memory.copy_part_to_host(self.start, self.len),
            DeviceBlock::Shared(memory) => memory.copy_part_to_host(self.start, self.len),
        }
    }

    /// The bytes on the host, if the device uses the host's memory.
    pub(super) fn host_bytes(&self) -> Option<*mut [u8]> {
        match &*self.block {
            DeviceBlock::Device(_) => None,
            DeviceBlock::Shared(memory) => Some(memory.host_part(self.start, self.len)),
        }
    }
}

/// The number of tensors, from the first on, that share a block.
fn count_in_block(lengths: &[usize]) -> usize {
    let mut size = 0;
    let fits = |len: &&usize| {
        size += len.next_multiple_of(ALIGNMENT_BYTES);
        **len < MIN_OWN_BLOCK_BYTES && size <= MAX_SHARED_BLOCK_BYTES
    };
    lengths.iter().take_while(fits).count().max(1)
}
