"""What the ranks of a group do to load a checkpoint together: read, send, receive, and put in place.

In: its tensors, who wants which (a plan of `rank_plan`), and the group. Out: this rank's tensors. In each round
every rank reads a parcel, while the one before goes to those who want it.
"""

import concurrent.futures
import contextlib
import functools
import math

import torch

from ckptfs import _ckptfs
from ckptfs.load import pipeline
from ckptfs._errors import error
from ckptfs.load.torch import FLOATS, Torch
from ckptfs.load.read import is_straight
from ckptfs.settings import PREAD
from ckptfs.distributed.rank_plan import is_alone, part_of, rounds

# Where pieces begin that are sent together: there elements of any type can.
_ALIGNMENT = 64

_CPU = torch.device("cpu")


class Exchange:
    """One load, on one rank. `between` is where tensors are while they go from rank to rank."""

    def __init__(self, group, tensors, plan, between, device, kind, memory, load):
        self._group, self._tensors, self._plan = group, tensors, plan
        self._between, self._device, self._load = between, device, load
        self._memory = memory
        # Where parcels are read to, and with what: the other thread's work has the order of this one's.
        self._reads_to = between if is_straight(between, Torch, load) else _CPU
        self._same_stream = contextlib.nullcontext
        if self._reads_to != _CPU:
            load.is_pinning()
            self._same_stream = functools.partial(torch.cuda.stream, torch.cuda.current_stream(between))
        self._mine, self._made, self._stop = group.rank(), {}, _ckptfs.Stop()
        self._kinds = [Torch.type(tensor.dtype) for tensor in tensors]
        # What each is cast to, of those that are.
        self._casts = {} if kind is None else {
            place: kind for place, tensor in enumerate(tensors)
            if tensor.dtype in FLOATS and self._kinds[place] != kind
        }  # fmt: skip

    def run(self, at_once, why):
        """This rank's tensors, by their names."""
        with self._group.agreeing(self._between):
            plan = rounds(self._plan, self._group.size(), at_once)
            if self._memory is not None:
                self._check_held(plan, at_once)
            self._begin(why)
        with concurrent.futures.ThreadPoolExecutor(1) as pool:
            try:
                self._exchange(plan, pool)
            finally:
                self._stop.set()
        mine = [place for place, wanted in enumerate(self._plan) if self._mine in wanted.takers]
        return {self._tensors[place].name: self._made[place] for place in mine}

    def _check_held(self, plan, at_once):
        """A row is the least that is sent: one that is too large to be held is refused."""
        for parcel in (parcel for parcels in plan for parcel in parcels if parcel):
            size, piece = sum(piece.nbytes for piece in parcel.pieces), parcel.pieces[0]
            if size > at_once and self._mine in parcel.takers and not self._is_in_place(parcel, _CPU):
                raise error(
                    f"{self._tensors[piece.place].name}: memory={self._memory} allows {at_once} bytes at once, "
                    f"and a row has {size}", "allow more, or load it whole, as it is, on the CPU",
                )  # fmt: skip

    def _begin(self, why):
        """Makes room for what comes, and reads what this rank reads for itself."""
        alone, shared = [], []
        for place, wanted in enumerate(self._plan):
            if self._mine in wanted.takers:
                (alone if is_alone(wanted) else shared).append(place)
        for place in shared:
            kind = self._casts.get(place, self._kinds[place])
            self._made[place] = torch.empty(self._shape(place, self._mine), dtype=kind, device=self._device)
        sizes = [self._made[place].numel() * self._kinds[place].itemsize for place in shared]
        parts = [self._part(place) for place in alone]
        self._load.begins(len(alone) + len(shared), [*sizes, *(part.nbytes for part in parts)], why)
        self._load.had(len(shared), 0)
        for kind in {self._casts.get(place) for place in alone}:
            some = [n for n, place in enumerate(alone) if self._casts.get(place) == kind]
            [loaded] = pipeline.load_each(
                [[parts[n] for n in some]], Torch, PREAD, self._load, dtype=kind, memory=self._memory,
                device=None if self._device == _CPU else self._device,
            )  # fmt: skip
            self._made |= zip((alone[n] for n in some), loaded.values(), strict=True)

    def _part(self, place):
        """What this rank reads of a tensor for itself."""
        tensor, dim = self._tensors[place], self._plan[place].dim
        if dim is None:
            return tensor
        before = [(0, size, 1) for size in tensor.shape[:dim]]
        start, count = part_of(tensor.shape[dim], self._mine, self._group.size())
        return tensor.part([*before, (start, count, 1)])

    def _shape(self, place, rank):
        """Of what a rank gets of a tensor."""
        shape, dim = list(self._plan[place].shape), self._plan[place].dim
        if dim is not None:
            _, shape[dim] = part_of(shape[dim], rank, self._group.size())
        return shape

    def _exchange(self, plan, pool):
        reads = [parcels[self._mine] for parcels in plan]
        # Taken out when it is waited for: what went wrong would hold itself here.
        ahead, passed = [pool.submit(self._read, reads[0])] if reads else [], []
        for number, parcels in enumerate(plan):
            # What may fail on one rank alone is done while the others ask whether it did.
            with self._group.agreeing(self._between):
                self._land_all(passed)
                data, told = ahead.pop().result()
                self._load.report._add(told)
                passed = [
                    (parcel, reader, self._held(parcel, reader, data))
                    for reader, parcel in enumerate(parcels) if parcel and self._mine in parcel.takers
                ]  # fmt: skip
                data = None
            if number + 1 < len(plan):
                ahead.append(pool.submit(self._read, reads[number + 1]))
            for parcel, reader, held in passed:
                self._pass_on(parcel, reader, held)
        with self._group.agreeing(self._between):
            self._land_all(passed)

    def _read(self, parcel):
        """The bytes of a parcel that this rank reads, and how they were had."""
        if parcel is None:
            return None, {}
        parts = []
        for piece in parcel.pieces:
            tensor = self._tensors[piece.place]
            if piece.axis is not None:
                tensor = tensor.part([*[(0, 1, 1)] * piece.axis, (piece.start, piece.count, 1)])
            parts.append(tensor)
        with self._same_stream():
            data = self._room(parcel, None, self._reads_to)
            rooms = []
            for tensor, (_, _, start, size) in zip(parts, self._layout(parcel, None), strict=True):
                if tensor.nbytes != size:
                    raise error(f"{tensor.name}: has {tensor.nbytes} bytes, and there is room for {size}")
                rooms.append(data[start : start + size])
            if self._reads_to == _CPU:
                return data, _ckptfs.load_into(parts, [room.data_ptr() for room in rooms], self._stop)
            return data, Torch.fill_there(parts, rooms, self._stop)

    def _held(self, parcel, reader, data):
        """What a parcel is sent from, or received into; of one that is cut the reader has a part for each."""
        if not parcel.is_cut:
            return data.to(self._between) if self._mine == reader else self._room(parcel, None, self._between)
        if self._mine != reader:
            return self._room(parcel, self._mine, self._between)
        return {taker: self._cut(parcel, taker, data) for taker in parcel.takers}

    def _cut(self, parcel, taker, data):
        """A rank's part of what was read."""
        part = self._room(parcel, taker, self._reads_to)
        whole, parts = self._values(parcel, None, data), self._values(parcel, taker, part)
        for piece, value, target in zip(parcel.pieces, whole, parts, strict=True):
            dim = self._plan[piece.place].dim
            target.copy_(value.narrow(dim, *part_of(value.shape[dim], taker, self._group.size())))
        return part if taker == self._mine else part.to(self._between)

    def _pass_on(self, parcel, reader, held):
        """Gives a parcel to those who want it, each its part if it is cut."""
        name, is_mine = self._tensors[parcel.pieces[0].place].name, self._mine == reader
        if not parcel.is_cut and len(parcel.takers) == self._group.size():
            self._group.broadcast(name, held, reader)
        elif not is_mine:
            self._group.receive(name, held, reader)
        else:
            for taker in parcel.takers:
                if taker != reader:
                    self._group.send(name, held[taker] if parcel.is_cut else held, taker)

    def _land_all(self, passed):
        """Puts in place what this rank got of the parcels of a round, and lets go of them."""
        while passed:
            parcel, reader, held = passed.pop()
            rank = self._mine if parcel.is_cut else None
            if self._mine != reader:
                # What lies between pieces counts for nothing.
                self._load.report.received += sum(size for *_, size in self._layout(parcel, rank))
            elif parcel.is_cut:
                held = held[self._mine]
            self._land(parcel, rank, held)

    def _room(self, parcel, rank, device):
        """Memory for a parcel, or for a rank's part of it. For one piece that is used as it is read this is the
        tensor's own."""
        if self._is_in_place(parcel, device):
            return self._rows(parcel.pieces[0]).view(-1).view(torch.uint8)
        _, _, start, size = self._layout(parcel, rank)[-1]
        return torch.empty(start + size, dtype=torch.uint8, device=device)

    def _is_in_place(self, parcel, device):
        """Whether it is one piece that is used as it is read."""
        is_one = not parcel.is_cut and len(parcel.pieces) == 1
        return is_one and parcel.pieces[0].place not in self._casts and self._device == device

    def _layout(self, parcel, rank):
        """Of each piece, or of a rank's part of it, the type that is as large, the shape, and where it lies."""
        found, end = [], 0
        for piece in parcel.pieces:
            shape = self._plan[piece.place].shape if rank is None else self._shape(piece.place, rank)
            shape = [piece.count if axis == piece.axis else size for axis, size in enumerate(shape)]
            kind = Torch.alike(self._kinds[piece.place])
            size = math.prod(shape) * kind.itemsize
            found.append((kind, shape, end, size))
            end += -(-size // _ALIGNMENT) * _ALIGNMENT
        return found

    def _values(self, parcel, rank, data):
        """Its pieces, or a rank's parts of them, as integers."""
        return [data[start : start + size].view(kind).view(shape)
                for kind, shape, start, size in self._layout(parcel, rank)]  # fmt: skip

    def _rows(self, piece):
        """Where a piece belongs in this rank's tensor."""
        made = self._made[piece.place]
        return made if piece.axis is None else made.narrow(piece.axis, piece.start, piece.count)

    def _land(self, parcel, rank, data):
        for piece, value in zip(parcel.pieces, self._values(parcel, rank, data), strict=True):
            rows = self._rows(piece)
            if rows.data_ptr() != value.data_ptr():
                if piece.place in self._casts:
                    rows.copy_(value.view(self._kinds[piece.place]))
                else:
                    rows.view(value.dtype).copy_(value)
            self._load.had(0, value.nbytes)
