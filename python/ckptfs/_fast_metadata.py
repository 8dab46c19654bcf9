"""What a checkpoint says of itself, as fastsafetensors has it: read from a path, a descriptor, memory or a header,
and made into tensors of memory that somebody else filled.

In: a checkpoint of any format. Out: `SafeTensorsMetadata`. Of one that is no safetensors file header and offsets
are those of the virtual file.
"""

import contextlib
import ctypes
import os

import torch

from ckptfs import _ckptfs
from ckptfs._errors import SafetensorError, error, of_system, path_of
from ckptfs._fast_frames import TensorFrame
from ckptfs._fast_types import DeviceType, DType, TorchTensor, as_device, as_dtype, cast, native
from ckptfs._frameworks import Torch
from ckptfs._source import options

# No reader takes a header of more bytes.
_MOST = 100_000_000

# What devices want the first byte of a buffer to be a multiple of.
_ALIGNMENT = 16


def check_framework(given):
    """Of `framework=`, which programs give as a name or as fastsafetensors' own object."""
    name = given.get_name() if hasattr(given, "get_name") else given
    if name not in ("pytorch", "pt", "torch"):
        raise error(f"framework {name!r} is invalid", 'use "pytorch"')


class SafeTensorsMetadata:
    """What a checkpoint says of itself.

    `src` is its path as it was given, `metadata` what it has beside tensors, `tensors` a `TensorFrame` for each
    name, in the order in which they lie. `header_length` is where their bytes begin, `size_bytes` where they end,
    and `aligned` says whether a copy of the file has them where devices want them. With `keep_orig_dict` `ser` has
    the entries of the header by their names.

        metadata = SafeTensorsMetadata.from_file("models/llama", "pytorch")
        metadata.tensors["model.norm.weight"].shape
    """

    def __init__(self, string, header_length, size_bytes, framework, src="", keep_orig_dict=False):
        """Of the text of a safetensors header that takes `header_length` bytes, its length included, of a file of
        `size_bytes`."""
        check_framework(framework)
        header = string.encode()
        if len(header) + 8 != header_length:
            raise error(f"{src}: header_length={header_length}, and the header has {len(header) + 8} bytes",
                        "give the bytes of the text and 8 more", ValueError)  # fmt: skip
        with _sparse(len(header).to_bytes(8, "little") + header, size_bytes) as number:
            self._take(_opened_at(number, src), src, framework, keep_orig_dict)

    @classmethod
    def from_file(cls, filename, framework):
        """Of the checkpoint at a path."""
        return cls.of(_ckptfs.Opened(path_of(filename), options()), filename, framework)

    @classmethod
    def from_fd(cls, fd, filename, framework, keep_orig_dict=False):
        """Of an open file, from its first byte on, wherever it was read last; `filename` is what it is called."""
        # What is no descriptor is the system's error.
        os.fstat(fd)
        return cls.of(_opened_at(fd, filename), filename, framework, keep_orig_dict)

    @classmethod
    def from_buffer(cls, buf, buffer_len, filename, framework):
        """Of a file in memory: `buffer_len` bytes from the address `buf` on. Of a safetensors file only the header
        is read."""
        check_framework(framework)
        if buffer_len < 8 or not buf:
            raise error(f"{filename}: {buffer_len} bytes at {buf:#x} are no checkpoint", "give all of the file")
        data = memoryview((ctypes.c_ubyte * buffer_len).from_address(buf)).cast("B")
        if data[8:9] == b"{":
            end = 8 + min(int.from_bytes(data[:8], "little"), _MOST)
            with _sparse(data[:end], buffer_len) as number:
                return cls.of(_opened_at(number, filename), filename, framework)
        with _called(filename, "bytes in memory"):
            opened = _ckptfs.Opened.of_bytes(bytes(data), options())
        return cls.of(opened, filename, framework)

    @classmethod
    def of(cls, opened, src, framework="pytorch", keep_orig_dict=False):
        """Of a checkpoint that is open."""
        check_framework(framework)
        made = cls.__new__(cls)
        made._take(opened, src, framework, keep_orig_dict)
        return made

    def _take(self, opened, src, framework, keep_orig_dict):
        self.src, self.framework, self.metadata = src, framework, opened.metadata or {}
        self.header_length, self.size_bytes = opened.data_range
        self.aligned = self.header_length % _ALIGNMENT == 0
        entries = {name: _entry(opened, name) for name in opened.names}
        for name, entry in entries.items():
            if entry["dtype"] not in DType.__members__:
                raise error(f"{src}: {name}: torch has no type for {entry['dtype']}",
                            "load the file with another package", ValueError)  # fmt: skip
        self.tensors = {name: TensorFrame.from_buffer(entry) for name, entry in entries.items()}
        if keep_orig_dict:
            self.ser = entries

    def get_tensors(self, gbuf, device, copy_start_offset, dtype=DType.AUTO, owner=None):
        """Its tensors, as `TorchTensor` by their names, in memory on a device that has the file's bytes from
        `copy_start_offset` on, beginning at `gbuf.get_base_address()`. They use that memory, and keep `gbuf` and
        `owner` alive; those that are cast, or do not lie where their type can be read, have memory of their
        own."""
        device, dtype = as_device(device), as_dtype(dtype)
        begin = gbuf.get_base_address() + self.header_length - copy_start_offset
        made = {}
        for name, frame in self.tensors.items():
            kind, shape = Torch.type(frame.dtype.value), native(frame.dtype, frame.shape)
            start, end = frame.data_offsets
            if start == end:
                raw = torch.empty(shape, dtype=kind, device=device.as_str())
            else:
                raw = _bytes_at(begin + start, end - start, device, (gbuf, owner))
                if (begin + start) % kind.itemsize:
                    raw = raw.clone()
                raw = raw.view(kind).view(shape)
            raw = cast(name, raw, frame.dtype, dtype)
            made[name] = TorchTensor(device, frame.dtype if dtype is DType.AUTO else dtype, raw)
        return made

    def select_byte_ranges(self, keep_tensor, merge_gap=4096):
        """Where in the file the bytes of those tensors lie whose name `keep_tensor` is true of: pairs of a first
        byte and the one after the last, in order, across gaps of up to `merge_gap` bytes."""
        merged = []
        for name, frame in self.tensors.items():
            start, end = (self.header_length + offset for offset in frame.data_offsets)
            if start == end or not keep_tensor(name):
                continue
            if merged and start - merged[-1][1] <= merge_gap:
                merged[-1][1] = end
            else:
                merged.append([start, end])
        return [tuple(both) for both in merged]

    def __repr__(self):
        return f"<metadata of {self.src!r}: {len(self.tensors)} tensors>"


def _entry(opened, name):
    tensor = opened.tensor(name)
    return {"dtype": tensor.dtype, "shape": tensor.shape, "data_offsets": list(opened.data_offsets(name))}


@contextlib.contextmanager
def _sparse(begin, size):
    """A descriptor of a file that begins so and has nothing behind it, but is as long as the whole."""
    number = os.memfd_create("ckptfs header", os.MFD_CLOEXEC)
    try:
        with open(number, "wb", closefd=False) as file:
            file.write(begin)
        os.ftruncate(number, size)
        yield number
    finally:
        os.close(number)


def _opened_at(number, filename):
    path = f"/proc/self/fd/{number}"
    with _called(filename, path):
        return _ckptfs.Opened(path, options())


@contextlib.contextmanager
def _called(filename, path):
    """What goes wrong is told of the name that the user knows."""
    try:
        yield
    except (OSError, SafetensorError) as fault:
        if isinstance(fault, OSError):
            made = of_system(OSError(fault.errno, os.strerror(fault.errno)), filename)
        else:
            made = error(str(fault).replace(path, str(filename)))
        made.__notes__ = getattr(fault, "__notes__", [])
        raise made from None


class _Held:
    """Memory of a CUDA device, for whoever takes it as an array; what it belongs to is kept alive."""

    def __init__(self, address, size, owners):
        self.owners = owners
        self.__cuda_array_interface__ = {
            "version": 3, "typestr": "|u1", "shape": (size,), "strides": None, "data": (address, False),
        }  # fmt: skip


def _bytes_at(address, size, device, owners):
    if device.type is not DeviceType.CPU:
        return torch.as_tensor(_Held(address, size, owners), device=device.as_str())
    held = (ctypes.c_ubyte * size).from_address(address)
    held.owners = owners
    return torch.frombuffer(held, dtype=torch.uint8)
