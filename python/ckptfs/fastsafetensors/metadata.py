"""The metadata of a checkpoint, as fastsafetensors has it: read from a path, a descriptor, memory or a header.

A checkpoint that is no safetensors file has the header and offsets of its virtual file.
"""

import contextlib
import ctypes
import os

import torch

from ckptfs import _ckptfs
from ckptfs.dtypes import torch_dtype
from ckptfs.errors import SafetensorError, error, of_system
from ckptfs.fastsafetensors.frames import TensorFrame
from ckptfs.fastsafetensors.types import DeviceType, DType, TorchTensor, as_device, as_dtype, cast, native
from ckptfs.settings import LoadOptions, parse_path

# The longest header in bytes that readers take.
_MAX_HEADER = 100_000_000

# The alignment of buffers on devices, in bytes.
_ALIGNMENT = 16


def check_framework(framework):
    """Refuses all but torch. `framework` is a name, or fastsafetensors' own object."""
    name = framework.get_name() if hasattr(framework, "get_name") else framework
    if name not in ("pytorch", "pt", "torch"):
        raise error(f"framework {name!r} is invalid", 'use "pytorch"')


class SafeTensorsMetadata:
    """The header of a checkpoint.

    `src` is the path from the caller, `metadata` the text metadata. `tensors` has a `TensorFrame` for each name, in
    the order of their bytes. `header_length` is where their bytes begin, and `size_bytes` where they end. `aligned`
    says whether they begin at a multiple of the alignment of devices. With `keep_orig_dict`, `ser` has the entries
    of the header by name.

        metadata = SafeTensorsMetadata.from_file("models/llama", "pytorch")
        metadata.tensors["model.norm.weight"].shape
    """

    def __init__(self, string, header_length, size_bytes, framework, src="", keep_orig_dict=False):
        """Parses `string`, the text of a safetensors header. `header_length` is its length in bytes and 8 more, and
        `size_bytes` is the size of the file."""
        check_framework(framework)
        header = string.encode()
        if len(header) + 8 != header_length:
            raise error(f"{src}: header_length={header_length}, and the header has {len(header) + 8} bytes",
                        "give the bytes of the text and 8 more", ValueError)  # fmt: skip
        with _sparse(len(header).to_bytes(8, "little") + header, size_bytes) as number:
            self._fill(_open_descriptor(number, src), src, framework, keep_orig_dict)

    @classmethod
    def from_file(cls, filename, framework):
        """Reads the checkpoint at a path."""
        return cls.of(_ckptfs.Checkpoint(parse_path(filename), LoadOptions()), filename, framework)

    @classmethod
    def from_fd(cls, fd, filename, framework, keep_orig_dict=False):
        """Reads an open file from its first byte, whatever its offset, which stays. Errors name it `filename`."""
        # Raises the system's error for a bad descriptor.
        os.fstat(fd)
        return cls.of(_open_descriptor(fd, filename), filename, framework, keep_orig_dict)

    @classmethod
    def from_buffer(cls, buf, buffer_len, filename, framework):
        """Reads a file in memory: `buffer_len` bytes at the address `buf`. Of a safetensors file, reads only the
        header."""
        check_framework(framework)
        if buffer_len < 8 or not buf:
            raise error(f"{filename}: {buffer_len} bytes at {buf:#x} are no checkpoint", "give all of the file")
        data = memoryview((ctypes.c_ubyte * buffer_len).from_address(buf)).cast("B")
        if data[8:9] == b"{":
            end = 8 + min(int.from_bytes(data[:8], "little"), _MAX_HEADER)
            with _sparse(data[:end], buffer_len) as number:
                return cls.of(_open_descriptor(number, filename), filename, framework)
        with _errors_named(filename, "bytes in memory"):
            checkpoint = _ckptfs.Checkpoint.from_bytes(bytes(data), LoadOptions())
        return cls.of(checkpoint, filename, framework)

    @classmethod
    def of(cls, checkpoint, src, framework="pytorch", keep_orig_dict=False):
        """Reads an open checkpoint, `Checkpoint` of the Rust part."""
        check_framework(framework)
        result = cls.__new__(cls)
        result._fill(checkpoint, src, framework, keep_orig_dict)
        return result

    def _fill(self, checkpoint, src, framework, keep_orig_dict):
        self.src, self.framework, self.metadata = src, framework, checkpoint.metadata or {}
        self.header_length, self.size_bytes = checkpoint.data_range
        self.aligned = self.header_length % _ALIGNMENT == 0
        entries = {name: _entry(checkpoint, name) for name in checkpoint.names}
        for name, entry in entries.items():
            if entry["dtype"] not in DType.__members__:
                raise error(f"{src}: {name}: torch has no type for {entry['dtype']}",
                            "load the file with another package", ValueError)  # fmt: skip
        self.tensors = {name: TensorFrame.from_buffer(entry) for name, entry in entries.items()}
        if keep_orig_dict:
            self.ser = entries

    def get_tensors(self, gbuf, device, copy_start_offset, dtype=DType.AUTO, owner=None):
        """The tensors by name, as `TorchTensor`, in memory of a device that the caller has filled.

        From `gbuf.get_base_address()` on, that memory has the file's bytes from `copy_start_offset` on. Tensors use
        it, and keep `gbuf` and `owner` alive. Those that are cast or not aligned to their type are copies."""
        device, dtype = as_device(device), as_dtype(dtype)
        begin = gbuf.get_base_address() + self.header_length - copy_start_offset
        result = {}
        for name, frame in self.tensors.items():
            kind, shape = torch_dtype(frame.dtype.value), native(frame.dtype, frame.shape)
            start, end = frame.data_offsets
            if start == end:
                raw = torch.empty(shape, dtype=kind, device=device.as_str())
            else:
                raw = _bytes_at(begin + start, end - start, device, (gbuf, owner))
                if (begin + start) % kind.itemsize:
                    raw = raw.clone()
                raw = raw.view(kind).view(shape)
            raw = cast(name, raw, frame.dtype, dtype)
            result[name] = TorchTensor(device, frame.dtype if dtype is DType.AUTO else dtype, raw)
        return result

    def select_byte_ranges(self, keep_tensor, merge_gap=4096):
        """Byte ranges of the tensors whose names `keep_tensor` accepts, in order: pairs of the first byte and the one
        after the last. Ranges with a gap of at most `merge_gap` bytes are merged."""
        merged = []
        for name, frame in self.tensors.items():
            start, end = (self.header_length + offset for offset in frame.data_offsets)
            if start == end or not keep_tensor(name):
                continue
            if merged and start - merged[-1][1] <= merge_gap:
                merged[-1][1] = end
            else:
                merged.append([start, end])
        return [tuple(span) for span in merged]

    def __repr__(self):
        return f"<metadata of {self.src!r}: {len(self.tensors)} tensors>"


def _entry(checkpoint, name):
    tensor = checkpoint.tensor(name)
    return {"dtype": tensor.dtype, "shape": tensor.shape, "data_offsets": list(checkpoint.data_offsets(name))}


@contextlib.contextmanager
def _sparse(start, size):
    """A descriptor of a sparse file of `size` bytes that starts with the given bytes."""
    number = os.memfd_create("ckptfs header", os.MFD_CLOEXEC)
    try:
        with open(number, "wb", closefd=False) as file:
            file.write(start)
        os.ftruncate(number, size)
        yield number
    finally:
        os.close(number)


def _open_descriptor(number, filename):
    path = f"/proc/self/fd/{number}"
    with _errors_named(filename, path):
        return _ckptfs.Checkpoint(path, LoadOptions())


@contextlib.contextmanager
def _errors_named(filename, path):
    """Puts the name that the user knows into errors, instead of the path that was opened."""
    try:
        yield
    except (OSError, SafetensorError) as fault:
        if isinstance(fault, OSError):
            result = of_system(OSError(fault.errno, os.strerror(fault.errno)), filename)
        else:
            result = error(str(fault).replace(path, str(filename)))
        result.__notes__ = getattr(fault, "__notes__", [])
        raise result from None


class _CudaArray:
    """Memory of a CUDA device as an array, which keeps its owners alive."""

    def __init__(self, address, size, owners):
        self.owners = owners
        self.__cuda_array_interface__ = {
            "version": 3, "typestr": "|u1", "shape": (size,), "strides": None, "data": (address, False),
        }  # fmt: skip


def _bytes_at(address, size, device, owners):
    if device.type is not DeviceType.CPU:
        return torch.as_tensor(_CudaArray(address, size, owners), device=device.as_str())
    array = (ctypes.c_ubyte * size).from_address(address)
    array.owners = owners
    return torch.frombuffer(array, dtype=torch.uint8)
