//! Memory for many tensors on a device: large ones have memory of their own, small ones share blocks, because
//! drivers give memory in large steps and slowly.
//!
//! In: lengths, in the order in which the bytes lie in their files. Out: a [`Piece`] for each, which keeps its
//! block.

use std::sync::Arc;

use super::driver::Device;
use super::zero_copy::Shared;
use super::{Error, Memory};

/// From here on a tensor has memory of its own; smaller ones share blocks of no more than [`BLOCK`].
const LARGE: usize = 1 << 20;

/// What one small tensor keeps alive at the most.
const BLOCK: usize = 4 << 20;

/// Where pieces begin: as kernels expect of memory of a device.
const ALIGNMENT: usize = 256;

/// Memory of a device, or, of one that has none of its own, of the host and the device.
#[derive(Debug)]
enum Block {
    There(Memory),
    Shared(Shared),
}

/// The memory of one tensor on a device.
#[derive(Clone, Debug)]
pub struct Piece {
    block: Arc<Block>,
    start: usize,
    len: usize,
}

impl Piece {
    /// Its address on the device.
    pub fn at(&self) -> u64 {
        self.start as u64
            + match &*self.block {
                Block::There(memory) => memory.at(),
                Block::Shared(memory) => memory.at(),
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
            Block::There(memory) => memory.device(),
            Block::Shared(memory) => memory.device(),
        }
    }

    /// A copy of its bytes on the host.
    pub fn to_host(&self) -> Result<Vec<u8>, Error> {
        match &*self.block {
            Block::There(memory) => memory.to_host_from(self.start, self.len),
            Block::Shared(memory) => memory.copied(self.start, self.len),
        }
    }

    /// Where its bytes are on the host, if they are there.
    pub(super) fn here(&self) -> Option<*mut [u8]> {
        match &*self.block {
            Block::There(_) => None,
            Block::Shared(memory) => Some(memory.part(self.start, self.len)),
        }
    }
}

impl Device {
    /// Memory of each length.
    pub fn pieces(self: &Arc<Self>, lengths: &[usize]) -> Result<Vec<Piece>, Error> {
        let mut pieces = Vec::with_capacity(lengths.len());
        let mut rest = lengths;
        while let Some(&first) = rest.first() {
            let count = if first >= LARGE { 1 } else { together(rest) };
            let (here, others) = rest.split_at(count);
            let starts = here.iter().scan(0, |end, len| {
                let start = *end;
                *end += len.next_multiple_of(ALIGNMENT);
                Some(start)
            });
            let starts: Vec<usize> = starts.collect();
            let size = starts.last().zip(here.last()).map_or(0, |(start, len)| start + len);
            let block = Arc::new(match self.is_integrated() && size > 0 {
                true => Block::Shared(self.shared(size)?),
                false => Block::There(self.memory(size)?),
            });
            let made = starts.into_iter().zip(here);
            pieces.extend(made.map(|(start, &len)| Piece {
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
fn together(lengths: &[usize]) -> usize {
    let mut size = 0;
    let fits = |len: &&usize| {
        size += len.next_multiple_of(ALIGNMENT);
        **len < LARGE && size <= BLOCK
    };
    lengths.iter().take_while(fits).count().max(1)
}
