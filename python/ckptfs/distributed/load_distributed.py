"""Loading a checkpoint with several ranks: each reads its share, and the others get it from that rank.

In: a path and a process group; what this rank wants. Out: its tensors. Every rank makes the same call, and
either all have what they want, or all have an error.
"""

import fnmatch
import hashlib

import torch

from ckptfs import settings
from ckptfs.load import dtype_cast, pipeline
from ckptfs._errors import error
from ckptfs.distributed.collective import Exchange
from ckptfs.load.torch import Torch
from ckptfs.distributed.process_group import Group
from ckptfs.load.report import Load
from ckptfs.distributed.rank_plan import Wanted, checked_dim
from ckptfs.load.handle import open_one, options

# So much a rank reads and sends at once, unless less may be held.
_AT_ONCE = 16 << 20

# Reading has half of what may be held, and less than the rest of this would be nothing but waiting.
_LEAST = 16 << 20


def load_distributed(filename, group=None, device="cpu", *, names=None, shard=None, dtype=None, root=None,
                     allow_partial=False, follow_symlinks=False, num_threads=None, memory=None,
                     leave_cache=False, progress=False, report=None):
    """The tensors of a checkpoint, by their names, on every rank of a process group of torch.distributed; its
    bytes are read once by all of them together. Every rank makes this call, and where one fails all do.

    `group` is the default group if none is named. `names` are those that this rank wants, which may be others
    on each rank: a list, or one string, which may be a glob. `shard` says of which tensors each rank gets a
    part alone, and along which dimension: a dictionary with a name or a glob for each, the same on every rank,
    of which a whole name counts before a glob and the first glob before others; `None` leaves it whole. Parts are those of `torch.chunk`, and may be empty at the end.
    Everything else is that of `load_file`; each tensor has memory of its own.

        weights = load_distributed("models/llama")
        parts = load_distributed("models/llama", shard={"*.o_proj.weight": 1, "*_proj.weight": 0})
        layer = load_distributed("models/llama", names=f"model.layers.{torch.distributed.get_rank()}.*")
    """
    group = Group(torch.distributed.group.WORLD if group is None else group)
    with group.agreeing():
        device = Torch.device(device) or torch.device("cpu")
        # One that is not there is refused while the others can still be told.
        torch.empty(1, device=device)
        between = _between(group, device)
        num_threads, memory = settings.limits(num_threads, memory)
        reading = dtype_cast.for_reading(memory, True)
        how = options(root, allow_partial, follow_symlinks, num_threads, reading, leave_cache)
        opened, why = open_one(filename, how)
        tensors = [opened.tensor(name) for name in opened.names]
        wanted = {tensor.name for tensor in pipeline.chosen(opened, names)}
        for tensor in tensors:
            if tensor.name in wanted:
                Torch.type(tensor.dtype)
                Torch.shape(tensor.dtype, tensor.shape)
        dims = [_dim(tensor, shard) if shard else None for tensor in tensors]
        for fits in shard or ():
            if not any(fnmatch.fnmatchcase(tensor.name, fits) or tensor.name == fits for tensor in tensors):
                raise error(f"shard: no tensor matches {fits!r}", "see which there are, with `ckptfs inspect`")
        kind = None if dtype is None else Torch.type_named(dtype)
        at_once = _at_once(memory, reading, group.size())
    takers, at_once, between = _takers(group, tensors, wanted, dims, root, at_once, between)
    # Nobody need have room for what nobody wants, nor torch a type.
    kept = [of for of in zip(tensors, takers, dims, strict=True) if of[1]]
    plan = [
        Wanted(tensor.nbytes, tuple(Torch.shape(tensor.dtype, tensor.shape)), tensor.dtype != "F4", *rest)
        for tensor, *rest in kept
    ]
    tensors = [tensor for tensor, *_ in kept]
    with Load(progress, report) as load:
        load.noted(opened.notes)
        return Exchange(group, tensors, plan, between, device, kind, memory, load).run(at_once, why)


def _at_once(memory, reading, ranks):
    """Bytes that a rank reads at once. It holds as many of each rank, what it cuts of its own, and what it reads
    meanwhile."""
    if memory is None:
        return _AT_ONCE
    if memory < _LEAST:
        raise error(f"memory= allows {memory} bytes, and loading with other ranks needs {_LEAST}", "allow more")
    return min(_AT_ONCE, (memory - reading) // (ranks + 2))


def _between(group, device):
    """Where tensors are while they go from rank to rank."""
    for kind in dict.fromkeys([device.type, "cpu"]):
        if group.carries(kind):
            return device if kind == device.type else torch.device("cpu")
    raise error(f"the backend of the group carries no tensors of {device.type}",
                'make the group with init_process_group("cpu:gloo,cuda:nccl"), or load to the device of its '
                "backend")  # fmt: skip


def _dim(tensor, shard):
    name = tensor.name
    fits = (dim for glob, dim in shard.items() if fnmatch.fnmatchcase(name, glob))
    found = shard[name] if name in shard else next(fits, None)
    if found is None:
        return None
    dim = checked_dim(name, tensor.shape, found)
    if tensor.dtype == "F4" and dim == len(tensor.shape) - 1:
        raise error(f"{name}: cannot be cut along {dim}: two elements share a byte",
                    "cut it along another dimension, or load all of it", ValueError)  # fmt: skip
    return dim


def _takers(group, tensors, wanted, dims, root, at_once, between):
    """The ranks that want each tensor, how much is sent at once, and where tensors are meanwhile on all of
    them, after a look at whether all load alike."""
    everything = hashlib.sha256(f"{root!r}".encode())
    for tensor, dim in zip(tensors, dims, strict=True):
        everything.update(f"{tensor.name!r} {tensor.dtype} {tensor.shape} {dim}".encode())
    mine = None if len(wanted) == len(tensors) else wanted
    said = group.told((everything.hexdigest(), mine, at_once, between.type))
    for rank, (other, *_) in enumerate(said):
        if other != said[0][0]:
            raise error(f"rank {rank} of {group.size()} has other tensors, or cuts them otherwise, than rank 0",
                        "give the same checkpoint, root= and shard= on every rank", RuntimeError)  # fmt: skip
    sets, found = {}, []
    for tensor in tensors:
        takers = tuple(rank for rank, (_, its, *_) in enumerate(said) if its is None or tensor.name in its)
        found.append(sets.setdefault(takers, takers))
    # One cannot send from a device what another receives elsewhere.
    if len({kind for *_, kind in said}) > 1:
        between = _between(group, torch.device("cpu"))
    return found, min(most for *_, most, _ in said), between
