"""Which rank reads what of a checkpoint that several ranks load together.

In: the tensors, which ranks want each, and how it is cut for them. Out: what each rank reads for itself, and
the parcels that it reads for others too. Every rank comes to the same plan by itself.
"""

import math
from typing import NamedTuple

from ckptfs._errors import error


class Wanted(NamedTuple):
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


def is_alone(wanted):
    """Whether each rank reads its own: nobody else wants it, or the parts of ranks lie one after the other."""
    in_rows = wanted.dim is not None and math.prod(wanted.shape[: wanted.dim]) == 1
    return len(wanted.takers) < 2 or in_rows


def rounds(all_wanted, ranks, at_once):
    """For each round what every rank reads: a parcel or `None`. `all_wanted` is in the order in which the bytes
    lie; each rank gets about as much to read as the others, of what it wants itself."""
    loads = [0] * ranks
    for wanted in filter(is_alone, all_wanted):
        for rank in wanted.takers:
            loads[rank] += wanted.nbytes // (1 if wanted.dim is None else ranks)
    reads = [[] for _ in range(ranks)]
    for parcel in _parcels(all_wanted, at_once):
        reader = min(parcel.takers, key=lambda rank: (loads[rank], rank))
        loads[reader] += sum(piece.nbytes for piece in parcel.pieces)
        reads[reader].append(parcel)
    count = max(map(len, reads))
    return [[of[n] if n < len(of) else None for of in reads] for n in range(count)]


def _parcels(all_wanted, at_once):
    """Pieces that the same ranks want, as many at a time as have so many bytes; one at the least."""
    parcel, held = None, 0
    for place, wanted in enumerate(all_wanted):
        if not wanted.nbytes or is_alone(wanted) or not wanted.takers:
            continue
        for piece in _pieces(place, wanted, at_once):
            kind = (wanted.takers, wanted.dim is not None)
            if parcel and (parcel[:2] != kind or held + piece.nbytes > at_once):
                yield parcel
                parcel = None
            if not parcel:
                parcel, held = Parcel(*kind, []), 0
            parcel.pieces.append(piece)
            held += piece.nbytes
    if parcel:
        yield parcel


def _pieces(place, wanted, at_once):
    """Rows of a tensor, as many at a time as have so many bytes; one at the least."""
    axis = next((axis for axis, size in enumerate(wanted.shape) if size > 1), None)
    if axis is None or not wanted.divides or wanted.nbytes <= at_once:
        yield Piece(place, None, 0, 1, wanted.nbytes)
        return
    row = wanted.nbytes // wanted.shape[axis]
    most = max(1, at_once // row)
    for start in range(0, wanted.shape[axis], most):
        count = min(most, wanted.shape[axis] - start)
        yield Piece(place, axis, start, count, count * row)
