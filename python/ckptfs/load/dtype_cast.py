"""Loading as another type than is stored: tensors in, tensors cast out, with so much held beside them at the most.

What is loaded straight to a device is cast there.
"""

from ckptfs._errors import error
from ckptfs.load.torch import FLOATS
from ckptfs.load.read import batches, of_each
from ckptfs.settings import PREAD

# What is cast is held twice until it is cast; so much of it at a time.
_CAST_AT_ONCE = 256 << 20

# What reading needs at the least.
_READ_AT_ONCE = 4 << 20


def kinds(tensors, framework, dtype):
    """What each is to be cast to; `None` if it stays as it is."""
    kind = framework.type_named(dtype)
    return [kind if tensor.dtype in FLOATS and framework.type(tensor.dtype) != kind else None
            for tensor in tensors]  # fmt: skip


def for_reading(memory, dtype):
    """What reading may hold of what a load may hold; casting has the rest."""
    if memory is None or dtype is None:
        return memory
    return max(memory // 2, min(memory, _READ_AT_ONCE))


def cast(tensors, framework, kinds, way, memory, load, device=None, into=None):
    """Those of another type, by their places, with what was made of each, on a device if one is said. No more
    is held beside the result than is allowed, however large a tensor is."""
    others = [place for place, kind in enumerate(kinds) if kind is not None]
    allowed = _CAST_AT_ONCE if memory is None else memory - for_reading(memory, True)
    small = [place for place in others if tensors[place].nbytes <= allowed]
    place_of = iter(small)
    for some in batches([tensors[place] for place in small], allowed):
        # Taken out one by one, so that none is held longer than it must be.
        held = of_each(some, framework, way, load, device)
        held.reverse()
        for tensor, place in zip(some, place_of, strict=False):
            if into is None:
                yield place, framework.cast(held.pop(), kinds[place])
            else:
                framework.copy(into[tensor.name], held.pop())
    for place in others:
        tensor = tensors[place]
        if tensor.nbytes <= allowed:
            continue
        if into is None:
            target = framework.empty(kinds[place], framework.shape(tensor.dtype, tensor.shape), device)
        else:
            target = into[tensor.name]
        for start, part in _rows(tensor, allowed, memory):
            [rows] = of_each([part], framework, PREAD, load, device)
            framework.copy(target[start : start + part.shape[0]], rows)
            # Gone before the next ones are there.
            del rows
        load.report.tensors -= len(list(_rows(tensor, allowed, memory))) - 1
        yield place, target


def _rows(tensor, allowed, memory):
    """Parts of a large tensor, a few rows each."""
    count = tensor.shape[0] if tensor.shape else 1
    row = tensor.nbytes // count
    if row > allowed:
        given = "" if memory is None else f" of memory={memory}"
        raise error(f"{tensor.name}: memory= allows {allowed} bytes{given} for casting, and a row that "
                    f"is to be cast has {row}", "allow more, or load it as it is")  # fmt: skip
    for start in range(0, count, allowed // row):
        rows = min(allowed // row, count - start)
        yield start, tensor.part([(start, rows, 1)])
