//! The places of a tensor's bytes, kept as arithmetic: a list of pieces could be as large as the tensor.

use std::sync::Arc;

use crate::source::SourceFile;

/// Which of a checkpoint's origins: an index into [`Checkpoint::origins`](crate::checkpoint::Checkpoint::origins).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct OriginId(pub u32);

/// Something that holds tensor bytes.
#[derive(Clone, Debug)]
pub enum Origin {
    /// A file, whose bytes stay where they are.
    File(Arc<SourceFile>),
    /// A storage that was unpacked into memory.
    Memory(Arc<[u8]>),
}

impl Origin {
    /// The number of bytes that it holds.
    pub fn size(&self) -> u64 {
        match self {
            Origin::File(file) => file.identity().size,
            Origin::Memory(bytes) => bytes.len() as u64,
        }
    }
}

/// The places of a tensor's bytes.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum TensorBytes {
    /// Contiguous bytes of an origin.
    Run(ByteRun),
    /// Strided, transposed or expanded bytes.
    Grid(Box<Grid>),
    /// Bytes in the other byte order. Never nested.
    Swapped {
        /// Bytes that are reversed together.
        unit_bytes: u64,
        /// The bytes before the reversal.
        inner: Box<TensorBytes>,
    },
}

/// Contiguous bytes of an origin, ordered by their place.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct ByteRun {
    /// The origin that has the bytes.
    pub origin: OriginId,
    /// The offset of the first byte in the origin.
    pub offset: u64,
    /// The number of bytes.
    pub len: u64,
}

/// Pieces of `piece_bytes` bytes at `base + sum(index * stride)`, the last axis moving fastest.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Grid {
    /// The origin that has the bytes.
    pub origin: OriginId,
    /// The offset of the first piece in the origin.
    pub base: u64,
    /// The axes, outermost first; none has a count of 0 or 1.
    pub axes: Box<[Axis]>,
    /// Bytes of each piece.
    pub piece_bytes: u64,
}

/// One axis of a [`Grid`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Axis {
    /// The number of steps.
    pub count: u64,
    /// Bytes from one step to the next; 0 repeats the same bytes.
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

    /// Bytes from the first byte that is read to just past the last.
    pub fn span(&self) -> u64 {
        self.axes
            .iter()
            .fold(self.piece_bytes, |n, a| n.saturating_add((a.count - 1).saturating_mul(a.stride)))
    }

    /// Whether some bytes are read more than once.
    pub fn has_repeats(&self) -> bool {
        self.len() > self.span() || self.axes.iter().any(|axis| axis.stride == 0)
    }
}

impl TensorBytes {
    /// Items at every step of the axes, outermost first. No axis may have a single step.
    ///
    /// Axes that step through adjacent bytes are merged, so that a contiguous tensor becomes a run.
    pub fn from_axes(
        origin: OriginId,
        base: u64,
        axes: impl Iterator<Item = Axis>,
        item_bytes: u64,
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
        let mut piece_bytes = item_bytes;
        if let Some(inner) = merged.pop_if(|inner| inner.stride == item_bytes) {
            piece_bytes *= inner.count;
        }
        if merged.is_empty() {
            TensorBytes::Run(ByteRun { origin, offset: base, len: piece_bytes })
        } else {
            TensorBytes::Grid(Box::new(Grid { origin, base, axes: merged.into(), piece_bytes }))
        }
    }

    /// Bytes of the whole tensor.
    pub fn len(&self) -> u64 {
        match self {
            TensorBytes::Run(run) => run.len,
            TensorBytes::Grid(grid) => grid.len(),
            TensorBytes::Swapped { inner, .. } => inner.len(),
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
            TensorBytes::Swapped { inner, .. } => inner.has_repeats(),
        }
    }

    /// The run from the first byte that is read to the last.
    pub fn extent(&self) -> ByteRun {
        match self {
            TensorBytes::Run(run) => *run,
            TensorBytes::Grid(grid) => {
                ByteRun { origin: grid.origin, offset: grid.base, len: grid.span() }
            }
            TensorBytes::Swapped { inner, .. } => inner.extent(),
        }
    }

    /// Adds to the number of the origin: the origins of one file become origins of a set of files.
    pub fn shift_origin(&mut self, by: u32) {
        match self {
            TensorBytes::Run(run) => run.origin.0 += by,
            TensorBytes::Grid(grid) => grid.origin.0 += by,
            TensorBytes::Swapped { inner, .. } => inner.shift_origin(by),
        }
    }
}
