//! Tensors where they lie in their files, without a copy.
//!
//! In: the sources, and a tensor. Out: its bytes as [`Mapped`] memory, or why they must be read instead.
//! Each file is mapped once, whole and privately, when the first of its tensors is asked for: a system
//! has few mappings for a process, and a checkpoint may have more tensors.

use std::fmt;
use std::sync::{Arc, OnceLock};

use memmap2::MmapRaw;

use crate::checkpoint::{OpenSources, Tensor, TensorBytes};
use crate::source;

/// Memory with the bytes of a file, which stays mapped as long as this lives. What is written to it
/// stays in this process.
#[derive(Clone)]
pub struct MappedTensor {
    map: Arc<MmapRaw>,
    start: usize,
    len: usize,
}

/// Why the bytes of a tensor cannot be used where they lie.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, thiserror::Error)]
pub enum MapRefusal {
    /// They are strided, transposed, expanded or of the other byte order.
    #[error("its bytes do not lie in order")]
    NotContiguous,
    /// They were unpacked.
    #[error("its bytes lie in no file")]
    NotInFile,
    /// A processor cannot work on them there.
    #[error("its bytes do not begin at a multiple of an element")]
    Misaligned,
}

/// The mappings of a checkpoint's origins, made by need.
pub struct FileMappings(Box<[OnceLock<Arc<MmapRaw>>]>);

impl MappedTensor {
    /// Where it begins.
    pub fn as_mut_ptr(&self) -> *mut u8 {
        // Within the mapping, as was checked when this was made.
        self.map.as_mut_ptr().wrapping_add(self.start)
    }

    /// How many bytes.
    pub fn len(&self) -> usize {
        self.len
    }

    /// Whether there are none.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }
}

impl fmt::Debug for MappedTensor {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Mapped").field("len", &self.len).finish_non_exhaustive()
    }
}

impl FileMappings {
    pub fn new(origins: usize) -> FileMappings {
        FileMappings((0..origins).map(|_| OnceLock::new()).collect())
    }

    /// Whether the file of a tensor is mapped.
    pub fn is_mapped(&self, tensor: &Tensor) -> bool {
        let slot = self.0.get(tensor.bytes.extent().0.0 as usize);
        slot.is_some_and(|slot| slot.get().is_some())
    }

    pub fn map(
        &self,
        sources: &OpenSources,
        tensor: &Tensor,
    ) -> Result<Result<MappedTensor, MapRefusal>, source::SourceError> {
        let TensorBytes::Run(run) = &tensor.bytes else {
            return Ok(Err(MapRefusal::NotContiguous));
        };
        let slot = self.0.get(run.origin.0 as usize);
        let Some((slot, file)) = slot.zip(sources.file(run.origin)) else {
            return Ok(Err(MapRefusal::NotInFile));
        };
        if !run.offset.is_multiple_of(u64::from(tensor.dtype.bits()).div_ceil(8)) {
            return Ok(Err(MapRefusal::Misaligned));
        }
        let map = match slot.get() {
            Some(map) => map,
            // Of two that come at once, one is let go.
            None => {
                let map = Arc::new(file.map_private()?);
                slot.get_or_init(|| map)
            }
        };
        // What was parsed lies within the file's size, which is the mapping's.
        let (start, len) = (run.offset as usize, run.len as usize);
        if start.checked_add(len).is_none_or(|end| end > map.len()) {
            return Err(source::SourceError::Truncated {
                path: file.file().path(),
                offset: run.offset,
            });
        }
        Ok(Ok(MappedTensor { map: Arc::clone(map), start, len }))
    }
}
