"""Loading a checkpoint with several ranks: each reads its share, and the others get it from that rank.

Every rank makes the same call. Either all have their tensors, or all have an error.
"""

import fnmatch
import hashlib

import torch

from ckptfs import _ckptfs
from ckptfs.distributed.collective import Exchange
from ckptfs.distributed.process_group import Group
from ckptfs.distributed.rank_plan import SharedTensor, checked_dim
from ckptfs.dtypes import torch_dtype, torch_shape
from ckptfs.errors import error, list_tensors, wrong_type
from ckptfs.load.pipeline import open_checkpoint, select
from ckptfs.load.report import Load
from ckptfs.load.torch import Torch
from ckptfs.settings import PREAD, LoadOptions, reading_memory

# Bytes that a rank reads and sends at once, unless less may be held.
_PARCEL_BYTES = 16 << 20

# The least memory: reading has half of it, and with less in the other half ranks would only wait.
_MIN_MEMORY_BYTES = 16 << 20


def load_distributed(filename, group=None, device="cpu", *, names=None, shard=None, dtype=None, root=None,
                     allow_partial=False, follow_symlinks=False, ranks=None, delta_base=None, views=None, num_threads=None, memory=None,
                     leave_cache=False, cache=True, progress=False, report=None):
    """The tensors of a checkpoint, by their names, on every rank of a process group of torch.distributed.

    Together the ranks read each byte once. Every rank makes this call, and if it fails on one, it fails on all.

    `group` is the default group if none is named. `names` are those for this rank: a list, or one string, which may be
    a glob. They may differ between ranks. `shard` says of which tensors each rank gets only a part, and along which
    dimension. It is a dictionary with a name or a glob for each, the same on every rank. A whole name takes precedence
    over a glob, and an earlier glob over a later one; `None` leaves a tensor whole. Parts are those of `torch.chunk`,
    and may be empty at the end. Everything else is as for `load_file`; each tensor has memory of its own.

        weights = load_distributed("models/llama")
        parts = load_distributed("models/llama", shard={"*.o_proj.weight": 1, "*_proj.weight": 0})
        layer = load_distributed("models/llama", names=f"model.layers.{torch.distributed.get_rank()}.*")
    """
    group = Group(torch.distributed.group.WORLD if group is None else group)
    with group.agreeing():
        options = LoadOptions.resolve(
            Torch, backend=PREAD, device=device, names=names, dtype=dtype, root=root, allow_partial=allow_partial,
            follow_symlinks=follow_symlinks, ranks=ranks, delta_base=delta_base, views=views, num_threads=num_threads, memory=memory,
            leave_cache=leave_cache, cache=cache,
            progress=progress, report=report,
        )  # fmt: skip
        if shard is not None and not hasattr(shard, "items"):
            raise wrong_type("shard", "a dictionary of dimensions by the names of tensors", shard)
        device = options.device or torch.device("cpu")
        # A device that is not there is refused while the others can still be told.
        torch.empty(1, device=device)
        between = _transfer_device(group, device)
        # The rest of the memory is for what is sent, received and cast.
        reading = options._replace(memory=reading_memory(options.memory), dtype=None)
        checkpoint, note = open_checkpoint(filename, reading)
        tensors = [checkpoint.tensor(name) for name in checkpoint.names]
        selected = {tensor.name for tensor in select(checkpoint, options.names)}
        for tensor in tensors:
            if tensor.name in selected:
                torch_dtype(tensor.dtype)
                torch_shape(tensor.dtype, tensor.shape)
        dims = [_dim(tensor, shard) if shard else None for tensor in tensors]
        for pattern in shard or ():
            if not any(fnmatch.fnmatchcase(tensor.name, pattern) or tensor.name == pattern for tensor in tensors):
                raise error(f"shard: no tensor matches {pattern!r}", list_tensors(checkpoint.path))
        parcel_bytes = _parcel_bytes(options.memory, group.size())
    takers, parcel_bytes, between = _agree_on_takers(group, tensors, selected, dims, root, parcel_bytes, between)
    # No rank needs room, or a type of torch, for what none takes.
    kept = [row for row in zip(tensors, takers, dims, strict=True) if row[1]]
    plan = [
        SharedTensor(tensor.nbytes, tuple(torch_shape(tensor.dtype, tensor.shape)), tensor.dtype != "F4", *rest)
        for tensor, *rest in kept
    ]
    tensors = [tensor for tensor, *_ in kept]
    with Load(progress, report, stop=_ckptfs.Stop()) as load:
        load.add_notes(checkpoint.notes)
        return Exchange(group, tensors, plan, between, options, load).run(parcel_bytes, note)


def _parcel_bytes(memory, ranks):
    """Bytes that a rank reads at once. It holds as many of each rank, what it cuts of its own, and what it reads
    meanwhile."""
    if memory is None:
        return _PARCEL_BYTES
    if memory < _MIN_MEMORY_BYTES:
        raise error(f"memory= allows {memory} bytes, and loading with other ranks needs {_MIN_MEMORY_BYTES}",
                    "allow more")  # fmt: skip
    return min(_PARCEL_BYTES, (memory - reading_memory(memory)) // (ranks + 2))


def _transfer_device(group, device):
    """Where tensors are while they go from rank to rank."""
    for kind in dict.fromkeys([device.type, "cpu"]):
        if group.carries(kind):
            return device if kind == device.type else torch.device("cpu")
    raise error(f"the backend of the group carries no tensors of {device.type}",
                'make the group with init_process_group("cpu:gloo,cuda:nccl"), or load to the device of its '
                "backend")  # fmt: skip


def _dim(tensor, shard):
    """The dimension along which ranks get parts of a tensor; `None` if they get all of it."""
    name = tensor.name
    matches = (dim for pattern, dim in shard.items() if fnmatch.fnmatchcase(name, pattern))
    found = shard[name] if name in shard else next(matches, None)
    if found is None:
        return None
    dim = checked_dim(name, tensor.shape, found)
    if tensor.dtype == "F4" and dim == len(tensor.shape) - 1:
        raise error(f"{name}: cannot be cut along {dim}: two elements share a byte",
                    "cut it along another dimension, or load all of it", ValueError)  # fmt: skip
    return dim


def _agree_on_takers(group, tensors, selected, dims, root, parcel_bytes, between):
    """The ranks that take each tensor, the bytes of a parcel, and where tensors are meanwhile on all ranks. Refuses
    ranks that load differently."""
    layout = hashlib.sha256(f"{root!r}".encode())
    for tensor, dim in zip(tensors, dims, strict=True):
        layout.update(f"{tensor.name!r} {tensor.dtype} {tensor.shape} {dim}".encode())
    names = None if len(selected) == len(tensors) else selected
    answers = group.all_gather((layout.hexdigest(), names, parcel_bytes, between.type))
    for rank, (other, *_) in enumerate(answers):
        if other != answers[0][0]:
            raise error(f"rank {rank} of {group.size()} has other tensors than rank 0, or cuts them differently",
                        "give the same checkpoint, root= and shard= on every rank", RuntimeError)  # fmt: skip
    sets, takers = {}, []
    for tensor in tensors:
        ranks = tuple(rank for rank, (_, its, *_) in enumerate(answers) if its is None or tensor.name in its)
        takers.append(sets.setdefault(ranks, ranks))
    # A rank cannot send from a device what another receives elsewhere.
    if len({kind for *_, kind in answers}) > 1:
        between = _transfer_device(group, torch.device("cpu"))
    return takers, min(size for *_, size, _ in answers), between
