"""Reading: tensors of open checkpoints in, tensors of torch or arrays of numpy out, where they belong.

What is asked for is read in one call of the Rust part, which chooses how; what belongs on a device goes there
straight where that is possible.
"""

from ckptfs import _ckptfs
from ckptfs.load.device_map import place_each
from ckptfs.settings import PREAD

# How much a bar moves at once: often enough to be watched, seldom enough to cost nothing.
_SHOWN_AT_ONCE = 128 << 20


def of_each(parts, framework, way, load, device=None, stop=None, threads=None):
    """A tensor of each part, on a device if one is said, or on a device for each."""
    if device is None:
        return _here(parts, framework, way, load, stop, threads)
    devices = device if isinstance(device, list) else place_each(device, parts)
    straight = {one for one in dict.fromkeys(devices) if is_straight(one, framework, load, devices.count(one))}
    made = [None] * len(parts)
    there = [place for place, one in enumerate(devices) if one in straight]
    if there:
        some = [parts[place] for place in there]
        loaded = framework.load_there(some, [devices[place] for place in there], load, stop, threads)
        load.had(len(some), sum(part.nbytes for part in some))
        for place, tensor in zip(there, loaded, strict=True):
            made[place] = tensor
    here = [place for place, one in enumerate(devices) if one not in straight]
    if here:
        some = _here([parts[place] for place in here], framework, way, load, stop, threads)
        for place, tensor in zip(here, some, strict=True):
            made[place] = framework.put(tensor, devices[place])
    return made


def is_straight(device, framework, load=None, count=1):
    """Whether the Rust part can load to a device. Where it cannot, though it could on another machine, the
    report of the load says why."""
    if device is None or device.type != "cuda":
        return False
    why = framework.lacks(device)
    if why and load:
        load.report._fell_back(f"copied to {device} by torch: {why}", count)
    return not why


def _here(parts, framework, way, load, stop, threads):
    memory = memory_of(parts, way, load, stop, threads)
    return [framework.of(held, part.dtype, part.shape) for held, part in zip(memory, parts, strict=True)]


def read(tensors, load, stop=None, threads=None):
    """The bytes of each, in memory of its own."""
    held, told = _ckptfs.load(tensors, stop, threads)
    load.report._add(told)
    load.had(len(held), sum(map(len, held)))
    return held


def memory_of(tensors, way, load, stop=None, threads=None):
    """The bytes of each, mapped or read."""
    if way == PREAD:
        return read(tensors, load, stop, threads)
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
        some = read([tensors[place] for place in left], load, stop, threads)
        for place, memory in zip(left, some, strict=True):
            held[place] = memory
    return held


def _size(tensor):
    return tensor.nbytes


def shown(tensors, load, size_of=_size):
    """As many at a time as are to be shown at once."""
    return batches(tensors, _SHOWN_AT_ONCE, size_of) if load.is_shown() else [tensors]


def batches(tensors, size, size_of=_size):
    """As many at a time as have so many bytes; one at the least."""
    batch, held = [], 0
    for tensor in tensors:
        needs = size_of(tensor)
        if batch and held + needs > size:
            yield batch
            batch, held = [], 0
        batch.append(tensor)
        held += needs
    if batch:
        yield batch
