"""Which rank reads what of a checkpoint that several ranks load together.

In: the tensors, the ranks that take each, and how it is cut for them. Out: what each rank reads for itself, and the
parcels that it reads for others too. Every rank computes the same plan by itself.
"""

import math
from typing import NamedTuple

from ckptfs.errors import error


class SharedTensor(NamedTuple):
    """A tensor, and what ranks get of it."""

    nbytes: int
    # As torch counts.
    shape: tuple
    # Whether it can be cut anywhere along an axis.
    divides: bool
    # The ranks that take it, in their order.
    takers: tuple
    # The dimension along which they get parts; `None` if they get all of it.
    dim: int | None


class Piece(NamedTuple):
    """Rows of a tensor along its first axis of more than one; the whole tensor if `axis` is `None`."""

    place: int
    axis: int | None
    start: int
    count: int
    nbytes: int


class Parcel(NamedTuple):
    """What one rank reads at once for the ranks that take it."""

    takers: tuple
    is_cut: bool
    pieces: list


def part_of(size, rank, ranks):
    """The start and the count of a rank's part of a dimension, as of `torch.chunk`."""
    block = -(-size // ranks)
    start = min(rank * block, size)
    return start, min(start + block, size) - start


def checked_dim(name, shape, dim):
    """A dimension to cut along, counted from the front; refuses one that the shape lacks."""
    if not isinstance(dim, int) or not -len(shape) <= dim < len(shape):
        raise error(f"{name}: cannot be cut along {dim!r}: its shape is {shape}",
                    "name one of its dimensions", IndexError)  # fmt: skip
    return dim % len(shape)


def is_read_alone(tensor):
    """Whether each rank reads its own: one rank takes it, or the parts of ranks lie one after the other."""
    in_rows = tensor.dim is not None and math.prod(tensor.shape[: tensor.dim]) == 1
    return len(tensor.takers) < 2 or in_rows


def rounds(tensors, ranks, max_bytes):
    """For each round what every rank reads: a parcel or `None`. Ranks read about as much as each other, of what they
    take themselves. `tensors` are in the order of their bytes."""
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
    return [[parcels[n] if n < len(parcels) else None for parcels in reads] for n in range(count)]


def _parcels(tensors, max_bytes):
    """Parcels of pieces that the same ranks take, of at most `max_bytes` unless one piece has more."""
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
    """Rows of a tensor, of at most `max_bytes` together unless one row has more."""
    axis = next((axis for axis, size in enumerate(tensor.shape) if size > 1), None)
    if axis is None or not tensor.divides or tensor.nbytes <= max_bytes:
        yield Piece(place, None, 0, 1, tensor.nbytes)
        return
    row = tensor.nbytes // tensor.shape[axis]
    max_rows = max(1, max_bytes // row)
    for start in range(0, tensor.shape[axis], max_rows):
        count = min(max_rows, tensor.shape[axis] - start)
        yield Piece(place, axis, start, count, count * row)
