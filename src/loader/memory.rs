//! Memory of tensors: their own, which they are read into, or their file, mapped where they lie.
//!
//! Fresh memory is what an owned load spends most of its time on: the system clears each page when it is first
//! written. So large buffers use huge pages as long as clearing them is fast.
//!
//! Each file is mapped once, whole and privately, when the first of its tensors is asked for. A system allows a
//! process few mappings, and a checkpoint may have more tensors.

use std::fmt;
use std::ops::{Deref, DerefMut};
use std::sync::{Arc, OnceLock};

use memmap2::{MmapMut, MmapRaw};

use crate::checkpoint::{MAX_ELEMENT_BYTES, OpenOrigins, Tensor, TensorBytes};
use crate::huge_pages;
use crate::source::{DIRECT_ALIGNMENT_BYTES, SourceError};
use crate::virtual_file::Target;

/// From this size on memory is mapped, and unmapped when it is dropped. Below, the program's own allocator is
/// faster.
const MIN_MAPPED_BYTES: usize = 256 << 10;

/// The widest vector that a processor works with.
const ALIGNMENT_BYTES: usize = 64;

/// Where the memory of a tensor begins.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum BufferAlignment {
    /// At a multiple of 64 bytes, the widest vector of a processor.
    Vector,
    /// As the tensor does in a page of its file, so that direct reads fill the memory in place. Small tensors, and those
    /// that are not one run at a multiple of 8 bytes, begin as with [`BufferAlignment::Vector`].
    #[default]
    File,
}

/// Zeroed memory of its own, aligned to at least 8 bytes: see [`BufferAlignment`].
pub struct TensorBuffer {
    allocation: Allocation,
    len: usize,
}

enum Allocation {
    /// The second value is the aligned start.
    Heap(Vec<u8>, usize),
    Mapped(MmapMut, usize),
}

impl TensorBuffer {
    /// Allocates memory for a tensor; `None` if the system has not as much.
    pub fn for_tensor(bytes: &TensorBytes, alignment: BufferAlignment) -> Option<TensorBuffer> {
        let required_bytes = match alignment {
            BufferAlignment::Vector => ALIGNMENT_BYTES as u64,
            BufferAlignment::File => MAX_ELEMENT_BYTES,
        };
        let shift = match bytes {
            TensorBytes::Run(run) if run.offset.is_multiple_of(required_bytes) => {
                run.offset % DIRECT_ALIGNMENT_BYTES as u64
            }
            _ => 0,
        };
        TensorBuffer::with_shift(usize::try_from(bytes.len()).ok()?, shift as usize)
    }

    /// Allocates so many bytes, aligned for vectors; `None` if the system has not as many.
    pub fn new(len: usize) -> Option<TensorBuffer> {
        TensorBuffer::with_shift(len, 0)
    }

    /// Allocates so many bytes. Where they are mapped, they begin at `shift` in a page.
    fn with_shift(len: usize, shift: usize) -> Option<TensorBuffer> {
        let allocation = if len < MIN_MAPPED_BYTES {
            let mut vec = Vec::new();
            vec.try_reserve_exact(len + ALIGNMENT_BYTES).ok()?;
            vec.resize(len + ALIGNMENT_BYTES, 0);
            let start = vec.as_ptr().align_offset(ALIGNMENT_BYTES).min(ALIGNMENT_BYTES);
            Allocation::Heap(vec, start)
        } else {
            Allocation::Mapped(huge_pages::allocate_zeroed(len.checked_add(shift)?).ok()?, shift)
        };
        Some(TensorBuffer { allocation, len })
    }

    /// Advises huge pages again after the load.
    pub fn advise_huge_pages(&self) {
        if let Allocation::Mapped(map, _) = &self.allocation {
            huge_pages::advise(map);
        }
    }
}

/// Host memory that a load fills.
#[derive(Debug)]
pub struct HostTarget<'a> {
    bytes: &'a mut [u8],
    /// Mapped by this crate, and nothing was written to it yet.
    is_fresh: bool,
}

impl<'a> HostTarget<'a> {
    /// Memory that the caller provides.
    pub fn new(bytes: &'a mut [u8]) -> HostTarget<'a> {
        HostTarget { bytes, is_fresh: false }
    }

    /// Memory of a new buffer, to which nothing was written.
    pub fn for_new_buffer(buffer: &'a mut TensorBuffer) -> HostTarget<'a> {
        let is_fresh = matches!(buffer.allocation, Allocation::Mapped(..));
        HostTarget { bytes: buffer, is_fresh }
    }

    /// Returns the memory to fill. The first call chooses the page size of fresh memory, and may write zeros: it comes before
    /// any byte is filled.
    pub fn prepare(&mut self) -> &mut [u8] {
        if std::mem::take(&mut self.is_fresh) {
            huge_pages::choose_page_size(self.bytes);
        }
        self.bytes
    }
}

impl Target for HostTarget<'_> {
    fn len(&self) -> u64 {
        Target::len(&self.bytes)
    }

    fn split(self, at: u64) -> (Self, Self) {
        let HostTarget { bytes, is_fresh } = self;
        let (head, tail) = bytes.split(at);
        (HostTarget { bytes: head, is_fresh }, HostTarget { bytes: tail, is_fresh })
    }
}

impl Deref for TensorBuffer {
    type Target = [u8];

    fn deref(&self) -> &[u8] {
        match &self.allocation {
            Allocation::Heap(vec, start) => &vec[*start..*start + self.len],
            Allocation::Mapped(map, start) => &map[*start..*start + self.len],
        }
    }
}

impl DerefMut for TensorBuffer {
    fn deref_mut(&mut self) -> &mut [u8] {
        match &mut self.allocation {
            Allocation::Heap(vec, start) => &mut vec[*start..*start + self.len],
            Allocation::Mapped(map, start) => &mut map[*start..*start + self.len],
        }
    }
}

impl fmt::Debug for TensorBuffer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("TensorBuffer").field("len", &self.len).finish_non_exhaustive()
    }
}

/// The bytes of a tensor in its file, which stays mapped as long as this lives. Writes stay in this process.
#[derive(Clone)]
pub struct MappedTensor {
    map: Arc<MmapRaw>,
    start: usize,
    len: usize,
}

/// Why a tensor cannot be mapped where it lies.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, thiserror::Error)]
pub enum MapRefusal {
    /// The bytes are strided, transposed, expanded or byte-swapped.
    #[error("its bytes do not lie in order")]
    NotContiguous,
    /// The bytes were unpacked.
    #[error("its bytes lie in no file")]
    NotInFile,
    /// The file is not on this machine.
    #[error("its file is not on this machine")]
    NotLocal,
    /// A processor cannot work on the elements at their address.
    #[error("its bytes do not begin at a multiple of an element")]
    Misaligned,
}

/// The mappings of a checkpoint's files, made by need.
pub struct FileMappings {
    by_origin: Box<[OnceLock<Arc<MmapRaw>>]>,
}

impl MappedTensor {
    /// The address of the first byte.
    pub fn as_mut_ptr(&self) -> *mut u8 {
        // Within the mapping, as was checked when this was made.
        self.map.as_mut_ptr().wrapping_add(self.start)
    }

    /// The number of bytes.
    pub fn len(&self) -> usize {
        self.len
    }

    /// Whether the tensor has no bytes.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }
}

impl fmt::Debug for MappedTensor {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("MappedTensor").field("len", &self.len).finish_non_exhaustive()
    }
}

impl FileMappings {
    pub fn new(origins: usize) -> FileMappings {
        FileMappings { by_origin: (0..origins).map(|_| OnceLock::new()).collect() }
    }

    /// Whether the file of a tensor is mapped.
    pub fn is_mapped(&self, tensor: &Tensor) -> bool {
        let origin = tensor.bytes.first_extent().origin;
        let slot = self.by_origin.get(origin.0 as usize);
        slot.is_some_and(|slot| slot.get().is_some())
    }

    pub fn map(
        &self,
        sources: &OpenOrigins,
        tensor: &Tensor,
    ) -> Result<Result<MappedTensor, MapRefusal>, SourceError> {
        let TensorBytes::Run(run) = &tensor.bytes else {
            return Ok(Err(MapRefusal::NotContiguous));
        };
        let slot = self.by_origin.get(run.origin.0 as usize);
        let Some((slot, file)) = slot.zip(sources.file(run.origin)) else {
            return Ok(Err(MapRefusal::NotInFile));
        };
        if !run.offset.is_multiple_of(u64::from(tensor.dtype.bits()).div_ceil(8)) {
            return Ok(Err(MapRefusal::Misaligned));
        }
        let map = match slot.get() {
            Some(map) => map,
            // Of two threads that map at once, one unmaps again.
            None => {
                let Some(map) = file.map_private()? else { return Ok(Err(MapRefusal::NotLocal)) };
                let map = Arc::new(map);
                slot.get_or_init(|| map)
            }
        };
        // What was parsed lies within the file's size, which is the mapping's.
        let (start, len) = (run.offset as usize, run.len as usize);
        if start.checked_add(len).is_none_or(|end| end > map.len()) {
            return Err(SourceError::Truncated { path: file.file().path(), offset: run.offset });
        }
        Ok(Ok(MappedTensor { map: Arc::clone(map), start, len }))
    }
}

#[cfg(test)]
mod tests {
    use crate::checkpoint::{ByteRun, OriginId};

    use super::*;

    #[test]
    fn memory_is_aligned_and_as_long_as_was_asked() {
        let mapped = MIN_MAPPED_BYTES;
        for len in [0, 1, 63, 64, 65, 4097, mapped - 1, mapped, mapped + 1, 5 << 20] {
            let mut memory = TensorBuffer::new(len).unwrap();
            let misalignment = memory.as_ptr().align_offset(ALIGNMENT_BYTES);
            assert_eq!((memory.len(), misalignment), (len, 0));
            memory.fill(7);
            assert!(memory.iter().all(|&byte| byte == 7));
        }
        assert!(TensorBuffer::new(1 << 60).is_none());
    }

    #[test]
    fn large_memory_begins_in_a_page_as_the_tensor_does_in_its_file() {
        let start = |offset, len, alignment| {
            let run = ByteRun { origin: OriginId(0), offset, len };
            let memory = TensorBuffer::for_tensor(&TensorBytes::Run(run), alignment).unwrap();
            assert_eq!(memory.len() as u64, len);
            memory.as_ptr().addr() % DIRECT_ALIGNMENT_BYTES
        };
        let (large, small) = (MIN_MAPPED_BYTES as u64, MIN_MAPPED_BYTES as u64 - 1);
        assert_eq!(start(5 * 4096 + 312, large, BufferAlignment::File), 312);
        // Elements must be aligned, whatever the file does.
        assert_eq!(start(5 * 4096 + 313, large, BufferAlignment::File), 0);
        assert_eq!(start(5 * 4096 + 312, large, BufferAlignment::Vector), 0);
        assert_eq!(start(5 * 4096 + 320, large, BufferAlignment::Vector), 320);
        assert_eq!(start(5 * 4096 + 312, small, BufferAlignment::File) % ALIGNMENT_BYTES, 0);
    }

    #[test]
    fn the_parts_of_a_new_buffer_are_fresh_until_they_are_prepared() {
        let mut buffer = TensorBuffer::new(3 * huge_pages::HUGE_PAGE_BYTES).unwrap();
        let (mut head, tail) = HostTarget::for_new_buffer(&mut buffer).split(1);
        head.prepare()[0] = 7;
        assert_eq!((head.is_fresh, tail.is_fresh), (false, true));
        assert_eq!(head.prepare(), [7]);
    }

    #[test]
    fn only_new_mapped_memory_is_fresh() {
        let mut memory = vec![7; 3 * huge_pages::HUGE_PAGE_BYTES];
        let mut target = HostTarget::new(&mut memory);
        assert!(!target.is_fresh && target.prepare().iter().all(|&byte| byte == 7));
        let mut small = TensorBuffer::new(MIN_MAPPED_BYTES - 1).unwrap();
        assert!(!HostTarget::for_new_buffer(&mut small).is_fresh);
    }
}
