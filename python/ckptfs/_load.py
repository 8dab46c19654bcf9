"""Loading: tensors of an open checkpoint in, tensors of torch or numpy out.

What is asked for is read in one call of the Rust part, which chooses how; in several where someone
watches, or where what is read must be cast and only so much may be held at once.
"""

import fnmatch
import itertools

from ckptfs._errors import error
from ckptfs._frameworks import FLOATS
from ckptfs._report import Load
from ckptfs._settings import MMAP, PREAD

# What is cast is held twice until it is cast; so much of it at a time.
_CAST_AT_ONCE = 256 << 20

# What reading needs at the least.
_READ_AT_ONCE = 4 << 20

# How much a bar moves at once: often enough to be watched, seldom enough to cost nothing.
_SHOWN_AT_ONCE = 128 << 20


def chosen(opened, names):
    """The names that a list or a glob chooses, in the order in which they lie."""
    every = opened.names
    if names is None:
        return every
    if isinstance(names, str):
        found = fnmatch.filter(every, names) if names not in every else [names]
        if not found:
            raise error(f"no tensor matches {names!r}", "see which there are, with `ckptfs inspect`")
        return found
    wanted = dict.fromkeys(names)
    for name in wanted:
        opened.tensor(name)
    return [name for name in every if name in wanted]


def load_parts(opened, parts, framework, way, device=None, stop=None):
    """Loads tensors and parts of tensors as they are: pairs of what to read and the shape to give it."""
    with Load(0) as load:
        return [
            framework.put(framework.of(memory, part.dtype, shape), device)
            for memory, (part, shape) in zip(
                _memory(opened, [part for part, _ in parts], way, load, stop), parts, strict=True
            )
        ]


def load_named(opened, names, framework, way, *, device=None, into=None, dtype=None, memory=None,
               progress=False, report=None, why=None):
    """Loads tensors by their names: a dictionary of them. `why` they are another file's than was asked for
    stands in the report."""
    if into is not None and device is not None:
        raise error("into= has its own place for every tensor, so device= cannot say another")
    names = chosen(opened, list(into) if into is not None and names is None else names)
    tensors = [opened.tensor(name) for name in names]
    kind = framework.type_named(dtype) if dtype is not None else None
    kinds = {tensor.name: kind if kind is not None and tensor.dtype in FLOATS
             else framework.type(tensor.dtype) for tensor in tensors}  # fmt: skip
    with Load(sum(tensor.nbytes for tensor in tensors), progress, report) as load:
        if why:
            load.report._fell_back(why, len(tensors))
        if into is not None:
            _into(opened, tensors, framework, into, kinds, memory, load, progress)
            return {name: into[name] for name in names}
        loaded = {}
        as_it_is = [t for t in tensors if kinds[t.name] == framework.type(t.dtype)]
        for batch in _batches(as_it_is, _SHOWN_AT_ONCE if progress else None):
            for tensor, held in zip(batch, _memory(opened, batch, way, load), strict=True):
                made = framework.of(held, tensor.dtype, tensor.shape)
                loaded[tensor.name] = framework.put(made, device)
        for tensor, made in _cast(opened, tensors, framework, kinds, way, memory, load):
            loaded[tensor.name] = framework.put(made, device)
    return {name: loaded[name] for name in names}


def _memory(opened, tensors, way, load, stop=None, threads=None):
    """The bytes of each, mapped or read."""
    held = [None] * len(tensors)
    if way == MMAP:
        for place, tensor in enumerate(tensors):
            if tensor.nbytes:
                held[place], why = opened.map(tensor)
                if why:
                    load.report._fell_back(f"read, not mapped: {why}")
        mapped = [t.nbytes for t, memory in zip(tensors, held, strict=True) if memory is not None]
        way, why = opened.route
        if mapped and way == "through":
            load.report._fell_back(why, len(mapped))
        load.report.mapped += sum(mapped)
        load.had(len(mapped), sum(mapped))
    left = [place for place, memory in enumerate(held) if memory is None]
    if left:
        read, told = opened.load([tensors[place] for place in left], stop, threads)
        load.report._read(told)
        for place, memory in zip(left, read, strict=True):
            held[place] = memory
        load.had(len(left), sum(map(len, read)))
    return held


def _into(opened, tensors, framework, into, kinds, memory, load, progress):
    """Lands each in its place; what has to be cast is held beside it for a while."""
    addresses, ends = {}, []
    for tensor in tensors:
        if tensor.name not in into:
            raise error(f"{tensor.name}: is in names= and not in into=")
        shape = framework.shape(tensor.dtype, tensor.shape)
        target = into[tensor.name]
        at = framework.place(tensor.name, target, kinds[tensor.name], shape)
        addresses[tensor.name] = at
        ends.append((at, at + target.nbytes, tensor.name))
    _check_apart(ends)
    try:
        _land(opened, tensors, framework, into, kinds, memory, load, progress, addresses)
    finally:
        framework.changed([into[tensor.name] for tensor in tensors])


def _check_apart(ends):
    """No two targets may share a byte, whichever of them are loaded together."""
    ends = sorted(place for place in ends if place[0] < place[1])
    for (_, end, name), (start, _, other) in itertools.pairwise(ends):
        if start < end:
            raise error(f"{name} and {other}: two of the tensors to load into share memory",
                        "give each memory of its own")  # fmt: skip


def _land(opened, tensors, framework, into, kinds, memory, load, progress, addresses):
    as_it_is = [t for t in tensors if kinds[t.name] == framework.type(t.dtype)]
    for batch in _batches(as_it_is, _SHOWN_AT_ONCE if progress else None):
        try:
            told = opened.load_into(batch, [addresses[tensor.name] for tensor in batch])
        except ValueError as fault:
            raise error(str(fault), "give each memory of its own") from None
        load.report._read(told)
        load.had(len(batch), sum(tensor.nbytes for tensor in batch))
    for _ in _cast(opened, tensors, framework, kinds, PREAD, memory, load, into):
        pass


def _cast(opened, tensors, framework, kinds, way, memory, load, into=None):
    """Those of another type, each with what was made of it. No more is held beside the result than is
    allowed, however large a tensor is."""
    allowed = _CAST_AT_ONCE if memory is None else memory - for_reading(memory, True)
    others = [t for t in tensors if kinds[t.name] != framework.type(t.dtype)]
    small = [t for t in others if t.nbytes <= allowed]
    for batch in _batches(small, allowed):
        # Taken out one by one, so that none is held longer than it must be.
        held = _memory(opened, batch, way, load)
        held.reverse()
        for tensor in batch:
            made = framework.of(held.pop(), tensor.dtype, tensor.shape)
            if into is None:
                yield tensor, framework.cast(made, kinds[tensor.name])
            else:
                framework.copy(into[tensor.name], made)
    for tensor in (t for t in others if t.nbytes > allowed):
        if into is None:
            target = framework.empty(kinds[tensor.name], tensor.shape)
        else:
            target = into[tensor.name]
        for start, part in _rows(opened, tensor, allowed, memory):
            [held] = _memory(opened, [part], PREAD, load)
            rows = framework.of(held, part.dtype, part.shape)
            framework.copy(target[start : start + part.shape[0]], rows)
        load.report.tensors -= len(list(_rows(opened, tensor, allowed, memory))) - 1
        yield tensor, target


def _rows(opened, tensor, allowed, memory):
    """Parts of a large tensor, a few rows each."""
    count = tensor.shape[0] if tensor.shape else 1
    row = tensor.nbytes // count
    if row > allowed:
        given = "" if memory is None else f" of memory={memory}"
        raise error(f"{tensor.name}: memory= allows {allowed} bytes{given} for casting, and a row that "
                    f"is to be cast has {row}", "allow more, or load it as it is")  # fmt: skip
    for start in range(0, count, allowed // row):
        rows = min(allowed // row, count - start)
        yield start, opened.part(tensor.name, [(start, rows, 1)])


def _batches(tensors, size):
    """As many at a time as have so many bytes; one at the least."""
    if size is None:
        yield tensors
        return
    batch, held = [], 0
    for tensor in tensors:
        if batch and held + tensor.nbytes > size:
            yield batch
            batch, held = [], 0
        batch.append(tensor)
        held += tensor.nbytes
    if batch:
        yield batch


def for_reading(memory, dtype):
    """What reading may hold of what a load may hold; casting has the rest."""
    if memory is None or dtype is None:
        return memory
    return max(memory // 2, min(memory, _READ_AT_ONCE))
