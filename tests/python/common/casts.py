"""The casts that there are, and what torch makes of them."""

import torch

from compare import INTEGER, bits

FLOATS = ["float64", "float32", "float16", "bfloat16"]
FLOAT8S = ["float8_e4m3fn", "float8_e5m2", "float8_e4m3fnuz", "float8_e5m2fnuz", "float8_e8m0fnu"]

# Integers, and the types that hold each of their values.
INTEGERS = {
    "bool": "uint8 int8 int16 uint16 int32 uint32 int64 uint64 float64 float32 float16 bfloat16 "
    "float8_e4m3fn float8_e5m2 float8_e4m3fnuz float8_e5m2fnuz",
    "uint8": "int16 uint16 int32 uint32 int64 uint64 float64 float32 float16 bfloat16",
    "int8": "int16 int32 int64 float64 float32 float16 bfloat16",
    "uint16": "int32 uint32 int64 uint64 float64 float32",
    "int16": "int32 int64 float64 float32",
    "uint32": "int64 uint64 float64",
    "int32": "int64 float64",
}

# The NaN of each type, as docs/views.md has them.
NANS = {
    "float64": 0x7FF8000000000000,
    "float32": 0x7FC00000,
    "float16": 0x7E00,
    "bfloat16": 0x7FC0,
    "float8_e4m3fn": 0x7F,
    "float8_e5m2": 0x7F,
    "float8_e4m3fnuz": 0x80,
    "float8_e5m2fnuz": 0x80,
    "float8_e8m0fnu": 0xFF,
}


def name_of(dtype):
    return str(dtype).removeprefix("torch.")


def has_cast(one, other):
    names = name_of(one), name_of(other)
    return one == other or all(name in FLOATS + FLOAT8S for name in names) or names[1] in INTEGERS.get(names[0], "").split()


def cast(tensor, dtype):
    """What torch makes of a tensor, with the one NaN of the type."""
    if tensor.dtype == dtype:
        return tensor
    made = tensor.to(dtype)
    if name_of(dtype) in FLOATS + FLOAT8S:
        nan = torch.tensor(NANS[name_of(dtype)], dtype=torch.uint64).view(torch.int64).to(INTEGER[dtype.itemsize])
        made = torch.where(made.isnan(), nan, bits(made)).view(dtype)
    return made
