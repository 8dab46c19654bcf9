"""Which rank reads what of a checkpoint that several ranks load together.

In: the tensors, which ranks want each, and how it is cut for them. Out: what each rank reads for itself, and
the parcels that it reads for others too. Every rank comes to the same plan by itself.
"""

import math
from typing import NamedTuple

from ckptfs.errors import error


class SharedTensor(NamedTuple):
    """A tensor: its bytes, its shape as torch counts, whether it can be cut anywhere along an axis, the ranks
    that want it in their order, and the dimension along which they get their parts, or `None`."""

    nbytes: int
    shape: tuple
    divides: bool
    takers: tuple
    dim: int | None


class Piece(NamedTuple):
    """Some rows of a tensor along an axis before which there is one row alone; all of it where the axis is
    `None`."""

    place: int
    axis: int | None
    start: int
    count: int
    nbytes: int


class Parcel(NamedTuple):
    """What one rank reads at once, and these ranks get."""

    takers: tuple
    is_cut: bool
    pieces: list


def part_of(size, rank, ranks):
    """Where a rank's part of a dimension begins, and how much it is: that of torch's `chunk`."""
    block = -(-size // ranks)
    start = min(rank * block, size)
    return start, min(start + block, size) - start


def checked_dim(name, shape, dim):
    """A dimension to cut along, counted from the front."""
    if not isinstance(dim, int) or not -len(shape) <= dim < len(shape):
        raise error(f"{name}: cannot be cut along {dim!r}: its shape is {shape}",
                    "name one of its dimensions", IndexError)  # fmt: skip
    return dim % len(shape)


def is_read_alone(tensor):
    """Whether each rank reads its own: nobody else wants it, or the parts of ranks lie one after the other."""
    in_rows = tensor.dim is not None and math.prod(tensor.shape[: tensor.dim]) == 1
    return len(tensor.takers) < 2 or in_rows


def rounds(tensors, ranks, max_bytes):
    """For each round what every rank reads: a parcel or `None`. `tensors` is in the order in which the bytes
    lie; each rank gets about as much to read as the others, of what it wants itself."""
    loads = [0] * ranks
    for tensor in filter(is_read_alone, tensors):
        for rank in tensor.takers:
            loads[rank] += tensor.nbytes // (1 if tensor.dim is None else ranks)
    reads = [[] for _ in range(ranks)]
    for parcel in _parcels(tensors, max_bytes):
        reader = min(parcel.takers, key=lambda rank: (loads[rank], rank))
        loads[reader] += sum(piece.nbytes for piece in parcel.pieces)
        reads[reader].append(parcel)
    count = max(map(len, reads))
    return [[of[n] if n < len(of) else None for of in reads] for n in range(count)]


def _parcels(tensors, max_bytes):
    """Pieces that the same ranks want, as many at a time as have so many bytes; one at the least."""
    parcel, held = None, 0
    for place, tensor in enumerate(tensors):
        if not tensor.nbytes or is_read_alone(tensor) or not tensor.takers:
            continue
        for piece in _pieces(place, tensor, max_bytes):
            kind = (tensor.takers, tensor.dim is not None)
            if parcel and (parcel[:2] != kind or held + piece.nbytes > max_bytes):
                yield parcel
                parcel = None
            if not parcel:
                parcel, held = Parcel(*kind, []), 0
            parcel.pieces.append(piece)
            held += piece.nbytes
    if parcel:
        yield parcel


def _pieces(place, tensor, max_bytes):
    """Rows of a tensor, as many at a time as have so many bytes; one at the least."""
    axis = next((axis for axis, size in enumerate(tensor.shape) if size > 1), None)
    if axis is None or not tensor.divides or tensor.nbytes <= max_bytes:
        yield Piece(place, None, 0, 1, tensor.nbytes)
        return
    row = tensor.nbytes // tensor.shape[axis]
    most = max(1, max_bytes // row)
    for start in range(0, tensor.shape[axis], most):
        count = min(most, tensor.shape[axis] - start)
        yield Piece(place, axis, start, count, count * row)
