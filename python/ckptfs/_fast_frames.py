"""What a header says of a tensor, and which part of it an index means; as fastsafetensors has it.

Pure: in, an entry of a header and indexes; out, `TensorFrame`s.
"""

from dataclasses import dataclass

from ckptfs._errors import error
from ckptfs._fast_types import DType, as_dtype


@dataclass
class TensorFrame:
    """What a header says of a tensor: `dtype`, `shape`, and in `data_offsets` where its bytes lie behind the
    header. Of a part of a tensor `data_offsets` are those of the whole, `offsets` has the first index of each
    dimension, and `strides` the elements from one index to the next.

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
        """Of an entry of a header: a dictionary with `dtype`, `shape` and `data_offsets`."""
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
        """The frame of a part. A dimension that an integer indexes stays, with the size 1; of a part that is
        empty only `dtype` and `data_offsets` are left."""
        index = index if isinstance(index, tuple) else (index,)
        if len(index) > len(self.shape):
            raise error(f"{index} has more dimensions than {self.shape}", "leave some out", IndexError)
        shape, strides, offsets = list(self.shape), list(self.strides), list(self.offsets)
        for dim, item in enumerate(index):
            chosen = _chosen(item, dim, self.shape)
            if not chosen:
                return TensorFrame(self.dtype, [], self.data_offsets, [], [], False)
            shape[dim] = len(chosen)
            offsets[dim] += chosen.start
            strides[dim] *= chosen.step
        return TensorFrame(self.dtype, shape, self.data_offsets, strides, offsets, True)


def _chosen(item, dim, shape):
    """The indexes that an item of an index stands for."""
    if isinstance(item, slice):
        return range(*item.indices(shape[dim]))
    if not isinstance(item, int):
        raise error(f"{item!r} is no index of dimension {dim}", "use integers and slices", TypeError)
    if not -shape[dim] <= item < shape[dim]:
        raise error(f"index {item} leads out of dimension {dim} of {shape}", also=IndexError)
    start = item % shape[dim]
    return range(start, start + 1)
