"""The frame of a tensor from its entry in a header, and of the part that an index selects, as in fastsafetensors.

Nothing is read.
"""

from dataclasses import dataclass

from ckptfs.errors import error
from ckptfs.fastsafetensors.types import DType, as_dtype


@dataclass
class TensorFrame:
    """The layout of a tensor: `dtype`, `shape`, and in `data_offsets` the range of its bytes behind the header.

    A part of a tensor keeps the `data_offsets` of the whole. Its `offsets` have the first index of each dimension,
    and its `strides` the number of elements from one index to the next.

        frame = TensorFrame.from_buffer({"dtype": "F32", "shape": [4, 8], "data_offsets": [0, 128]})
        rows = frame[1:3]                   # shape [2, 8], offsets [1, 0], strides [8, 1]
    """

    dtype: DType
    shape: list[int]
    data_offsets: list[int]
    strides: list[int]
    offsets: list[int]
    sliced: bool

    @classmethod
    def from_buffer(cls, entry):
        """Makes a frame from an entry of a header: a dictionary with `dtype`, `shape` and `data_offsets`."""
        shape = entry["shape"]
        if not isinstance(shape, list) or any(type(size) is not int or size < 0 for size in shape):
            raise error(f"shape {shape!r} is no list of sizes", "give one such as [4, 8]", ValueError)
        strides, step = [], 1
        for size in reversed(shape):
            strides.append(step)
            step *= size
        strides.reverse()
        return cls(
            as_dtype(entry["dtype"]), shape, list(entry["data_offsets"]), strides, [0] * len(shape), False
        )

    def __getitem__(self, index):
        """The frame of a part. A dimension that an integer indexes stays, with size 1. The frame of an empty part
        has only `dtype` and `data_offsets`."""
        index = index if isinstance(index, tuple) else (index,)
        if len(index) > len(self.shape):
            raise error(f"{index} has more dimensions than {self.shape}", "leave some out", IndexError)
        shape, strides, offsets = list(self.shape), list(self.strides), list(self.offsets)
        for dim, item in enumerate(index):
            indexes = _indexes(item, dim, self.shape)
            if not indexes:
                return TensorFrame(self.dtype, [], self.data_offsets, [], [], False)
            shape[dim] = len(indexes)
            offsets[dim] += indexes.start
            strides[dim] *= indexes.step
        return TensorFrame(self.dtype, shape, self.data_offsets, strides, offsets, True)


def _indexes(item, dim, shape):
    """The indexes of a dimension that an item selects, as a range."""
    if isinstance(item, slice):
        return range(*item.indices(shape[dim]))
    if not isinstance(item, int):
        raise error(f"{item!r} is no index of dimension {dim}", "use integers and slices", TypeError)
    if not -shape[dim] <= item < shape[dim]:
        raise error(f"index {item} leads out of dimension {dim} of {shape}", also=IndexError)
    start = item % shape[dim]
    return range(start, start + 1)
