"""Tensors on CUDA devices: memory of torch's own allocator, which the Rust part fills.

Nothing waits for the last bytes: work that torch's current stream gets from then on finds them there. Memory that
torch gives out anew is not written to before the work that had it is done.
"""

import itertools
import operator

import torch

from ckptfs import _ckptfs, settings
from ckptfs.dtypes import torch_dtype, torch_integer, torch_shape
from ckptfs.errors import error
from ckptfs.load.pipeline import batches

# Tensors of at least the first have memory of their own. Smaller ones share blocks of at most the second.
_LARGE_BYTES, _BLOCK_BYTES = 1 << 20, 4 << 20

# Where tensors begin in a block: torch's kernels and others expect that of memory of a device.
_ALIGNMENT_BYTES = 256

# Tensors whose pieces are shorter than the first are put in order on the device, at most the second at a time.
_SHORT_BYTES, _SPREAD_BYTES = 512, 256 << 20


def obstacle(device):
    """Why the Rust part cannot load to a device; `None` if it can."""
    if device.type != "cuda" or not torch.version.cuda:
        return f"torch copies what is loaded to {device.type}"
    # Raises torch's own error where torch cannot use CUDA.
    torch.cuda.init()
    if _with_index(device).index >= torch.cuda.device_count():
        raise error(f"{device}: no such device, {torch.cuda.device_count()} found",
                    "list the devices with `nvidia-smi`")  # fmt: skip
    return _ckptfs.device_obstacle(_with_index(device).index, settings.device_settings())


def load_to_devices(parts, devices, load):
    """A tensor of each part, on its device."""
    numbered = {device: _with_index(device) for device in dict.fromkeys(devices)}
    devices = [numbered[device] for device in devices]
    # Memory of torch's allocator would be a copy where a device uses the host's.
    shared = {device for device in dict.fromkeys(devices)
              if _ckptfs.is_integrated(device.index, settings.device_settings())}  # fmt: skip
    if not shared:
        return _load_to_own_memory(parts, devices, load)
    tensors = [None] * len(parts)
    for device in dict.fromkeys(devices):
        places = [place for place, other in enumerate(devices) if other == device]
        batch = [parts[place] for place in places]
        loaded = (_load_to_shared_memory(batch, device, load) if device in shared
                else _load_to_own_memory(batch, [device] * len(batch), load))  # fmt: skip
        for place, tensor in zip(places, loaded, strict=True):
            tensors[place] = tensor
    return tensors


def _load_to_own_memory(parts, devices, load):
    """Tensors in memory of devices, which torch gives."""
    tensors = [None] * len(parts)
    spread = _ckptfs.strided_spans(parts, _SHORT_BYTES, _SPREAD_BYTES)
    plain = [place for place in range(len(parts)) if place not in spread]
    batch = [parts[place] for place in plain]
    targets = _allocate(batch, [devices[place] for place in plain])
    load.mark_pinning()
    load.report._add(fill_on_devices(batch, targets, load))
    for place, target in zip(plain, targets, strict=True):
        tensors[place] = target
    for places in batches(spread, _SPREAD_BYTES, lambda place: spread[place][0].nbytes):
        batch = [spread[place][0] for place in places]
        held = [torch.empty(part.nbytes, dtype=torch.uint8, device=devices[place])
                for part, place in zip(batch, places, strict=True)]  # fmt: skip
        load.report._add(fill_on_devices(batch, held, load))
        for place in places:
            _, axes, run = spread[place]
            tensors[place] = in_order(held.pop(0), axes, run, parts[place])
    return tensors


def _load_to_shared_memory(parts, device, load):
    """Tensors of a device that uses the host's memory, where they were read to."""
    memory, counts = _ckptfs.load_on_device(parts, device.index, settings.device_settings(), load.stop, load.threads)
    load.report._add(counts)
    return [_from_foreign_memory(held, part, device) for held, part in zip(memory, parts, strict=True)]


def _from_foreign_memory(memory, part, device):
    """A tensor of memory that is not torch's."""
    dtype, shape = torch_dtype(part.dtype), torch_shape(part.dtype, part.shape)
    if not part.nbytes:
        return torch.empty(shape, dtype=dtype, device=device)
    capsule = _ckptfs.dlpack_capsule(memory, "U8", [len(memory)], False)
    return torch.from_dlpack(capsule).view(dtype).view(shape)


def fill_on_devices(parts, targets, load):
    """Loads each part into a contiguous tensor on a device that has as many bytes. Returns what was done."""
    pairs = [(part, target) for part, target in zip(parts, targets, strict=True) if part.nbytes]
    if not pairs:
        return {}
    devices = [target.device.index for _, target in pairs]
    for device in dict.fromkeys(devices):
        with torch.cuda.device(device):
            if torch.cuda.is_current_stream_capturing():
                raise error(f"cuda:{device}: a load cannot be part of a CUDA graph",
                            "load before the capture begins")  # fmt: skip
    streams = [(device, torch.cuda.current_stream(device).cuda_stream) for device in dict.fromkeys(devices)]
    return _ckptfs.load_to_devices(
        [part for part, _ in pairs], [target.data_ptr() for _, target in pairs], devices, streams,
        settings.device_settings(), load.stop, load.threads,
    )  # fmt: skip


class BackgroundStream:
    """A stream for loads in the background. Within `with`, tensors are made on it, so that no other work waits for
    them before they are handed over."""

    def __init__(self, device):
        self._device = _with_index(device)
        self._stream = torch.cuda.Stream(self._device)
        self._current = torch.cuda.stream(self._stream)

    def __enter__(self):
        self._current.__enter__()
        return self

    def __exit__(self, *raised):
        self._current.__exit__(*raised)

    def mark(self):
        """An event behind what was made so far."""
        return self._stream.record_event()

    def hand_over(self, tensor, mark):
        """Gives a tensor to the work of this thread, which waits for it. Its memory is not given out again before
        that work is done."""
        current = torch.cuda.current_stream(self._device)
        current.wait_event(mark)
        tensor.record_stream(current)


def in_order(held, axes, run, part):
    """A contiguous tensor of elements that lie spread out in `held`: pieces of `run` bytes, at the steps of `axes`."""
    dtype = torch_dtype(part.dtype)
    size = dtype.itemsize
    counts, steps = [count for count, _ in axes], [step // size for _, step in axes]
    pieces = held.view(torch_integer(dtype)).as_strided([*counts, run // size], [*steps, 1])
    return pieces.contiguous().view(dtype).view(torch_shape(part.dtype, part.shape))


def _with_index(device):
    """A device with its number; the current one if it has none."""
    return torch.device("cuda", torch.cuda.current_device()) if device.index is None else device


def _allocate(parts, devices):
    """A tensor without values for each part.

    Small ones share blocks in their order, so that what lies together is copied together. A block stays as long as
    one of its tensors does."""
    targets, small = [None] * len(parts), {}
    for place, (part, device) in enumerate(zip(parts, devices, strict=True)):
        if 0 < part.nbytes < _LARGE_BYTES:
            small.setdefault(device, []).append(place)
        else:
            dtype = torch_dtype(part.dtype)
            targets[place] = torch.empty(torch_shape(part.dtype, part.shape), dtype=dtype, device=device)
    for device, its_places in small.items():
        for places in batches(its_places, _BLOCK_BYTES, lambda place: _aligned(parts[place].nbytes)):
            sizes = [_aligned(parts[place].nbytes) for place in places]
            block = torch.empty(sum(sizes), dtype=torch.uint8, device=device)
            starts = itertools.accumulate(sizes, initial=0)
            typed = {}
            for place, start in zip(places, starts, strict=False):
                part = parts[place]
                dtype, shape = torch_dtype(part.dtype), torch_shape(part.dtype, part.shape)
                if dtype not in typed:
                    typed[dtype] = block.view(dtype)
                # One view: each costs as much as copying a small tensor.
                targets[place] = typed[dtype].as_strided(shape, _strides(shape), start // dtype.itemsize)
    return targets


def _strides(shape):
    """The strides of a contiguous tensor."""
    return [1, *itertools.accumulate(reversed(shape[1:]), operator.mul)][::-1] if shape else []


def _aligned(size):
    return -(-size // _ALIGNMENT_BYTES) * _ALIGNMENT_BYTES
