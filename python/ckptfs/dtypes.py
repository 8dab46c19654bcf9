"""Element types: their names in a safetensors header, and what torch and numpy call them.

The table is that of the Rust part. No package is imported before one of its types is asked for.
"""

import functools
from typing import NamedTuple

from ckptfs import _ckptfs
from ckptfs.errors import error


class Dtype(NamedTuple):
    """An element type."""

    # In a header.
    name: str
    # For torch and numpy; `None` where neither has it.
    native: str | None
    bits: int
    # Elements that torch counts as one, because they share a byte.
    torch_packing: int
    has_dlpack: bool


# In the order by which the safetensors library sorts tensors: the last are first in a file.
DTYPES = {row[0]: Dtype(*row) for row in _ckptfs.DTYPES}

# Names in a header, with what torch and numpy call these types.
TYPES = {dtype.name: dtype.native for dtype in DTYPES.values() if dtype.native}

# Floating-point types that can be cast to one another: those of whole bytes.
FLOATS = {name for name, native in TYPES.items() if "float" in native and DTYPES[name].torch_packing == 1}


@functools.cache
def torch_dtype(name):
    """The type of torch for a name in a header."""
    import torch

    found = getattr(torch, TYPES.get(name, ""), None)
    if found is None:
        raise error(f"Dtype not understood: {name} (torch)", "use a version of torch that has it")
    return found


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
