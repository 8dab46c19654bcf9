"""A load in four steps: resolve, plan, read, place.

- resolve: a path becomes an open checkpoint, names become its tensors.
- plan: what each tensor is cast to, and where it goes. Everything that can be refused is refused here.
- read: the bytes of many tensors at once, by the Rust part.
- place: memory becomes tensors, cast, moved, or copied into memory of the caller's.

Everything takes `LoadOptions`. A `Load` counts what was done; it is what ends up as the report.
"""

import fnmatch
import itertools
import os
from typing import NamedTuple

from ckptfs import _ckptfs
from ckptfs.dtypes import FLOATS
from ckptfs.errors import error, list_tensors, wrong_type
from ckptfs.load.report import Load
from ckptfs.settings import MMAP, PREAD, parse_path, reading_memory

# At most so many single-file checkpoints are opened together. A set may have as many files as a process can open.
_MAX_OPENED_TOGETHER = 64
_FILE_ENDINGS = (".safetensors", ".sft", ".pt", ".pth", ".bin", ".ckpt")

# Bytes between two moves of a progress bar: often enough to be watched, seldom enough to cost nothing.
_PROGRESS_BYTES = 128 << 20

# Bytes that are cast at a time, unless the caller allows less: both types of them are in memory meanwhile.
_CAST_BYTES = 256 << 20


# Resolve


def open_checkpoint(filename, options):
    """Opens what a path leads to, or `x.pt` where `x.safetensors` is missing.

    Returns the checkpoint, and a note for the report if it is another file's."""
    filename = parse_path(filename)
    try:
        found = _ckptfs.Checkpoint(filename, options)
    except FileNotFoundError as fault:
        found = fault
    return _substitute_missing(filename, found, options)


def open_bytes(data, options):
    """Opens a checkpoint whose bytes are in memory."""
    if not isinstance(data, bytes | bytearray | memoryview):
        raise wrong_type("data", "the bytes of a checkpoint (load_file takes a path)", data)
    return _ckptfs.Checkpoint.from_bytes(bytes(data), options)


def open_checkpoints(filenames, options, max_files):
    """The same for many paths, in their order. At most `max_files` files are opened ahead."""
    filenames = map(parse_path, filenames)
    for is_file, group in itertools.groupby(filenames, lambda name: name.endswith(_FILE_ENDINGS)):
        group = list(group)
        # Each file is open together with its directory.
        count = max(1, min(_MAX_OPENED_TOGETHER, max_files // 2)) if is_file else 1
        for start in range(0, len(group), count):
            batch = group[start : start + count]
            for filename, found in zip(batch, _ckptfs.open_each(batch, options), strict=True):
                yield _substitute_missing(filename, found, options)


def _substitute_missing(filename, found, options):
    is_missing = isinstance(found, FileNotFoundError)
    if isinstance(found, Exception) and not is_missing:
        raise found
    # A missing name may also be found as what a mount would show there.
    if not is_missing and found.format == "safetensors":
        return found, None
    stem, extension = os.path.splitext(filename)
    substitute = f"{stem}.pt"
    if extension == ".safetensors" and not os.path.lexists(filename) and os.path.isfile(substitute):
        note = f"{filename} is not there: {substitute} was loaded"
        return _ckptfs.Checkpoint(substitute, options) if is_missing else found, note
    if is_missing:
        raise found
    return found, None


def select(checkpoint, names):
    """The tensors that a list of names or a glob selects, in the order of their bytes."""
    if names is None:
        return checkpoint.tensors
    every = checkpoint.names
    if isinstance(names, str):
        found = fnmatch.filter(every, names) if names not in every else [names]
        if not found:
            raise error(f"{checkpoint.path}: no tensor matches {names!r}", list_tensors(checkpoint.path))
        return [checkpoint.tensor(name) for name in found]
    selected = {name: checkpoint.tensor(name) for name in names}
    return [selected[name] for name in every if name in selected]


# Plan


class Plan(NamedTuple):
    """What becomes of each tensor of a load. A list that is `None` holds for no tensor."""

    tensors: list
    # The type that a tensor is cast to, or `None`.
    dtypes: list | None
    # The device that a tensor goes to; `None` is the host.
    devices: list | None
    # The tensor of the caller's that is loaded into, and the address of its memory.
    targets: list | None
    addresses: list | None


def plan(tensors, options):
    """Decides what becomes of tensors; refuses types, devices and targets that cannot work."""
    framework = options.framework
    for tensor in tensors:
        framework.dtype(tensor.dtype)
    dtypes = None
    if options.dtype is not None:
        dtypes = [options.dtype if tensor.dtype in FLOATS and framework.dtype(tensor.dtype) != options.dtype else None
                  for tensor in tensors]  # fmt: skip
    if options.into is None:
        devices = None if options.device is None else framework.devices(options.device, tensors)
        return Plan(tensors, dtypes, devices, None, None)
    targets = [_target(tensor, options.into) for tensor in tensors]
    addresses = []
    for tensor, target, dtype in zip(tensors, targets, dtypes or itertools.repeat(None)):
        shape = framework.shape(tensor.dtype, tensor.shape)
        addresses.append(framework.target_address(tensor.name, target, dtype or framework.dtype(tensor.dtype), shape))
    _check_disjoint(tensors, targets, addresses)
    return Plan(tensors, dtypes, [framework.device_of(target) for target in targets], targets, addresses)


def _target(tensor, into):
    if tensor.name not in into:
        raise error(f"{tensor.name}: is in names= and not in into=")
    return into[tensor.name]


def _check_disjoint(tensors, targets, addresses):
    """Refuses two targets that share a byte."""
    spans = sorted((start, start + target.nbytes, tensor.name)
                   for tensor, target, start in zip(tensors, targets, addresses, strict=True)
                   if target.nbytes)  # fmt: skip
    for (_, end, name), (start, _, other) in itertools.pairwise(spans):
        if start < end:
            raise error(f"{name} and {other}: two of the tensors to load into share memory",
                        "give each memory of its own, or leave one out")  # fmt: skip


def batches(items, max_bytes, size_of=lambda item: item.nbytes):
    """Lists of items that have at most `max_bytes` together; at least one item each."""
    batch, held = [], 0
    for item in items:
        size = size_of(item)
        if batch and held + size > max_bytes:
            yield batch
            batch, held = [], 0
        batch.append(item)
        held += size
    if batch:
        yield batch


def _progress_batches(places, tensors, load):
    """The places of tensors that are loaded between two moves of the progress bar; all without one."""
    if load.has_progress():
        return batches(places, _PROGRESS_BYTES, lambda place: tensors[place].nbytes)
    return [places]


def can_load_directly(device, options, load=None, count=1):
    """Whether the Rust part loads to a device itself. Where another machine could, the report says why not."""
    if device is None or device.type != "cuda":
        return False
    reason = options.framework.device_obstacle(device)
    if reason and load:
        load.report._add_fallback(f"copied to {device} by torch: {reason}", count)
    return not reason


# Read


def read(tensors, framework, load):
    """Reads tensors, each into memory of its own."""
    memory, counts = _ckptfs.load(tensors, load.stop, load.threads, framework.VECTOR_ALIGNED)
    load.report._add(counts)
    load.add_loaded(len(memory), sum(map(len, memory)))
    return memory


def map_or_read(tensors, options, load):
    """The bytes of each tensor, mapped where the backend says so and it can be, else read."""
    if options.backend != MMAP:
        return read(tensors, options.framework, load)
    memory, unmapped, mapped_bytes = [None] * len(tensors), [], 0
    for place, tensor in enumerate(tensors):
        if tensor.nbytes:
            memory[place], reason = tensor.map()
            if reason:
                load.report._add_fallback(f"read, not mapped: {reason}")
        if memory[place] is None:
            unmapped.append(place)
            continue
        mapped_bytes += tensor.nbytes
        if tensor.through:
            load.report._add_fallback(tensor.through)
    load.report.mapped += mapped_bytes
    load.add_loaded(len(tensors) - len(unmapped), mapped_bytes)
    if unmapped:
        for place, held in zip(unmapped, read([tensors[place] for place in unmapped], options.framework, load), strict=True):
            memory[place] = held
    return memory


# Place


def load_to_host(tensors, options, load):
    """Tensors of the framework, in memory of the host."""
    from_memory = options.framework.from_memory
    return [from_memory(held, tensor.dtype, tensor.shape)
            for held, tensor in zip(map_or_read(tensors, options, load), tensors, strict=True)]  # fmt: skip


def load_to_devices(tensors, devices, options, load):
    """Tensors of the framework, each on its device. The Rust part loads all those together that it can."""
    framework = options.framework
    direct = {device for device in dict.fromkeys(devices)
              if can_load_directly(device, options, load, devices.count(device))}  # fmt: skip
    loaded = [None] * len(tensors)
    there = [place for place, device in enumerate(devices) if device in direct]
    if there:
        batch = [tensors[place] for place in there]
        loaded_batch = framework.load_to_devices(batch, [devices[place] for place in there], load)
        load.add_loaded(len(batch), sum(tensor.nbytes for tensor in batch))
        for place, tensor in zip(there, loaded_batch, strict=True):
            loaded[place] = tensor
    here = [place for place, device in enumerate(devices) if device not in direct]
    if here:
        for place, tensor in zip(here, load_to_host([tensors[place] for place in here], options, load), strict=True):
            loaded[place] = framework.move(tensor, devices[place])
    return loaded


def load_batch(tensors, device, options, load):
    """Tensors of the framework, all on one device or on the host."""
    if device is None:
        return load_to_host(tensors, options, load)
    return load_to_devices(tensors, [device] * len(tensors), options, load)


def load_cast(tensors, dtypes, device, options, load, targets=None):
    """Loads tensors and casts them, on their device if the Rust part loads there: pairs of a place and a tensor.

    Beside the result at most the allowed bytes are held, however large a tensor is."""
    framework = options.framework
    max_bytes = _CAST_BYTES if options.memory is None else options.memory - reading_memory(options.memory)
    small = [place for place, tensor in enumerate(tensors) if tensor.nbytes <= max_bytes]
    for places in batches(small, max_bytes, lambda place: tensors[place].nbytes):
        # Taken out one by one, so that none is held longer than it must be.
        loaded = load_batch([tensors[place] for place in places], device, options, load)
        loaded.reverse()
        for place in places:
            if targets is None:
                yield place, framework.cast(loaded.pop(), dtypes[place])
            else:
                framework.copy(targets[place], loaded.pop())
    for place, tensor in enumerate(tensors):
        if tensor.nbytes <= max_bytes:
            continue
        if targets is None:
            target = framework.empty(dtypes[place], framework.shape(tensor.dtype, tensor.shape), device)
        else:
            target = targets[place]
        _load_rows(tensor, target, max_bytes, device, options, load)
        yield place, target


def _load_rows(tensor, target, max_bytes, device, options, load):
    """Loads a large tensor into a target of another type, a few rows at a time."""
    options, before = options._replace(backend=PREAD), load.report.tensors
    for start, part in _parts_of_rows(tensor, max_bytes, options.memory):
        [rows] = load_batch([part], device, options, load)
        options.framework.copy(target[start : start + part.shape[0]], rows)
        # Gone before the next ones are there.
        del rows
    load.report.tensors = before + 1


def _parts_of_rows(tensor, max_bytes, memory):
    count = tensor.shape[0] if tensor.shape else 1
    row = tensor.nbytes // count
    if row > max_bytes:
        allowed = "" if memory is None else f" of memory={memory}"
        raise error(f"{tensor.name}: memory= allows {max_bytes} bytes{allowed} for casting, and a row that "
                    f"is to be cast has {row}", "allow more, or load it as it is")  # fmt: skip
    for start in range(0, count, max_bytes // row):
        rows = min(max_bytes // row, count - start)
        yield start, tensor.part([(start, rows, 1)])


def load_planned(planned, options, load):
    """New tensors of the framework, in the order of the plan."""
    tensors, dtypes, devices, *_ = planned
    if dtypes is None and devices is None:
        if not load.has_progress():
            return load_to_host(tensors, options, load)
        some = batches(tensors, _PROGRESS_BYTES)
        return [tensor for batch in some for tensor in load_to_host(batch, options, load)]
    dtypes, loaded = dtypes or [None] * len(tensors), [None] * len(tensors)
    uncast = [place for place, dtype in enumerate(dtypes) if dtype is None]
    for places in _progress_batches(uncast, tensors, load):
        batch = [tensors[place] for place in places]
        if devices is None:
            loaded_batch = load_to_host(batch, options, load)
        else:
            loaded_batch = load_to_devices(batch, [devices[place] for place in places], options, load)
        for place, tensor in zip(places, loaded_batch, strict=True):
            loaded[place] = tensor
    for device in dict.fromkeys(devices or [None]):
        places = [place for place, dtype in enumerate(dtypes)
                  if dtype is not None and (devices is None or devices[place] == device)]  # fmt: skip
        direct = device if places and can_load_directly(device, options, load, len(places)) else None
        batch, casts = [tensors[place] for place in places], [dtypes[place] for place in places]
        for n, tensor in load_cast(batch, casts, direct, options, load):
            loaded[places[n]] = options.framework.move(tensor, device)
    return loaded


def fill_targets(planned, options, load):
    """Loads into the targets of the plan. Beside a target another tensor is held for a while where the target has
    another type, or is where the framework alone can write."""
    tensors, dtypes, devices, targets, addresses = planned
    framework, options = options.framework, options._replace(backend=PREAD)
    dtypes = dtypes or [None] * len(tensors)
    try:
        for device in dict.fromkeys(devices):
            places = [place for place, other in enumerate(devices) if other == device]
            direct = can_load_directly(device, options, load, len(places))
            if device is not None and not direct:
                casts = {place: dtypes[place] or framework.dtype(tensors[place].dtype) for place in places}
            else:
                casts = {place: dtypes[place] for place in places if dtypes[place] is not None}
            uncast = [place for place in places if place not in casts]
            for some in _progress_batches(uncast, tensors, load):
                batch = [tensors[place] for place in some]
                if direct:
                    load.mark_pinning()
                    load.report._add(framework.fill_on_devices(batch, [targets[place] for place in some], load))
                else:
                    load.report._add(_ckptfs.load_into(batch, [addresses[place] for place in some]))
                load.add_loaded(len(batch), sum(tensor.nbytes for tensor in batch))
            batch, there = [tensors[place] for place in casts], [targets[place] for place in casts]
            for _ in load_cast(batch, list(casts.values()), device if direct else None, options, load, there):
                pass
    finally:
        framework.mark_changed(targets)


# Whole loads


def load_named(checkpoint, options, note=None):
    """The tensors of a checkpoint that the options name, by their names. `note` stands in the report."""
    into, names, tied = options.into, options.names, {}
    if into is not None and options.device is not None:
        raise error("into= already says where every tensor goes, so device= cannot say it too")
    if into is not None and names is None:
        names, tied = _untie(checkpoint, options)
    planned = plan(select(checkpoint, names), options)
    with Load(options.progress, options.report) as load:
        load.begin(len(planned.tensors), (tensor.nbytes for tensor in planned.tensors), note)
        load.add_notes(checkpoint.notes)
        if into is not None:
            fill_targets(planned, options, load)
            loaded = planned.targets
        else:
            loaded = load_planned(planned, options, load)
    return {tensor.name: value for tensor, value in zip(planned.tensors, loaded, strict=True)} | tied


def _untie(checkpoint, options):
    """The names to load into targets, and the other targets by their names. Tied weights are one target under several
    names; the checkpoint may have one of these, or the same tensor under each."""
    names, tied, there = [], {}, {}
    known, framework = None, options.framework
    for name, target in options.into.items():
        there.setdefault(framework.memory_key(target), []).append(name)
    for key, group in there.items():
        if key is None or len(group) == 1:
            names += group
            continue
        known = set(checkpoint.names) if known is None else known
        first, *others = [name for name in group if name in known] or group
        tensor = checkpoint.tensor(first)
        names += [first, *(name for name in others if not tensor.is_same_as(checkpoint.tensor(name)))]
        tied |= {name: options.into[name] for name in group if name not in names}
    return names, tied


def load_together(groups, options, load):
    """Loads the tensors of several checkpoints in one plan: a dictionary for each of the lists."""
    loaded = iter(load_planned(plan([tensor for group in groups for tensor in group], options), options, load))
    return [{tensor.name: next(loaded) for tensor in group} for group in groups]


def load_parts(parts, options):
    """Loads tensors and parts of tensors as they are: pairs of what to read and the shape to give it."""
    framework, tensors = options.framework, [part for part, _ in parts]
    with Load() as load:
        if options.device is None:
            return [framework.from_memory(held, part.dtype, shape)
                    for held, (part, shape) in zip(map_or_read(tensors, options, load), parts, strict=True)]  # fmt: skip
        loaded_batch = load_to_devices(tensors, framework.devices(options.device, tensors), options, load)
        return [framework.reshape(tensor, part.dtype, shape)
                for tensor, (part, shape) in zip(loaded_batch, parts, strict=True)]  # fmt: skip


def load_directly(tensor, device, options):
    """Loads a tensor to a device where the Rust part does so itself; otherwise loads nothing, and returns `None`."""
    if not can_load_directly(device, options):
        return None
    with Load() as load:
        return load_to_devices([tensor], [device], options, load)[0]
