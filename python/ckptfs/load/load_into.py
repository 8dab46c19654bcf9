"""Loading into memory of the caller's: tensors and targets in, the targets filled.

Every target is looked at before anything is read. Where a target has another type, or is where only torch can
write, what is loaded is held beside it for a while.
"""

import itertools

from ckptfs import _ckptfs
from ckptfs.load.dtype_cast import cast
from ckptfs._errors import error
from ckptfs.load.read import is_straight, shown
from ckptfs.settings import PREAD


def land(tensors, framework, into, kinds, memory, load):
    """Lands each in its place."""
    kinds = kinds or [None] * len(tensors)
    addresses, ends = {}, []
    for tensor, kind in zip(tensors, kinds, strict=True):
        if tensor.name not in into:
            raise error(f"{tensor.name}: is in names= and not in into=")
        shape = framework.shape(tensor.dtype, tensor.shape)
        target = into[tensor.name]
        at = framework.place(tensor.name, target, kind or framework.type(tensor.dtype), shape)
        addresses[tensor.name] = at
        ends.append((at, at + target.nbytes, tensor.name))
    _check_apart(ends)
    try:
        _fill(tensors, framework, into, kinds, memory, load, addresses)
    finally:
        framework.changed([into[tensor.name] for tensor in tensors])


def _check_apart(ends):
    """No two targets may share a byte, whichever of them are loaded together."""
    ends = sorted(place for place in ends if place[0] < place[1])
    for (_, end, name), (start, _, other) in itertools.pairwise(ends):
        if start < end:
            raise error(f"{name} and {other}: two of the tensors to load into share memory",
                        "give each memory of its own")  # fmt: skip


def _fill(tensors, framework, into, kinds, memory, load, addresses):
    groups = {}
    for tensor, kind in zip(tensors, kinds, strict=True):
        groups.setdefault(framework.where(into[tensor.name]), []).append((tensor, kind))
    for device, group in groups.items():
        straight = is_straight(device, framework, load, len(group))
        if device is not None and not straight:
            group = [(tensor, kind or framework.type(tensor.dtype)) for tensor, kind in group]
        for batch in shown([tensor for tensor, kind in group if kind is None], load):
            if straight:
                load.is_pinning()
                load.report._add(framework.fill_there(batch, [into[tensor.name] for tensor in batch]))
            else:
                load.report._add(_ckptfs.load_into(batch, [addresses[tensor.name] for tensor in batch]))
            load.had(len(batch), sum(tensor.nbytes for tensor in batch))
        some, others = [tensor for tensor, _ in group], [kind for _, kind in group]
        for _ in cast(some, framework, others, PREAD, memory, load, device if straight else None, into):
            pass
