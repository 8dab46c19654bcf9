//! A tensor, and where its bytes lie.

use std::sync::Arc;

use smallvec::SmallVec;

use crate::source;

use super::{Dtype, TensorName};

/// A shape. That of nearly every weight takes no memory of its own.
pub type Shape = SmallVec<[u64; 2]>;

/// Which of a checkpoint's origins: an index into [`super::Checkpoint::origins`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct OriginId(pub u32);

/// Something that holds tensor bytes.
#[derive(Clone, Debug)]
pub enum Origin {
    /// A file; the bytes stay where they are.
    File(Arc<source::SourceFile>),
    /// Bytes that had to be unpacked.
    Memory(Arc<[u8]>),
}

impl Origin {
    /// How many bytes it holds.
    pub fn size(&self) -> u64 {
        match self {
            Origin::File(file) => file.identity().size,
            Origin::Memory(bytes) => bytes.len() as u64,
        }
    }
}

/// A named tensor. Its bytes, in C order and little-endian, are what `bytes` says.
#[derive(Clone, Debug)]
pub struct Tensor {
    /// The name, unique in its checkpoint.
    pub name: TensorName,
    /// The element type.
    pub dtype: Dtype,
    /// The shape; empty for a scalar.
    pub shape: Shape,
    /// Where the bytes lie.
    pub bytes: TensorBytes,
}

/// Where a tensor's bytes lie.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum TensorBytes {
    /// As they are, one after the other.
    Run(ByteRun),
    /// Spread out: strided, transposed or expanded.
    Grid(Box<Grid>),
    /// In the other byte order: every `unit` bytes reversed. Never nested.
    Swapped {
        /// How many bytes are reversed together.
        unit_bytes: u64,
        /// The bytes before the reversal.
        inner: Box<TensorBytes>,
    },
}

/// Bytes one after the other.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ByteRun {
    /// Where.
    pub origin: OriginId,
    /// From which byte.
    pub offset: u64,
    /// How many.
    pub len: u64,
}

/// Pieces of `run` bytes at `base + sum(index * stride)`, the last axis moving fastest.
/// Kept as arithmetic: a list of the pieces could be as large as the tensor.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Grid {
    /// Where.
    pub origin: OriginId,
    /// The byte where the first piece starts.
    pub base: u64,
    /// The axes, outermost first; none has a count of 0 or 1.
    pub axes: Box<[Axis]>,
    /// Bytes of each piece.
    pub piece_bytes: u64,
}

/// One axis of a [`Grid`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Axis {
    /// How many steps.
    pub count: u64,
    /// Bytes from one to the next; 0 repeats the same bytes.
    pub stride: u64,
}

impl Grid {
    /// Bytes of the whole tensor.
    pub fn len(&self) -> u64 {
        self.axes.iter().fold(self.piece_bytes, |n, axis| n.saturating_mul(axis.count))
    }

    /// Whether it has no bytes.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Bytes from the first that is read to just past the last.
    pub fn span(&self) -> u64 {
        self.axes
            .iter()
            .fold(self.piece_bytes, |n, a| n.saturating_add((a.count - 1).saturating_mul(a.stride)))
    }
}

impl Grid {
    /// Whether some bytes are read more than once.
    pub fn has_repeats(&self) -> bool {
        self.len() > self.span() || self.axes.iter().any(|axis| axis.stride == 0)
    }
}

impl TensorBytes {
    /// Items at every step of the axes, outermost first, none of one step. Axes that step through
    /// adjacent bytes are merged; what is left of a contiguous tensor is a run.
    pub(super) fn from_axes(
        origin: OriginId,
        base: u64,
        axes: impl Iterator<Item = Axis>,
        item: u64,
    ) -> TensorBytes {
        let mut merged: Vec<Axis> = Vec::new();
        for axis in axes {
            match merged.last_mut() {
                Some(outer) if outer.stride == axis.stride.saturating_mul(axis.count) => {
                    *outer = Axis { count: outer.count * axis.count, stride: axis.stride };
                }
                _ => merged.push(axis),
            }
        }
        let mut run = item;
        if let Some(inner) = merged.pop_if(|inner| inner.stride == item) {
            run *= inner.count;
        }
        if merged.is_empty() {
            TensorBytes::Run(ByteRun { origin, offset: base, len: run })
        } else {
            TensorBytes::Grid(Box::new(Grid {
                origin,
                base,
                axes: merged.into(),
                piece_bytes: run,
            }))
        }
    }

    /// Bytes of the whole tensor.
    pub fn len(&self) -> u64 {
        match self {
            TensorBytes::Run(run) => run.len,
            TensorBytes::Grid(grid) => grid.len(),
            TensorBytes::Swapped { inner: of, .. } => of.len(),
        }
    }

    /// Whether it has no bytes.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Whether some bytes of the source are read more than once.
    pub fn has_repeats(&self) -> bool {
        match self {
            TensorBytes::Run(_) => false,
            TensorBytes::Grid(grid) => grid.has_repeats(),
            TensorBytes::Swapped { inner: of, .. } => of.has_repeats(),
        }
    }

    /// The part of an origin that is read: origin, first byte, bytes to just past the last.
    pub fn extent(&self) -> (OriginId, u64, u64) {
        match self {
            TensorBytes::Run(run) => (run.origin, run.offset, run.len),
            TensorBytes::Grid(grid) => (grid.origin, grid.base, grid.span()),
            TensorBytes::Swapped { inner: of, .. } => of.extent(),
        }
    }

    /// Renumbers the origin by `by`: those of one file become those of a set of files.
    pub(super) fn shift_origin(&mut self, by: u32) {
        match self {
            TensorBytes::Run(run) => run.origin.0 += by,
            TensorBytes::Grid(grid) => grid.origin.0 += by,
            TensorBytes::Swapped { inner: of, .. } => of.shift_origin(by),
        }
    }
}

/// How a tensor's bytes lie, in one word.
#[derive(Clone, Copy, Debug, PartialEq, Eq, serde::Serialize)]
#[serde(rename_all = "lowercase")]
pub enum LayoutKind {
    /// One after the other in a file.
    Run,
    /// Spread out, each read once.
    Strided,
    /// Spread out, some read more than once.
    Expanded,
    /// In the other byte order.
    Swapped,
    /// Unpacked into memory.
    Memory,
}

impl Tensor {
    /// How its bytes lie, given its checkpoint's origins.
    pub fn layout_kind(&self, origins: &[Origin]) -> LayoutKind {
        let (OriginId(origin), ..) = self.bytes.extent();
        if matches!(origins.get(origin as usize), Some(Origin::Memory(_))) {
            return LayoutKind::Memory;
        }
        match &self.bytes {
            TensorBytes::Run(_) => LayoutKind::Run,
            TensorBytes::Swapped { .. } => LayoutKind::Swapped,
            TensorBytes::Grid(grid) if grid.has_repeats() => LayoutKind::Expanded,
            TensorBytes::Grid(_) => LayoutKind::Strided,
        }
    }
}
