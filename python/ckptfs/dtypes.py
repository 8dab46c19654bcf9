"""Element types: their names in a safetensors header, and what torch and numpy call them.

The table is that of the Rust part. No package is imported before one of its types is asked for.
"""

import functools

from ckptfs import _ckptfs
from ckptfs.errors import error

# By its name in a header, what torch and numpy call a type.
TYPES = {name: native for name, native, *_ in _ckptfs.DTYPES if native}

# Floating-point types that can be cast to one another: torch counts each of their elements.
FLOATS = {name for name, native, _, packing, _ in _ckptfs.DTYPES if native and "float" in native and packing == 1}

# The bits of an element. The types are in the order by which safetensors sorts tensors: the last are first in a file.
BITS = {name: bits for name, _, bits, *_ in _ckptfs.DTYPES}

# What to do with a type that a framework lacks.
BYTES_REMEDY = "leave such tensors out with names=, or take their bytes: ckptfs.deserialize(open(path, \"rb\").read())"

DLPACK_TYPES = {name for name, *_, has_dlpack in _ckptfs.DTYPES if has_dlpack}


@functools.cache
def torch_dtype(name):
    """The type of torch for a name in a header."""
    import torch

    found = getattr(torch, TYPES.get(name, ""), None)
    if found is None:
        newer = f"install a torch that has torch.{TYPES[name]}; or, " if name in TYPES else ""
        raise error(f"Dtype not understood: {name} (torch)", f"{newer}{BYTES_REMEDY}")
    return found


def load_elsewhere(name):
    """The remedy for a type that a framework other than torch lacks."""
    return f"load it with torch; or, {BYTES_REMEDY}" if name in TYPES else BYTES_REMEDY


def torch_shape(name, shape):
    """The shape that torch has for a shape in a header: it counts bytes where elements share one."""
    if name != "F4":
        return list(shape)
    if not shape or shape[-1] % 2:
        raise error(f"F4 of shape {shape}: torch has two elements of a row in each byte, and no half of one")
    return [*shape[:-1], shape[-1] // 2]


def torch_integer(dtype):
    """The integer type of torch with the same size: integers can be copied whatever they mean."""
    import torch

    return {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[dtype.itemsize]
