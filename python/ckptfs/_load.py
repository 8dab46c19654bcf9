"""Loading: tensors of an open checkpoint in, tensors of torch or numpy out.

What is asked for is read in one call of the Rust part, which chooses how; in several where someone
watches, or where what is read must be cast and only so much may be held at once.
"""

import fnmatch
import itertools

from ckptfs import _ckptfs
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


def load_parts(parts, framework, way, device=None):
    """Loads tensors and parts of tensors as they are: pairs of what to read and the shape to give it."""
    with Load() as load:
        return [
            framework.put(framework.of(memory, part.dtype, shape), device)
            for memory, (part, shape) in zip(
                _memory([part for part, _ in parts], way, load), parts, strict=True
            )
        ]


def load_named(opened, names, framework, way, *, device=None, into=None, dtype=None, memory=None,
               progress=False, report=None, why=None):
    """Loads tensors by their names: a dictionary of them. `why` they are another file's than was asked for
    stands in the report."""
    if into is None:
        tensors = [opened.tensor(name) for name in chosen(opened, names)]
        with Load(progress, report) as load:
            load.begins(len(tensors), (tensor.nbytes for tensor in tensors), why)
            [loaded] = load_each([tensors], framework, way, load, device=device, dtype=dtype, memory=memory)
        return loaded
    if device is not None:
        raise error("into= has its own place for every tensor, so device= cannot say another")
    names = chosen(opened, list(into) if names is None else names)
    tensors = [opened.tensor(name) for name in names]
    kinds = None if dtype is None else _kinds(tensors, framework, dtype)
    with Load(progress, report) as load:
        load.begins(len(tensors), (tensor.nbytes for tensor in tensors), why)
        _into(tensors, framework, into, kinds, memory, load)
    return {name: into[name] for name in names}


def load_each(checkpoints, framework, way, load, *, device=None, dtype=None, memory=None):
    """Loads tensors of several checkpoints together, a list for each: a dictionary for each."""
    tensors = [tensor for of in checkpoints for tensor in of]
    # A type that the framework lacks is refused before anything is read.
    for tensor in tensors:
        framework.type(tensor.dtype)
    kinds = None if dtype is None else _kinds(tensors, framework, dtype)
    made = [None] * len(tensors)
    for places in _as_they_are(tensors, kinds, load):
        held = _memory([tensors[place] for place in places], way, load)
        for place, memory_of in zip(places, held, strict=True):
            tensor = tensors[place]
            found = framework.of(memory_of, tensor.dtype, tensor.shape)
            made[place] = found if device is None else framework.put(found, device)
    if kinds is not None:
        for place, cast in _cast(tensors, framework, kinds, way, memory, load):
            made[place] = framework.put(cast, device)
    made = iter(made)
    return [{tensor.name: next(made) for tensor in of} for of in checkpoints]


def _kinds(tensors, framework, dtype):
    """What each is to be cast to; `None` if it stays as it is."""
    kind = framework.type_named(dtype)
    return [kind if tensor.dtype in FLOATS and framework.type(tensor.dtype) != kind else None
            for tensor in tensors]  # fmt: skip


def _as_they_are(tensors, kinds, load):
    """The places of those that are not cast, as many at a time as are to be shown at once."""
    if kinds is None:
        places = range(len(tensors))
    else:
        places = [place for place, kind in enumerate(kinds) if kind is None]
    return _batches(places, tensors, _SHOWN_AT_ONCE) if load.is_shown() else [places]


def _memory(tensors, way, load, stop=None, threads=None):
    """The bytes of each, mapped or read."""
    held = [None] * len(tensors)
    left = range(len(tensors))
    if way == MMAP:
        left, mapped = [], 0
        for place, tensor in enumerate(tensors):
            if tensor.nbytes:
                held[place], why = tensor.map()
                if why:
                    load.report._fell_back(f"read, not mapped: {why}")
            if held[place] is None:
                left.append(place)
                continue
            mapped += tensor.nbytes
            if tensor.through:
                load.report._fell_back(tensor.through)
        load.report.mapped += mapped
        load.had(len(tensors) - len(left), mapped)
    if left:
        read, told = _ckptfs.load([tensors[place] for place in left], stop, threads)
        load.report._add(told)
        for place, memory in zip(left, read, strict=True):
            held[place] = memory
        load.had(len(left), sum(map(len, read)))
    return held


def _into(tensors, framework, into, kinds, memory, load):
    """Lands each in its place; what has to be cast is held beside it for a while."""
    addresses, ends = [], []
    for place, tensor in enumerate(tensors):
        if tensor.name not in into:
            raise error(f"{tensor.name}: is in names= and not in into=")
        shape = framework.shape(tensor.dtype, tensor.shape)
        target, kind = into[tensor.name], kinds and kinds[place] or framework.type(tensor.dtype)
        at = framework.place(tensor.name, target, kind, shape)
        addresses.append(at)
        ends.append((at, at + target.nbytes, tensor.name))
    _check_apart(ends)
    try:
        _land(tensors, framework, into, kinds, memory, load, addresses)
    finally:
        framework.changed([into[tensor.name] for tensor in tensors])


def _check_apart(ends):
    """No two targets may share a byte, whichever of them are loaded together."""
    ends = sorted(place for place in ends if place[0] < place[1])
    for (_, end, name), (start, _, other) in itertools.pairwise(ends):
        if start < end:
            raise error(f"{name} and {other}: two of the tensors to load into share memory",
                        "give each memory of its own")  # fmt: skip


def _land(tensors, framework, into, kinds, memory, load, addresses):
    for places in _as_they_are(tensors, kinds, load):
        batch = [tensors[place] for place in places]
        try:
            told = _ckptfs.load_into(batch, [addresses[place] for place in places])
        except ValueError as fault:
            raise error(str(fault), "give each memory of its own") from None
        load.report._add(told)
        load.had(len(batch), sum(tensor.nbytes for tensor in batch))
    if kinds is not None:
        for _ in _cast(tensors, framework, kinds, PREAD, memory, load, into):
            pass


def _cast(tensors, framework, kinds, way, memory, load, into=None):
    """Those of another type, by their places, with what was made of each. No more is held beside the result
    than is allowed, however large a tensor is."""
    others = [place for place, kind in enumerate(kinds) if kind is not None]
    allowed = _CAST_AT_ONCE if memory is None else memory - for_reading(memory, True)
    small = [place for place in others if tensors[place].nbytes <= allowed]
    for places in _batches(small, tensors, allowed):
        # Taken out one by one, so that none is held longer than it must be.
        held = _memory([tensors[place] for place in places], way, load)
        held.reverse()
        for place in places:
            tensor = tensors[place]
            made = framework.of(held.pop(), tensor.dtype, tensor.shape)
            if into is None:
                yield place, framework.cast(made, kinds[place])
            else:
                framework.copy(into[tensor.name], made)
    for place in others:
        tensor = tensors[place]
        if tensor.nbytes <= allowed:
            continue
        if into is None:
            target = framework.empty(kinds[place], tensor.shape)
        else:
            target = into[tensor.name]
        for start, part in _rows(tensor, allowed, memory):
            [held] = _memory([part], PREAD, load)
            rows = framework.of(held, part.dtype, part.shape)
            framework.copy(target[start : start + part.shape[0]], rows)
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


def _batches(places, tensors, size):
    """As many places at a time as have tensors of so many bytes; one at the least."""
    if size is None:
        yield places
        return
    batch, held = [], 0
    for place in places:
        needs = tensors[place].nbytes
        if batch and held + needs > size:
            yield batch
            batch, held = [], 0
        batch.append(place)
        held += needs
    if batch:
        yield batch


def for_reading(memory, dtype):
    """What reading may hold of what a load may hold; casting has the rest."""
    if memory is None or dtype is None:
        return memory
    return max(memory // 2, min(memory, _READ_AT_ONCE))
