"""Tensors for cupy, jax and others that take DLPack: memory of the host or of a CUDA device, without torch."""

import math
import re
from typing import NamedTuple

from ckptfs import _ckptfs, settings
from ckptfs.dtypes import DLPACK_TYPES, load_elsewhere
from ckptfs.errors import error

# DLPack's numbers for where memory is.
_HOST, _CUDA = 1, 2


class DLPackDevice(NamedTuple):
    """A device of arrays; arrays of the host have none."""

    type: str
    index: int

    def __str__(self):
        return f"{self.type}:{self.index}"


class Array:
    """A contiguous tensor that other packages take as it is, with no copy: `cupy.from_dlpack(array)`,
    `jax.dlpack.from_dlpack(array)`. `dtype` is the type as a header calls it; `device` is "cpu" or as "cuda:0".
    """

    def __init__(self, memory, dtype, shape, device):
        self._memory, self.dtype, self.shape, self._device = memory, dtype, tuple(shape), device

    @property
    def device(self):
        return "cpu" if self._device is None else str(self._device)

    @property
    def nbytes(self):
        return len(self._memory)

    def __dlpack_device__(self):
        return (_HOST, 0) if self._device is None else (_CUDA, self._device.index)

    def __dlpack__(self, *, stream=None, max_version=None, dl_device=None, copy=None):
        # No stream has to wait: the bytes were there before this object.
        if copy or dl_device not in (None, self.__dlpack_device__()):
            raise BufferError("ckptfs hands on its own memory, and makes no copies of it")
        versioned = max_version is not None and max_version[0] >= 1
        return _ckptfs.dlpack_capsule(self._memory, self.dtype, list(self.shape), versioned)

    def __repr__(self):
        return f"<ckptfs.Array {self.dtype} {list(self.shape)} on {self.device}>"


class DLPack:
    """The framework of `framework="dlpack"`."""

    BACKEND = settings.PREAD
    # Some libraries refuse memory that is not aligned to 64 bytes.
    VECTOR_ALIGNED = True

    @staticmethod
    def dtype(name):
        """The name itself, if DLPack has that type."""
        if name not in DLPACK_TYPES:
            raise error(f"Dtype not understood: {name} (dlpack)", load_elsewhere(name))
        return name

    @staticmethod
    def parse_dtype(value):
        """Refuses to cast."""
        raise error("arrays for DLPack are handed on as they are stored", "cast them in the library that takes them")

    @staticmethod
    def parse_device(value):
        """A `DLPackDevice`; `None` for the host."""
        if value in (None, "cpu"):
            return None
        found = re.fullmatch(r"cuda(?::(\d+))?", value) if isinstance(value, str) else None
        if not found:
            raise error(f"device {value!r} is invalid for DLPack", 'give "cpu", or a CUDA device such as "cuda:0"')
        return DLPackDevice("cuda", int(found[1] or 0))

    @staticmethod
    def devices(device, tensors):
        """The device of each array."""
        return [device] * len(tensors)

    @staticmethod
    def device_obstacle(device):
        """`None`: refuses a device that the Rust part cannot load to, because nothing else can."""
        reason = _ckptfs.device_obstacle(device.index, settings.device_settings())
        if reason:
            raise error(reason, "load to the CPU")

    @staticmethod
    def load_to_devices(parts, devices, load):
        """An array of each part, on its device."""
        # A type that cannot be handed on is refused before anything is read.
        for part in parts:
            DLPack.dtype(part.dtype)
        arrays = [None] * len(parts)
        for device in dict.fromkeys(devices):
            places = [place for place, other in enumerate(devices) if other == device]
            load.mark_pinning()
            memory, counts = _ckptfs.load_on_device(
                [parts[place] for place in places], device.index, settings.device_settings(), load.stop, load.threads
            )
            load.report._add(counts)
            for place, held in zip(places, memory, strict=True):
                arrays[place] = Array(held, parts[place].dtype, parts[place].shape, device)
        return arrays

    @staticmethod
    def shape(name, shape):
        """The same shape."""
        return list(shape)

    @staticmethod
    def from_memory(memory, name, shape):
        """An array of these bytes, which it keeps alive."""
        return Array(memory, DLPack.dtype(name), shape, None)

    @staticmethod
    def reshape(array, name, shape):
        """The same bytes in another shape."""
        assert math.prod(shape) == math.prod(array.shape)
        return Array(array._memory, name, shape, array._device)

    @staticmethod
    def target_address(name, target, dtype, shape):
        """Refuses to load into arrays."""
        raise error(f"{name}: into= takes tensors of torch and arrays of numpy")
