"""Loading: tensors of an open checkpoint in, tensors of torch or numpy out, by their names."""

import fnmatch

from ckptfs.load.dtype_cast import cast, kinds
from ckptfs._errors import error
from ckptfs.load.load_into import land
from ckptfs.load.device_map import place_each
from ckptfs.load.read import is_straight, memory_of, of_each, shown
from ckptfs.load.report import Load


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
        if device is None:
            return [framework.of(held, part.dtype, shape) for held, (part, shape) in zip(
                memory_of([part for part, _ in parts], way, load), parts, strict=True)]  # fmt: skip
        made = of_each([part for part, _ in parts], framework, way, load, device)
        return [framework.shaped(tensor, part.dtype, shape)
                for tensor, (part, shape) in zip(made, parts, strict=True)]  # fmt: skip


def load_straight(tensor, framework, way, device):
    """Loads a tensor to a device if that can be done straight. If not, nothing is loaded."""
    if not is_straight(device, framework):
        return None
    with Load() as load:
        return of_each([tensor], framework, way, load, device)[0]


def load_named(opened, names, framework, way, *, device=None, into=None, dtype=None, memory=None,
               progress=False, report=None, why=None):
    """Loads tensors by their names: a dictionary of them. `why` they are another file's than was asked for
    stands in the report."""
    if into is None:
        tensors = chosen(opened, names)
        with Load(progress, report) as load:
            load.begins(len(tensors), (tensor.nbytes for tensor in tensors), why)
            load.noted(opened.notes)
            [loaded] = load_each([tensors], framework, way, load, device=device, dtype=dtype, memory=memory)
        return loaded
    if device is not None:
        raise error("into= has its own place for every tensor, so device= cannot say another")
    tensors = chosen(opened, list(into) if names is None else names)
    others = None if dtype is None else kinds(tensors, framework, dtype)
    with Load(progress, report) as load:
        load.begins(len(tensors), (tensor.nbytes for tensor in tensors), why)
        load.noted(opened.notes)
        land(tensors, framework, into, others, memory, load)
    return {tensor.name: into[tensor.name] for tensor in tensors}


def load_each(checkpoints, framework, way, load, *, device=None, dtype=None, memory=None):
    """Loads tensors of several checkpoints together, a list for each: a dictionary for each."""
    tensors = [tensor for of in checkpoints for tensor in of]
    # A type that the framework lacks is refused before anything is read.
    for tensor in tensors:
        framework.type(tensor.dtype)
    if dtype is None and device is None:
        made = []
        for some in shown(tensors, load):
            made += of_each(some, framework, way, load)
    else:
        made = _made(tensors, framework, way, load, device, dtype, memory)
    made = iter(made)
    return [{tensor.name: each for tensor, each in zip(of, made, strict=False)} for of in checkpoints]


def _made(tensors, framework, way, load, device, dtype, memory):
    """Each where it goes, and of the type that it is to have."""
    others = [None] * len(tensors) if dtype is None else kinds(tensors, framework, dtype)
    made = [None] * len(tensors)
    # Nothing if all stay here.
    places = device and place_each(device, tensors)
    stay = [n for n, kind in enumerate(others) if kind is None]
    for some in shown(stay, load, lambda n: tensors[n].nbytes):
        there = places and [places[n] for n in some]
        loaded = of_each([tensors[n] for n in some], framework, way, load, there)
        for n, tensor in zip(some, loaded, strict=True):
            made[n] = tensor
    for goes in dict.fromkeys(places or [None]):
        here = [n for n, kind in enumerate(others) if kind is not None and not (places and places[n] != goes)]
        straight = goes if here and is_straight(goes, framework, load, len(here)) else None
        some, types = [tensors[n] for n in here], [others[n] for n in here]
        for n, tensor in cast(some, framework, types, way, memory, load, straight):
            made[here[n]] = framework.put(tensor, goes)
    return made
