"""Tensors on CUDA devices: memory of torch's own allocator, which the Rust part fills by itself.

In: tensors of checkpoints, and where they go. Out: tensors there. Nobody waits for the last bytes: whatever
torch's current stream is given from then on finds them there, and memory that torch gives out anew is not
written to before the work that had it is done.
"""

import itertools
import operator

import torch

from ckptfs import _ckptfs, settings
from ckptfs._errors import error
from ckptfs.load.torch import Torch
from ckptfs.load.read import batches

# From here on a tensor has memory of its own; smaller ones share blocks of no more than the other.
_LARGE, _BLOCK = 1 << 20, 4 << 20

# Where tensors begin in a block: as torch's kernels and others' expect of memory of a device.
_ALIGNMENT = 256

# Tensors whose pieces are shorter than this are put in order on the device, so much of them at once.
_SHORT, _SPREAD = 512, 256 << 20


def lacks(device):
    """Why nothing can be loaded straight to a device; nothing if it can."""
    if device.type != "cuda" or not torch.version.cuda:
        return f"torch copies what is loaded to {device.type}"
    # What torch itself cannot use it says in words of its own.
    torch.cuda.init()
    if _whole(device).index >= torch.cuda.device_count():
        raise error(f"{device}: there is no such device, of {torch.cuda.device_count()}",
                    "see which there are, with `nvidia-smi`")  # fmt: skip
    return _ckptfs.lacks_device(_whole(device).index, settings.on_devices())


def load(parts, devices, load, stop=None, threads=None):
    """A tensor of each part, on its device."""
    whole = {device: _whole(device) for device in dict.fromkeys(devices)}
    devices = [whole[device] for device in devices]
    # Of what uses the host's memory torch's own allocator would be a copy.
    shared = {device: _ckptfs.is_integrated(device.index, settings.on_devices()) for device in dict.fromkeys(devices)}
    if any(shared.values()):
        return _shared(parts, devices, shared, load, stop, threads)
    return _load(parts, devices, load, stop, threads)


def _load(parts, devices, load, stop, threads):
    """The same, to memory that torch gives."""
    made = [None] * len(parts)
    spread = _ckptfs.spread(parts, _SHORT, _SPREAD)
    plain = [place for place in range(len(parts)) if place not in spread]
    some = [parts[place] for place in plain]
    rooms = _rooms(some, [devices[place] for place in plain])
    load.is_pinning()
    load.report._add(into(some, rooms, stop, threads))
    for place, room in zip(plain, rooms, strict=True):
        made[place] = room
    for places in batches(spread, _SPREAD, lambda place: spread[place][0].nbytes):
        read = [spread[place][0] for place in places]
        held = [torch.empty(part.nbytes, dtype=torch.uint8, device=devices[place])
                for part, place in zip(read, places, strict=True)]  # fmt: skip
        load.report._add(into(read, held, stop, threads))
        for place in places:
            _, axes, run = spread[place]
            made[place] = in_order(held.pop(0), axes, run, parts[place])
    return made


def _shared(parts, devices, shared, load, stop, threads):
    """The same where some devices use the host's memory: what is theirs is used where it was read to."""
    made = [None] * len(parts)
    for device, is_shared in shared.items():
        here = [place for place, one in enumerate(devices) if one == device]
        some = [parts[place] for place in here]
        if is_shared:
            memory, told = _ckptfs.load_on_device(some, device.index, settings.on_devices(), stop, threads)
            load.report._add(told)
            loaded = [_taken(held, part, device) for held, part in zip(memory, some, strict=True)]
        else:
            loaded = _load(some, [device] * len(some), load, stop, threads)
        for place, tensor in zip(here, loaded, strict=True):
            made[place] = tensor
    return made


def _taken(memory, part, device):
    """A tensor of memory that is not torch's."""
    kind, shape = Torch.type(part.dtype), Torch.shape(part.dtype, part.shape)
    if not part.nbytes:
        return torch.empty(shape, dtype=kind, device=device)
    unsigned, bits = 1, 8
    return torch.from_dlpack(_ckptfs.dlpack(memory, unsigned, bits, [len(memory)], False)).view(kind).view(shape)


def into(parts, targets, stop=None, threads=None):
    """Loads each into a tensor on a device, which is contiguous and has as many bytes. Gives what that did."""
    todo = [(part, target) for part, target in zip(parts, targets, strict=True) if part.nbytes]
    if not todo:
        return {}
    devices = [target.device.index for _, target in todo]
    for device in dict.fromkeys(devices):
        with torch.cuda.device(device):
            if torch.cuda.is_current_stream_capturing():
                raise error(f"cuda:{device}: a load cannot be part of a CUDA graph",
                            "load before the capture begins")  # fmt: skip
    streams = [(device, torch.cuda.current_stream(device).cuda_stream) for device in dict.fromkeys(devices)]
    return _ckptfs.load_to_devices(
        [part for part, _ in todo], [target.data_ptr() for _, target in todo], devices, streams,
        settings.on_devices(), stop, threads,
    )  # fmt: skip


class Aside:
    """What loads in the background: `with` it, tensors are made on a stream of its own, so that nobody's work
    waits for them before they are handed over."""

    def __init__(self, device):
        self._device = _whole(device)
        self._stream = torch.cuda.Stream(self._device)
        self._current = torch.cuda.stream(self._stream)

    def __enter__(self):
        self._current.__enter__()
        return self

    def __exit__(self, *raised):
        self._current.__exit__(*raised)

    def mark(self):
        """What was made so far."""
        return self._stream.record_event()

    def hand_over(self, tensor, mark):
        """Gives a tensor to the work of this thread, which waits for it; its memory is not given to others
        before that work is done."""
        current = torch.cuda.current_stream(self._device)
        current.wait_event(mark)
        tensor.record_stream(current)


def in_order(held, axes, run, part):
    """A tensor whose elements lie spread out in what is held: pieces of `run` bytes, at steps of `axes`."""
    kind = Torch.type(part.dtype)
    size = kind.itemsize
    counts, steps = [count for count, _ in axes], [step // size for _, step in axes]
    pieces = held.view(Torch.alike(kind)).as_strided([*counts, run // size], [*steps, 1])
    return pieces.contiguous().view(kind).view(Torch.shape(part.dtype, part.shape))


def _whole(device):
    """A device with its number: of one without, the current one."""
    return torch.device("cuda", torch.cuda.current_device()) if device.index is None else device


def _rooms(parts, devices):
    """Memory for each. What is small shares blocks, in the order in which it comes, so that what lies together
    is copied together; a block stays as long as one of its tensors does."""
    rooms, blocks = [None] * len(parts), {}
    for place, (part, device) in enumerate(zip(parts, devices, strict=True)):
        if 0 < part.nbytes < _LARGE:
            blocks.setdefault(device, []).append(place)
        else:
            kind = Torch.type(part.dtype)
            rooms[place] = torch.empty(Torch.shape(part.dtype, part.shape), dtype=kind, device=device)
    for device, places in blocks.items():
        for some in batches(places, _BLOCK, lambda place: _aligned(parts[place].nbytes)):
            sizes = [_aligned(parts[place].nbytes) for place in some]
            block = torch.empty(sum(sizes), dtype=torch.uint8, device=device)
            starts = itertools.accumulate(sizes, initial=0)
            typed = {}
            for place, start in zip(some, starts, strict=False):
                part = parts[place]
                kind, shape = Torch.type(part.dtype), Torch.shape(part.dtype, part.shape)
                if kind not in typed:
                    typed[kind] = block.view(kind)
                # One view: each costs as much as copying a small tensor.
                rooms[place] = typed[kind].as_strided(shape, _strides(shape), start // kind.itemsize)
    return rooms


def _strides(shape):
    """Of a contiguous tensor."""
    return [1, *itertools.accumulate(reversed(shape[1:]), operator.mul)][::-1] if shape else []


def _aligned(size):
    return -(-size // _ALIGNMENT) * _ALIGNMENT
