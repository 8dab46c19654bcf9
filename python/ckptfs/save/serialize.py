"""Writing the safetensors format, byte for byte as safetensors writes it.

In: what each tensor is, and where its bytes are in memory. Out: these bytes behind a header. A file has its name only
when it is whole. `deserialize` is the way back.
"""

import ctypes
import errno
import json
import math
import os
import shlex

from ckptfs import _ckptfs
from ckptfs.dtypes import BITS, TYPES
from ckptfs.errors import error, of_system
from ckptfs.load.pipeline import open_bytes
from ckptfs.save.atomic_file import replacing
from ckptfs.settings import LoadOptions, parse_path

# By what torch and numpy call them, the names of types in a header.
_NAMES = {native: name for name, native in TYPES.items()}

# A file begins with the last of these.
_ORDER = {name: place for place, name in enumerate(BITS)}


class TensorSpec:
    """A tensor to be written: its type by torch's or numpy's name for it, its shape, and where its bytes are.

    The caller keeps the bytes there until they are written."""

    __slots__ = ("dtype", "shape", "data_ptr", "data_len")

    def __init__(self, *, dtype, shape, data_ptr, data_len):
        if not isinstance(dtype, str) or dtype not in _NAMES:
            raise error(f"Unknown dtype {dtype!r}. Supported dtypes: {', '.join(_NAMES)}")
        self.dtype, self.shape = _NAMES[dtype], [int(size) for size in shape]
        if self.dtype == "F4" and self.shape:
            self.shape[-1] *= 2
        self.data_ptr, self.data_len = int(data_ptr), int(data_len)

    def _bytes(self):
        """Its bytes in parts. What holds a part is kept until the next one is asked for."""
        yield memoryview((ctypes.c_ubyte * self.data_len).from_address(self.data_ptr)).cast("B")

    def __repr__(self):
        return f"TensorSpec({self.dtype}, {self.shape}, {self.data_len} bytes)"


def check_dtype(name, dtype):
    """Refuses a type of torch or numpy, by its name there, that the format lacks."""
    if dtype not in _NAMES:
        like = "complex64" if dtype.startswith("complex") else "float32"
        raise error(f"{name}: the format has no type {dtype}", f"cast it to a type that the format has, such as {like}")


def file_parts(tensors, metadata):
    """The bytes of a file: a header, then those of each tensor, fetched when they are asked for."""
    if not isinstance(tensors, dict):
        raise TypeError(f"expected a dictionary of TensorSpec by their names, got {type(tensors)}")
    for name, spec in tensors.items():
        if not isinstance(name, str):
            raise TypeError(f"{name!r}: the name of a tensor must be text, got {type(name)}")
        if not isinstance(spec, TensorSpec):
            raise TypeError(f"{name}: expected TensorSpec, got {type(spec)}")
        if math.prod(spec.shape) * BITS[spec.dtype] != spec.data_len * 8:
            raise error(f"Error while serializing: {name}: {spec.data_len} bytes are not "
                        f"{spec.dtype} {spec.shape}")
        if spec.data_len and not spec.data_ptr:
            raise error(f"Error while serializing: {name}: its {spec.data_len} bytes are nowhere")
        if name == "__metadata__":
            raise error("Error while serializing: no tensor can have the name __metadata__", "rename it")
    header, at, ordered = {}, 0, sorted(tensors, key=lambda n: (-_ORDER[tensors[n].dtype], n))
    if metadata is not None:
        if not isinstance(metadata, dict):
            raise TypeError(f"metadata must be a dict of text for text, got {type(metadata)}")
        for key, value in metadata.items():
            if not isinstance(key, str) or not isinstance(value, str):
                raise TypeError(f"metadata must have text for text, got {key!r}: {value!r}")
        header["__metadata__"] = metadata
    for name in ordered:
        spec = tensors[name]
        end = at + spec.data_len
        header[name] = {"dtype": spec.dtype, "shape": spec.shape, "data_offsets": [at, end]}
        at = end
    try:
        text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
    except UnicodeEncodeError as fault:
        raise error(f"Error while serializing: {fault.object[max(0, fault.start - 20) : fault.end]!r}: a lone surrogate is no text",
                    "rename the tensor, or change the metadata", ValueError) from None  # fmt: skip
    text += b" " * (-len(text) % 8)
    yield len(text).to_bytes(8, "little") + text
    for name in ordered:
        spec = tensors[name]
        if spec.data_len:
            yield from spec._bytes()


def serialize(tensor_dict, metadata=None):
    """The bytes of a safetensors file with these `TensorSpec`s."""
    return b"".join(file_parts(tensor_dict, metadata))


def serialize_file(tensor_dict, filename, metadata=None, *, any_suffix=False):
    """Writes a safetensors file with these `TensorSpec`s. It replaces another only when it is whole. Tensors that are
    mapped from that one keep their bytes. A name with the suffix of another format, such as "x.bin", is refused unless
    `any_suffix` is true."""
    parts, filename = file_parts(tensor_dict, metadata), parse_path(filename)
    _ckptfs.check_output_path(filename, bool(any_suffix))
    try:
        if not os.path.basename(filename):
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR))
        with replacing(os.path.realpath(filename)) as file:
            for part in parts:
                file.write(part)
    except OSError as fault:
        raise of_system(fault, filename, _remedy(fault, filename)) from None


def _remedy(fault, filename):
    """What to do where a file cannot be saved; `None` where the message says it."""
    if isinstance(fault, IsADirectoryError):
        return f"name a file in it, such as {os.path.join(filename, 'model.safetensors')}"
    folder = os.path.dirname(filename)
    if isinstance(fault, FileNotFoundError) and folder and not os.path.lexists(folder):
        return f"make its directory: mkdir -p {shlex.quote(folder)}"
    return None


def deserialize(bytes):
    """The tensors of a checkpoint in memory: pairs of a name and a dictionary with `shape`, `dtype` and `data`."""
    checkpoint = open_bytes(bytes, LoadOptions())
    tensors = [checkpoint.tensor(name) for name in checkpoint.names]
    loaded, _ = _ckptfs.load(tensors)
    return [
        (tensor.name, {"shape": tensor.shape, "dtype": tensor.dtype, "data": bytearray(memory)})
        for tensor, memory in zip(tensors, loaded, strict=True)
    ]
