"""How tensors are cut into the parts of ranks, and parts are joined.

Every rank comes to the same parts, or to the same refusal, by itself.
"""

import operator

import torch

from ckptfs.distributed.rank_plan import checked_dim, part_of
from ckptfs.errors import error
from ckptfs.fastsafetensors.types import DType


def cuts_of(name, frame, dim, ranks):
    """The start and the end of each rank's part of a tensor, as torch counts."""
    parts = [part_of(frame.shape[dim], rank, ranks) for rank in range(ranks)]
    ends = [0, *(start + count for start, count in parts)]
    if frame.dtype is DType.F4 and dim == len(frame.shape) - 1:
        if any(end % 2 for end in ends):
            raise error(f"{name}: cannot be cut along {dim} into {ranks}: two elements share a byte",
                        "cut it along another dimension, or get all of it", ValueError)  # fmt: skip
        ends = [end // 2 for end in ends]
    return list(zip(ends, ends[1:], strict=False))


def checked_to_fit(frames, dim, ranks):
    """The dimension along which tensors can be joined, counted from the front; refuses tensors that do not fit."""
    (first_name, first), *others = frames.items()
    counted = checked_dim(first_name, first.shape, operator.index(dim))
    if dim < 0 and ranks > 1:
        # Here -1 would mean the last dimension, and to `get_sharded` it means all of a tensor.
        raise error(f"{first_name}: columns cannot be cut along {dim}: a group of several ranks counts "
                    "dimensions from the front", f"give {counted}", ValueError)  # fmt: skip
    dim = counted
    for name, frame in others:
        if frame.dtype != first.dtype or _other_dims(frame.shape, dim) != _other_dims(first.shape, dim):
            raise error(
                f"{name}: is {frame.dtype.value} {frame.shape}, and cannot be put behind {first_name}, which "
                f"is {first.dtype.value} {first.shape}, along {dim}",
                "get them one by one, and join them as you mean it", ValueError,
            )  # fmt: skip
    return dim


def joined(tensors, dim):
    """Tensors of one type, joined along a dimension."""
    if len(tensors) == 1:
        return tensors[0]
    # Torch joins bytes, but not every type.
    kind = tensors[0].dtype
    data = [tensor.contiguous().unsqueeze(-1).view(torch.uint8) for tensor in tensors]
    return torch.cat(data, dim=dim).view(kind).squeeze(-1)


def _other_dims(shape, dim):
    return [*shape[:dim], None, *shape[dim + 1 :]]
