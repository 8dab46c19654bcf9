"""Compares an exported file, and a load by the Python package, with the expected tensors: format, names, types,
shapes and every bit."""

import json
import random
import struct

import torch
from ckptfs import safe_open as open_with_ours
from ckptfs.torch import load_file as load_with_ours
from safetensors import safe_open

DATA_ALIGNMENT = 4096

# Bytes of an element by the type's name in a header. Two elements of F4 share a byte.
ITEM_BYTES = {
    "BOOL": 1, "U8": 1, "I8": 1, "F4": 1,
    "F8_E5M2": 1, "F8_E4M3": 1, "F8_E5M2FNUZ": 1, "F8_E4M3FNUZ": 1, "F8_E8M0": 1,
    "U16": 2, "I16": 2, "F16": 2, "BF16": 2,
    "U32": 4, "I32": 4, "F32": 4,
    "U64": 8, "I64": 8, "F64": 8, "C64": 8,
}  # fmt: skip

# Bits are compared as integers: a NaN then equals itself, and types without arithmetic compare too.
INTEGER = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def bits(tensor):
    return tensor.detach().as_subclass(torch.Tensor).view(INTEGER[tensor.dtype.itemsize])


def read_header(path):
    """The header's entries and metadata, and where the data starts."""
    with path.open("rb") as file:
        (length,) = struct.unpack("<Q", file.read(8))
        pairs = json.loads(file.read(length), object_pairs_hook=list)
    names = [name for name, _ in pairs]
    assert len(names) == len(set(names)), "a name stands twice"
    entries = {name: dict(fields) for name, fields in pairs}
    return entries, entries.pop("__metadata__"), 8 + length


def check_format(path):
    """Asserts what every exported file promises to its readers. Gives its metadata."""
    entries, metadata, data = read_header(path)
    assert metadata["format"] == "pt"
    assert data % DATA_ALIGNMENT == 0
    end = 0
    for name, entry in sorted(entries.items(), key=lambda item: item[1]["data_offsets"]):
        start, stop = entry["data_offsets"]
        assert start == end, f"hole or overlap before {name!r}"
        assert start % ITEM_BYTES[entry["dtype"]] == 0, f"{name!r} is not aligned"
        end = stop
    assert path.stat().st_size == data + end
    return metadata


def check_tensors(path, expected):
    """Asserts that the file holds exactly the expected tensors, bit for bit."""
    with safe_open(path, framework="pt") as file:
        assert sorted(file.keys()) == sorted(expected)
        for name, tensor in expected.items():
            got = file.get_tensor(name)
            assert got.dtype == tensor.dtype, name
            assert got.shape == tensor.shape, name
            assert torch.equal(bits(got), bits(tensor)), f"{name!r} has other values"


def same(got, expected):
    """Asserts that two tensors have the same type, shape and bits."""
    assert got.dtype == expected.dtype and got.shape == expected.shape
    assert torch.equal(bits(got.contiguous()), bits(expected.contiguous()))


def check_same(got, expected):
    """Asserts that the tensors are exactly the expected ones, bit for bit."""
    assert sorted(got) == sorted(expected)
    for name, tensor in expected.items():
        assert (got[name].dtype, got[name].shape) == (tensor.dtype, tensor.shape), name
        assert torch.equal(bits(got[name]), bits(tensor)), f"{name!r} has other values"


def any_index(rng, shape):
    """An index of integers, slices and perhaps an ellipsis that lies within the shape."""
    index = []
    for size in shape[: rng.randint(0, len(shape))]:
        start = rng.randint(0, size)
        stop, step = rng.randint(start, size), rng.randint(1, 3)
        start -= size * rng.randint(0, 1) if start else 0
        ways = [slice(None), slice(start, None, step), slice(start or None, stop, step)]
        # A negative stop counts from the end.
        ways += [slice(None, stop - size)] if stop < size else []
        index.append(rng.choice(ways + [rng.randint(-size, size - 1)] * 2 if size else ways[:1]))
    if rng.random() < 0.3:
        # Items after the ellipsis belong to the last axes.
        tail = [slice(None)] * rng.randint(0, len(shape) - len(index))
        return (*index, ..., *tail)
    return tuple(index) if len(index) != 1 or rng.random() < 0.5 else index[0]


def spelled(name):
    """An option as the command line spells it."""
    return f"--{name.replace('_', '-')}"


def check_loads(source, expected, *options):
    """Asserts that the package loads the expected tensors: mapped and owned, whole and in slices."""
    how = {name: True for name in ("allow_partial", "follow_symlinks") if spelled(name) in options}
    if spelled("root") in options:
        how["root"] = options[options.index(spelled("root")) + 1]
    for backend in "mmap", "pread":
        check_same(load_with_ours(source, backend=backend, **how), expected)
        rng = random.Random(repr(sorted(expected)))
        with open_with_ours(source, "pt", backend=backend, **how) as file:
            for name, tensor in expected.items():
                # Of types that share a byte, torch counts bytes on the last axis and ckptfs counts elements.
                packed = tensor.dtype is torch.float4_e2m1fn_x2
                index = any_index(rng, tensor.shape[:-1] if packed else tensor.shape)
                got = file.get_slice(name)[index]
                part = tensor.detach().as_subclass(torch.Tensor)[index].contiguous()
                check_same({name: got}, {name: part})


def check_export(ckptfs, source, expected, out, *options):
    """Exports twice, and asserts that the file is well formed, as expected and the same both times. Asserts the same
    of a load."""
    check_loads(source, expected, *options)
    ckptfs.export(source, out, *options)
    metadata = check_format(out)
    check_tensors(out, expected)
    again = ckptfs.export(source, out.with_name("again.safetensors"), *options)
    assert again.read_bytes() == out.read_bytes()
    return metadata


def names_of(value):
    """The tensors of a value by the names that they must get."""
    return {"tensor": value} if isinstance(value, torch.Tensor) else _flatten(value, "")


def _flatten(value, prefix):
    if isinstance(value, dict):
        members = value.items()
    else:
        members = enumerate(value) if isinstance(value, (list, tuple)) else ()
    named = {}
    for key, member in members:
        name = f"{prefix}{key}"
        is_tensor = isinstance(member, torch.Tensor)
        named |= {name: member} if is_tensor else _flatten(member, f"{name}.")
    return named
