"""Element types: their names in a safetensors header, and what torch calls them.

No package is imported before one of its types is asked for.
"""

import functools

from ckptfs._errors import error

# By the name in a header, the name that torch and numpy have for it.
TYPES = {
    "BOOL": "bool", "U8": "uint8", "I8": "int8", "U16": "uint16", "I16": "int16", "U32": "uint32",
    "I32": "int32", "U64": "uint64", "I64": "int64", "F16": "float16", "BF16": "bfloat16",
    "F32": "float32", "F64": "float64", "C64": "complex64", "F8_E5M2": "float8_e5m2",
    "F8_E4M3": "float8_e4m3fn", "F8_E5M2FNUZ": "float8_e5m2fnuz", "F8_E4M3FNUZ": "float8_e4m3fnuz",
    "F8_E8M0": "float8_e8m0fnu", "F4": "float4_e2m1fn_x2",
}  # fmt: skip

# Floating-point types that can be cast to one another. Two elements of F4 share a byte.
FLOATS = {name for name, native in TYPES.items() if "float" in native} - {"F4"}


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
    """The integer type of torch with the same size, whose values can be copied whatever they mean."""
    import torch

    return {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[dtype.itemsize]
