"""What each rank does to load a checkpoint together with others: read, send, receive, and put in place.

In: the tensors, a plan of `rank_plan`, and the group. Out: this rank's tensors. In each round every rank reads a
parcel, while the parcel that it read before goes to the ranks that take it.
"""

import concurrent.futures
import contextlib
import functools
import math

import torch

from ckptfs import _ckptfs
from ckptfs.distributed.rank_plan import is_read_alone, part_of, rounds
from ckptfs.dtypes import FLOATS, torch_dtype, torch_integer
from ckptfs.errors import error
from ckptfs.load.pipeline import load_together, can_load_directly
from ckptfs.load.torch import Torch

# Where pieces begin that are sent together: elements of any type can begin there.
_ALIGNMENT_BYTES = 64

_CPU = torch.device("cpu")


class Exchange:
    """One load, on one rank. `between` is where tensors are while they go from rank to rank."""

    def __init__(self, group, tensors, plan, between, options, load):
        self._group, self._tensors, self._plan = group, tensors, plan
        self._between, self._options, self._load = between, options, load
        self._device = options.device or _CPU
        # Where parcels are read to. The other thread's work has the order of this one's stream.
        self._read_device = between if can_load_directly(between, options, load) else _CPU
        self._same_stream = contextlib.nullcontext
        if self._read_device != _CPU:
            load.mark_pinning()
            self._same_stream = functools.partial(torch.cuda.stream, torch.cuda.current_stream(between))
        self._rank, self._made = group.rank(), {}
        self._dtypes = [torch_dtype(tensor.dtype) for tensor in tensors]
        # By place, the type that a tensor is cast to.
        self._casts = {} if options.dtype is None else {
            place: options.dtype for place, tensor in enumerate(tensors)
            if tensor.dtype in FLOATS and self._dtypes[place] != options.dtype
        }  # fmt: skip

    def run(self, parcel_bytes, note):
        """This rank's tensors, by their names. `note` stands in the report."""
        with self._group.agreeing(self._between):
            plan = rounds(self._plan, self._group.size(), parcel_bytes)
            if self._options.memory is not None:
                self._check_held(plan, parcel_bytes)
            self._begin(note)
        with concurrent.futures.ThreadPoolExecutor(1) as pool:
            try:
                self._exchange(plan, pool)
            finally:
                self._load.stop.set()
        mine = [place for place, tensor in enumerate(self._plan) if self._rank in tensor.takers]
        return {self._tensors[place].name: self._made[place] for place in mine}

    def _check_held(self, plan, parcel_bytes):
        """Refuses a row that is too large to be held: a row is the least that is sent."""
        for parcel in (parcel for parcels in plan for parcel in parcels if parcel):
            size, piece = sum(piece.nbytes for piece in parcel.pieces), parcel.pieces[0]
            if size > parcel_bytes and self._rank in parcel.takers and not self._is_in_place(parcel, _CPU):
                raise error(
                    f"{self._tensors[piece.place].name}: memory={self._options.memory} allows {parcel_bytes} bytes "
                    f"at once, and a row has {size}", "allow more, or load it whole, as it is, on the CPU",
                )  # fmt: skip

    def _begin(self, note):
        """Allocates what comes from other ranks, and reads what this rank reads for itself."""
        alone, shared = [], []
        for place, tensor in enumerate(self._plan):
            if self._rank in tensor.takers:
                (alone if is_read_alone(tensor) else shared).append(place)
        for place in shared:
            dtype = self._casts.get(place, self._dtypes[place])
            self._made[place] = torch.empty(self._shape(place, self._rank), dtype=dtype, device=self._device)
        sizes = [self._made[place].numel() * self._dtypes[place].itemsize for place in shared]
        parts = [self._part(place) for place in alone]
        self._load.begin(len(alone) + len(shared), [*sizes, *(part.nbytes for part in parts)], note)
        self._load.add_loaded(len(shared), 0)
        for dtype in {self._casts.get(place) for place in alone}:
            places_of_dtype = [n for n, place in enumerate(alone) if self._casts.get(place) == dtype]
            options = self._options._replace(dtype=dtype)
            [loaded] = load_together([[parts[n] for n in places_of_dtype]], options, self._load)
            self._made |= zip((alone[n] for n in places_of_dtype), loaded.values(), strict=True)

    def _part(self, place):
        """What this rank reads of a tensor for itself."""
        tensor, dim = self._tensors[place], self._plan[place].dim
        if dim is None:
            return tensor
        before = [(0, size, 1) for size in tensor.shape[:dim]]
        start, count = part_of(tensor.shape[dim], self._rank, self._group.size())
        return tensor.part([*before, (start, count, 1)])

    def _shape(self, place, rank):
        """The shape of what a rank gets of a tensor."""
        shape, dim = list(self._plan[place].shape), self._plan[place].dim
        if dim is not None:
            _, shape[dim] = part_of(shape[dim], rank, self._group.size())
        return shape

    def _exchange(self, plan, pool):
        reads = [parcels[self._rank] for parcels in plan]
        # Taken out when it is waited for: an exception in it would keep itself alive here.
        ahead, passed = [pool.submit(self._read, reads[0])] if reads else [], []
        for number, parcels in enumerate(plan):
            # What may fail on one rank alone is done before the ranks agree to go on.
            with self._group.agreeing(self._between):
                self._land_all(passed)
                data, counts = ahead.pop().result()
                self._load.report._add(counts)
                passed = [
                    (parcel, reader, self._buffer(parcel, reader, data))
                    for reader, parcel in enumerate(parcels) if parcel and self._rank in parcel.takers
                ]  # fmt: skip
                data = None
            if number + 1 < len(plan):
                ahead.append(pool.submit(self._read, reads[number + 1]))
            for parcel, reader, buffer in passed:
                self._pass_on(parcel, reader, buffer)
        with self._group.agreeing(self._between):
            self._land_all(passed)

    def _read(self, parcel):
        """The bytes of a parcel that this rank reads, and how they were read."""
        if parcel is None:
            return None, {}
        parts = []
        for piece in parcel.pieces:
            tensor = self._tensors[piece.place]
            if piece.axis is not None:
                tensor = tensor.part([*[(0, 1, 1)] * piece.axis, (piece.start, piece.count, 1)])
            parts.append(tensor)
        with self._same_stream():
            data = self._allocate(parcel, None, self._read_device)
            targets = []
            for tensor, (_, _, start, size) in zip(parts, self._layout(parcel, None), strict=True):
                if tensor.nbytes != size:
                    raise error(f"{tensor.name}: has {tensor.nbytes} bytes, and there is room for {size}")
                targets.append(data[start : start + size])
            if self._read_device == _CPU:
                addresses = [target.data_ptr() for target in targets]
                return data, _ckptfs.load_into(parts, addresses, self._load.stop)
            return data, Torch.fill_on_devices(parts, targets, self._load)

    def _buffer(self, parcel, reader, data):
        """What a parcel is sent from or received into; for one that is cut, the reader has a part for each rank."""
        if not parcel.is_cut:
            return data.to(self._between) if self._rank == reader else self._allocate(parcel, None, self._between)
        if self._rank != reader:
            return self._allocate(parcel, self._rank, self._between)
        return {taker: self._cut(parcel, taker, data) for taker in parcel.takers}

    def _cut(self, parcel, taker, data):
        """A rank's part of what was read."""
        part = self._allocate(parcel, taker, self._read_device)
        whole, parts = self._values(parcel, None, data), self._values(parcel, taker, part)
        for piece, value, target in zip(parcel.pieces, whole, parts, strict=True):
            dim = self._plan[piece.place].dim
            target.copy_(value.narrow(dim, *part_of(value.shape[dim], taker, self._group.size())))
        return part if taker == self._rank else part.to(self._between)

    def _pass_on(self, parcel, reader, buffer):
        """Gives a parcel to the ranks that take it, to each its part if it is cut."""
        name, is_mine = self._tensors[parcel.pieces[0].place].name, self._rank == reader
        if not parcel.is_cut and len(parcel.takers) == self._group.size():
            self._group.broadcast(name, buffer, reader)
        elif not is_mine:
            self._group.receive(name, buffer, reader)
        else:
            for taker in parcel.takers:
                if taker != reader:
                    self._group.send(name, buffer[taker] if parcel.is_cut else buffer, taker)

    def _land_all(self, passed):
        """Puts in place what this rank got of the parcels of a round, and frees their buffers."""
        while passed:
            parcel, reader, buffer = passed.pop()
            rank = self._rank if parcel.is_cut else None
            if self._rank != reader:
                # The alignment between pieces does not count.
                self._load.report.received += sum(size for *_, size in self._layout(parcel, rank))
            elif parcel.is_cut:
                buffer = buffer[self._rank]
            self._land(parcel, rank, buffer)

    def _allocate(self, parcel, rank, device):
        """Memory for a parcel, or for a rank's part of it: the tensor's own, for one piece that is used as it is
        read."""
        if self._is_in_place(parcel, device):
            return self._rows(parcel.pieces[0]).view(-1).view(torch.uint8)
        _, _, start, size = self._layout(parcel, rank)[-1]
        return torch.empty(start + size, dtype=torch.uint8, device=device)

    def _is_in_place(self, parcel, device):
        """Whether it is one piece that is used as it is read."""
        is_single = not parcel.is_cut and len(parcel.pieces) == 1
        return is_single and parcel.pieces[0].place not in self._casts and self._device == device

    def _layout(self, parcel, rank):
        """Of each piece, or of a rank's part of it: an integer type as large as its own, its shape, its start and its
        size."""
        layout, end = [], 0
        for piece in parcel.pieces:
            shape = self._plan[piece.place].shape if rank is None else self._shape(piece.place, rank)
            shape = [piece.count if axis == piece.axis else size for axis, size in enumerate(shape)]
            dtype = torch_integer(self._dtypes[piece.place])
            size = math.prod(shape) * dtype.itemsize
            layout.append((dtype, shape, end, size))
            end += -(-size // _ALIGNMENT_BYTES) * _ALIGNMENT_BYTES
        return layout

    def _values(self, parcel, rank, data):
        """Its pieces, or a rank's parts of them, as integers."""
        return [data[start : start + size].view(dtype).view(shape)
                for dtype, shape, start, size in self._layout(parcel, rank)]  # fmt: skip

    def _rows(self, piece):
        """Where a piece belongs in this rank's tensor."""
        made = self._made[piece.place]
        return made if piece.axis is None else made.narrow(piece.axis, piece.start, piece.count)

    def _land(self, parcel, rank, data):
        for piece, value in zip(parcel.pieces, self._values(parcel, rank, data), strict=True):
            rows = self._rows(piece)
            if rows.data_ptr() != value.data_ptr():
                if piece.place in self._casts:
                    rows.copy_(value.view(self._dtypes[piece.place]))
                else:
                    rows.view(value.dtype).copy_(value)
            self._load.add_loaded(0, value.nbytes)
