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
from ckptfs._settings import PREAD

# What is cast is held twice until it is cast; so much of it at a time.
_CAST_AT_ONCE = 256 << 20

# What reading needs at the least.
_READ_AT_ONCE = 4 << 20

# How much a bar moves at once: often enough to be watched, seldom enough to cost nothing.
_SHOWN_AT_ONCE = 128 << 20


def chosen(opened, names):
    """The tensors that a list or a glob chooses, in the order in which they lie."""
    if names is None:
        return opened.tensors
    every = opened.names
    if isinstance(names, str):
        found = fnmatch.filter(every, names) if names not in every else [names]
        if not found:
            raise error(f"no tensor matches {names!r}", "see which there are, with `ckptfs inspect`")
        return [opened.tensor(name) for name in found]
    wanted = {name: opened.tensor(name) for name in names}
    return [wanted[name] for name in every if name in wanted]


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
        tensors = chosen(opened, names)
        with Load(progress, report) as load:
            load.begins(len(tensors), (tensor.nbytes for tensor in tensors), why)
            [loaded] = load_each([tensors], framework, way, load, device=device, dtype=dtype, memory=memory)
        return loaded
    if device is not None:
        raise error("into= has its own place for every tensor, so device= cannot say another")
    tensors = chosen(opened, list(into) if names is None else names)
    kinds = None if dtype is None else _kinds(tensors, framework, dtype)
    with Load(progress, report) as load:
        load.begins(len(tensors), (tensor.nbytes for tensor in tensors), why)
        _into(tensors, framework, into, kinds, memory, load)
    return {tensor.name: into[tensor.name] for tensor in tensors}


def load_each(checkpoints, framework, way, load, *, device=None, dtype=None, memory=None):
    """Loads tensors of several checkpoints together, a list for each: a dictionary for each."""
    tensors = [tensor for of in checkpoints for tensor in of]
    # A type that the framework lacks is refused before anything is read.
    for tensor in tensors:
        framework.type(tensor.dtype)
    if dtype is None:
        made = _as_they_are(tensors, framework, way, load, device)
    else:
        kinds = _kinds(tensors, framework, dtype)
        stay = [tensor for tensor, kind in zip(tensors, kinds, strict=True) if kind is None]
        stay = iter(_as_they_are(stay, framework, way, load, device))
        cast = {place: framework.put(tensor, device)
                for place, tensor in _cast(tensors, framework, kinds, way, memory, load)}  # fmt: skip
        made = [next(stay) if kind is None else cast[place] for place, kind in enumerate(kinds)]
    made = iter(made)
    return [{tensor.name: each for tensor, each in zip(of, made, strict=False)} for of in checkpoints]


def _kinds(tensors, framework, dtype):
    """What each is to be cast to; `None` if it stays as it is."""
    kind = framework.type_named(dtype)
    return [kind if tensor.dtype in FLOATS and framework.type(tensor.dtype) != kind else None
            for tensor in tensors]  # fmt: skip


def _as_they_are(tensors, framework, way, load, device):
    made = []
    for some in _shown(tensors, load):
        made += of_each(_memory(some, way, load), some, framework, device)
    return made


def of_each(memory, parts, framework, device):
    """A tensor for each of what was read, on a device if it is said."""
    made = [framework.of(held, part.dtype, part.shape) for held, part in zip(memory, parts, strict=True)]
    return made if device is None else [framework.put(tensor, device) for tensor in made]


def _shown(tensors, load):
    """As many at a time as are to be shown at once."""
    return batches(tensors, _SHOWN_AT_ONCE) if load.is_shown() else [tensors]


def read(tensors, load, stop=None, threads=None):
    """The bytes of each, in memory of its own."""
    held, told = _ckptfs.load(tensors, stop, threads)
    load.report._add(told)
    load.had(len(held), sum(map(len, held)))
    return held


def _memory(tensors, way, load):
    """The bytes of each, mapped or read."""
    if way == PREAD:
        return read(tensors, load)
    held, left, mapped = [None] * len(tensors), [], 0
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
        for place, memory in zip(left, read([tensors[place] for place in left], load), strict=True):
            held[place] = memory
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
    at = {id(tensor): address for tensor, address in zip(tensors, addresses, strict=True)}
    stay = tensors if kinds is None else [it for it, kind in zip(tensors, kinds, strict=True) if kind is None]
    for batch in _shown(stay, load):
        try:
            told = _ckptfs.load_into(batch, [at[id(tensor)] for tensor in batch])
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
    place_of = iter(small)
    for some in batches([tensors[place] for place in small], allowed):
        # Taken out one by one, so that none is held longer than it must be.
        held = _memory(some, way, load)
        held.reverse()
        for tensor, place in zip(some, place_of, strict=False):
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
            [held] = read([part], load)
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


def batches(tensors, size):
    """As many at a time as have so many bytes; one at the least."""
    batch, held = [], 0
    for tensor in tensors:
        needs = tensor.nbytes
        if batch and held + needs > size:
            yield batch
            batch, held = [], 0
        batch.append(tensor)
        held += needs
    if batch:
        yield batch


def for_reading(memory, dtype):
    """What reading may hold of what a load may hold; casting has the rest."""
    if memory is None or dtype is None:
        return memory
    return max(memory // 2, min(memory, _READ_AT_ONCE))
