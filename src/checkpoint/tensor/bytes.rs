//! The places of a tensor's bytes, kept as arithmetic: a list of pieces could be as large as the tensor.

use super::Shape;
use super::cast::CastError;
use super::dtype::Dtype;

/// Which of a checkpoint's origins: an index into [`Checkpoint::origins`](crate::checkpoint::Checkpoint::origins).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct OriginId(pub u32);

/// The places of a tensor's bytes.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum TensorBytes {
    /// Contiguous bytes of an origin.
    Run(ByteRun),
    /// Strided, transposed or expanded bytes.
    Grid(Box<Grid>),
    /// Boxes in several places.
    Boxes(Box<Boxes>),
    /// Bytes in the other byte order. Neither nested nor of boxes.
    Swapped {
        /// Bytes that are reversed together.
        unit_bytes: u64,
        /// The bytes before the reversal.
        inner: Box<TensorBytes>,
    },
    /// Values that are cast as they are read. Never of boxes: each box is cast by itself.
    Cast {
        /// The type of the values that are read.
        from: Dtype,
        /// The type that they become.
        to: Dtype,
        /// The values before the cast.
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

/// A part of a tensor's bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TensorPart {
    /// The offset of its first byte in the tensor.
    pub offset: u64,
    /// The number of bytes.
    pub len: u64,
    /// The place of its bytes; `None` if they are gathered.
    pub run: Option<ByteRun>,
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

/// A box of a tensor: the steps of each axis that it holds, and the places of its bytes in C order.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TensorBox {
    /// The first step of each axis.
    pub start: Shape,
    /// The number of steps of each axis.
    pub counts: Shape,
    /// The places of its bytes. Never boxes themselves.
    pub bytes: TensorBytes,
}

/// The boxes of one tensor, by their first byte in the tensor.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Boxes {
    item_bytes: u64,
    dims: Shape,
    boxes: Box<[TensorBox]>,
    /// Whether each box is one range of the tensor's bytes.
    are_contiguous: bool,
}

impl Boxes {
    /// Bytes of one value.
    pub fn item_bytes(&self) -> u64 {
        self.item_bytes
    }

    /// The number of steps of each axis.
    pub fn dims(&self) -> &[u64] {
        &self.dims
    }

    /// The boxes, by their first byte in the tensor.
    pub fn boxes(&self) -> &[TensorBox] {
        &self.boxes
    }

    /// Whether each box is one range of the tensor's bytes.
    pub fn are_contiguous(&self) -> bool {
        self.are_contiguous
    }

    /// Bytes of the whole tensor.
    pub fn len(&self) -> u64 {
        self.boxes.iter().map(|part| part.bytes.len()).sum()
    }

    /// Whether it has no bytes.
    pub fn is_empty(&self) -> bool {
        self.boxes.is_empty()
    }

    /// The offset in the tensor of the first byte of a box.
    pub fn offset_of(&self, part: &TensorBox) -> u64 {
        value_index(&self.dims, &part.start) * self.item_bytes
    }
}

impl TensorBox {
    /// First step and number of steps of each axis.
    pub fn axes(&self) -> impl Iterator<Item = (u64, u64)> {
        self.start.iter().copied().zip(self.counts.iter().copied())
    }
}

/// The number of the value at some steps, in C order.
pub fn value_index(dims: &[u64], steps: &[u64]) -> u64 {
    dims.iter().zip(steps).fold(0, |index, (&size, &step)| index * size + step)
}

/// Whether a box of these steps is one range of the values of a tensor.
pub fn is_contiguous(dims: &[u64], counts: &[u64]) -> bool {
    let mut inner = counts.iter().zip(dims).skip_while(|(count, _)| **count == 1);
    inner.next();
    inner.all(|(count, size)| count == size)
}

impl TensorBytes {
    /// The bytes of boxes that cover a shape, and do not overlap.
    pub fn from_boxes(dims: Shape, item_bytes: u64, mut boxes: Vec<TensorBox>) -> TensorBytes {
        if let [whole] = &boxes[..]
            && whole.counts == dims
            && let Some(whole) = boxes.pop()
        {
            return whole.bytes;
        }
        let are_contiguous = boxes.iter().all(|part| is_contiguous(&dims, &part.counts));
        boxes.sort_by_key(|part| value_index(&dims, &part.start));
        TensorBytes::Boxes(Box::new(Boxes {
            item_bytes,
            dims,
            boxes: boxes.into(),
            are_contiguous,
        }))
    }

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

    /// The same values as another type. Fails if there is no such cast.
    pub fn cast(self, from: Dtype, to: Dtype) -> Result<TensorBytes, CastError> {
        CastError::check(from, to)?;
        Ok(if from == to { self } else { self.cast_checked(from, to) })
    }

    fn cast_checked(self, from: Dtype, to: Dtype) -> TensorBytes {
        let TensorBytes::Boxes(mut boxes) = self else {
            return TensorBytes::Cast { from, to, inner: Box::new(self) };
        };
        boxes.item_bytes = u64::from(to.bits()) / 8;
        let parts = std::mem::take(&mut boxes.boxes).into_vec().into_iter();
        let cast = |part: TensorBox| TensorBox { bytes: part.bytes.cast_checked(from, to), ..part };
        boxes.boxes = parts.map(cast).collect();
        TensorBytes::Boxes(boxes)
    }

    /// The same bytes for a shape without an axis, of which there is a single step.
    pub fn without_axis(self, axis: usize) -> TensorBytes {
        let TensorBytes::Boxes(mut boxes) = self else { return self };
        boxes.dims.remove(axis);
        for part in &mut boxes.boxes {
            part.start.remove(axis);
            part.counts.remove(axis);
        }
        TensorBytes::Boxes(boxes)
    }

    /// Bytes of the whole tensor.
    pub fn len(&self) -> u64 {
        match self {
            TensorBytes::Run(run) => run.len,
            TensorBytes::Grid(grid) => grid.len(),
            TensorBytes::Boxes(boxes) => boxes.len(),
            TensorBytes::Swapped { inner, .. } => inner.len(),
            TensorBytes::Cast { from, to, inner } => {
                inner.len() / u64::from(from.bits() / 8) * u64::from(to.bits() / 8)
            }
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
            TensorBytes::Boxes(boxes) => boxes.boxes().iter().any(|part| part.bytes.has_repeats()),
            TensorBytes::Swapped { inner, .. } | TensorBytes::Cast { inner, .. } => {
                inner.has_repeats()
            }
        }
    }

    /// The run from the first byte that is read to the last; of boxes, that of the first box.
    pub fn first_extent(&self) -> ByteRun {
        match self {
            TensorBytes::Run(run) => *run,
            TensorBytes::Grid(grid) => {
                ByteRun { origin: grid.origin, offset: grid.base, len: grid.span() }
            }
            TensorBytes::Boxes(boxes) => match boxes.boxes().first() {
                Some(first) => first.bytes.first_extent(),
                None => ByteRun { origin: OriginId(0), offset: 0, len: 0 },
            },
            TensorBytes::Swapped { inner, .. } | TensorBytes::Cast { inner, .. } => {
                inner.first_extent()
            }
        }
    }

    /// The run from the first byte that is read to the last, of each box.
    pub fn extents(&self) -> impl Iterator<Item = ByteRun> {
        let (single, boxes) = match self {
            TensorBytes::Boxes(boxes) => (None, boxes.boxes()),
            single => (Some(single.first_extent()), &[][..]),
        };
        single.into_iter().chain(boxes.iter().map(|part| part.bytes.first_extent()))
    }

    /// Whether some of the values are cast as they are read.
    pub fn is_cast(&self) -> bool {
        match self {
            TensorBytes::Run(_) | TensorBytes::Grid(_) => false,
            TensorBytes::Boxes(boxes) => boxes.boxes().iter().any(|part| part.bytes.is_cast()),
            TensorBytes::Swapped { inner, .. } => inner.is_cast(),
            TensorBytes::Cast { .. } => true,
        }
    }

    /// The run of a source that a range of the bytes is made of; `None` if it is not one.
    pub fn source_run(&self, offset: u64, len: u64) -> Option<ByteRun> {
        match self {
            TensorBytes::Run(run) => Some(ByteRun { offset: run.offset + offset, len, ..*run }),
            TensorBytes::Grid(_) | TensorBytes::Boxes(_) => None,
            TensorBytes::Swapped { unit_bytes, inner } => {
                let first = offset / unit_bytes * unit_bytes;
                inner.source_run(first, (offset + len).next_multiple_of(*unit_bytes) - first)
            }
            TensorBytes::Cast { from, to, inner } => {
                let [from, to] = [from, to].map(|dtype| u64::from(dtype.bits() / 8));
                let (first, end) = (offset / to, (offset + len).div_ceil(to));
                inner.source_run(first * from, (end - first) * from)
            }
        }
    }

    /// Whether some of the bytes must be gathered from places that are far apart.
    pub fn is_strided(&self) -> bool {
        match self {
            TensorBytes::Run(_) => false,
            TensorBytes::Grid(_) => true,
            TensorBytes::Boxes(boxes) => {
                !boxes.are_contiguous() || boxes.boxes().iter().any(|part| part.bytes.is_strided())
            }
            TensorBytes::Swapped { inner, .. } | TensorBytes::Cast { inner, .. } => {
                inner.is_strided()
            }
        }
    }

    /// The tensor's bytes in order, in parts that are each one run, or gathered.
    pub fn parts(&self) -> impl Iterator<Item = TensorPart> {
        let part = |offset, bytes: &TensorBytes| {
            let run = match bytes {
                TensorBytes::Run(run) => Some(*run),
                _ => None,
            };
            TensorPart { offset, len: bytes.len(), run }
        };
        let (single, boxes) = match self {
            TensorBytes::Boxes(boxes) if boxes.are_contiguous() => (None, Some(boxes)),
            single => (Some(part(0, single)), None),
        };
        let boxes = boxes.into_iter().flat_map(move |all| {
            all.boxes().iter().map(move |one| part(all.offset_of(one), &one.bytes))
        });
        single.into_iter().chain(boxes)
    }

    /// Moves the bytes from an origin of their own into another one, at an offset. Not for boxes.
    pub fn embed(&mut self, into: OriginId, at: u64) {
        match self {
            TensorBytes::Run(run) => {
                run.origin = into;
                run.offset += at;
            }
            TensorBytes::Grid(grid) => {
                grid.origin = into;
                grid.base += at;
            }
            TensorBytes::Boxes(_) => debug_assert!(false, "boxes are never in one origin"),
            TensorBytes::Swapped { inner, .. } | TensorBytes::Cast { inner, .. } => {
                inner.embed(into, at);
            }
        }
    }

    /// Adds to the number of the origin: the origins of one file become origins of a set of files.
    pub fn shift_origin(&mut self, by: u32) {
        match self {
            TensorBytes::Run(run) => run.origin.0 += by,
            TensorBytes::Grid(grid) => grid.origin.0 += by,
            TensorBytes::Boxes(boxes) => {
                boxes.boxes.iter_mut().for_each(|part| part.bytes.shift_origin(by));
            }
            TensorBytes::Swapped { inner, .. } | TensorBytes::Cast { inner, .. } => {
                inner.shift_origin(by);
            }
        }
    }
}
