"""Makes random checkpoints with torch: every type, layout and container that people save."""

import random
from collections import OrderedDict
from dataclasses import dataclass

import torch

# Types with a storage class of their own.
CLASSED = [
    torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64,
    torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.complex64,
]  # fmt: skip

# Types that torch saves over untyped storages. It writes them in the legacy form too, but cannot read that back.
UNCLASSED = [
    torch.uint16, torch.uint32, torch.uint64,
    torch.float8_e5m2, torch.float8_e4m3fn, torch.float8_e5m2fnuz, torch.float8_e4m3fnuz,
    torch.float8_e8m0fnu, torch.float4_e2m1fn_x2,
]  # fmt: skip

DTYPES = CLASSED + UNCLASSED

# Beginnings of names. None ends in a digit, so that a number at the end keeps names apart.
WORDS = [
    "weight", "layer.attn.q_proj.weight", "a/b", "../up", "größe", "重み", "😀", 'quo"te', "it's",
    "back\\slash", "new\nline", "tab\t", "nul\0", " space ", "__metadata__x", ".", "..", "%s{}",
]  # fmt: skip


class PlainTensor(torch.Tensor):
    """A subclass that adds nothing to the values."""


torch.serialization.add_safe_globals([PlainTensor])


@dataclass
class Checkpoint:
    """A value to save, and the keys that lead from it to the dictionary that must be shown."""

    saved: object
    path: tuple = ()

    def shown(self, value):
        for key in self.path:
            value = value[key]
        return value


def numbers(rng, dtype, count):
    """A flat tensor of any bits, with NaNs of every kind."""
    raw = rng.randbytes(count * dtype.itemsize)
    if dtype is torch.bool:
        raw = bytes(byte & 1 for byte in raw)
    return torch.frombuffer(bytearray(raw), dtype=torch.uint8).view(dtype)


def loose_tensors(rng, count):
    """Tensors that safetensors itself can save: contiguous, with storages of their own."""
    tensors = {}
    for place in range(count):
        flat = numbers(rng, rng.choice(DTYPES), rng.choice([1, 2, 3, 8, 60, 500]))
        columns = rng.choice([n for n in range(1, flat.numel() + 1) if flat.numel() % n == 0])
        shaped = flat.view(-1, columns)
        empty = torch.empty((0, 3), dtype=flat.dtype)
        tensors[f"{rng.choice(WORDS)}{place}"] = rng.choice([flat, shaped, shaped, empty])
    return tensors


class Writer:
    """One random checkpoint. Some tensors are views of storages that others use too."""

    def __init__(self, seed, dtypes=DTYPES):
        self.rng = random.Random(seed)
        self.dtypes = dtypes
        self.flats = []
        self.tensors = []
        self.named = 0

    def name(self):
        self.named += 1
        if self.rng.random() < 0.02 and self.named == 1:
            return ""
        return f"{self.rng.choice(WORDS)}{self.named}"

    def flat(self):
        """A flat tensor: new, or one that is in use, or one's bytes viewed as another type."""
        rng = self.rng
        if self.flats and rng.random() < 0.4:
            flat = rng.choice(self.flats)
            others = [dtype for dtype in UNCLASSED if dtype in self.dtypes]
            if flat.dtype is torch.uint8 and flat.numel() % 8 == 0 and others:
                return flat.view(rng.choice(others))
            return flat
        flat = numbers(rng, rng.choice(self.dtypes), rng.choice([1, 2, 7, 24, 64, 120, 1000]))
        self.flats.append(flat)
        return flat

    def view(self, flat):
        """A slice of a flat tensor."""
        rng = self.rng
        packed = flat.dtype is torch.float4_e2m1fn_x2
        size = flat.numel()
        kind = rng.randrange(10)
        if kind == 0:
            return flat
        if kind == 1:
            return flat[rng.randrange(size) :]
        if kind == 2:
            return flat[rng.randrange(size) :: rng.randint(2, 5)]
        if kind == 3:
            return self.rows(flat).t()
        if kind == 4:
            rows = self.rows(flat)
            cube = rows.reshape(rows.shape[0], 1, rows.shape[1])
            return cube.permute(*rng.sample(range(3), 3))
        if kind == 5:
            rows = self.rows(flat)
            start = rng.randrange(rows.shape[1])
            return rows.narrow(1, start, rng.randint(1, rows.shape[1] - start))
        if kind == 6:
            few = flat[: rng.randint(1, min(size, 9))]
            repeats = rng.randint(1, 5)
            return rng.choice(
                [few.expand(repeats, len(few)), few.unsqueeze(1).expand(len(few), repeats)]
            )
        if kind == 7 and not packed:
            return flat[rng.randrange(size)]
        if kind == 8:
            return torch.empty(rng.choice([(0,), (3, 0), (0, 2, 4)]), dtype=flat.dtype)
        return self.windows(flat)

    def rows(self, flat):
        """A matrix of any shape that divides it."""
        size = flat.numel()
        columns = self.rng.choice([n for n in range(1, size + 1) if size % n == 0])
        return flat.view(size // columns, columns)

    def windows(self, flat):
        """Any shape with any strides that stay inside: overlapping, repeating, with gaps."""
        rng = self.rng
        offset = rng.randrange(flat.numel())
        room = flat.numel() - 1 - offset
        shape, strides = [], []
        for _ in range(rng.randint(1, 4)):
            count = rng.randint(1, 5)
            stride = rng.randint(0, room // (count - 1)) if count > 1 else rng.randint(0, 9)
            room -= (count - 1) * stride
            shape.append(count)
            strides.append(stride)
        return flat.as_strided(shape, strides, offset)

    def tensor(self):
        rng = self.rng
        if self.tensors and rng.random() < 0.1:
            return rng.choice(self.tensors)
        tensor = self.view(self.flat())
        kind = rng.randrange(12)
        if kind == 0:
            needs_grad = tensor.is_floating_point() and rng.random() < 0.5
            tensor = torch.nn.Parameter(tensor, requires_grad=needs_grad)
        elif kind == 1:
            tensor = torch.nn.Parameter(tensor, requires_grad=False)
            tensor.remark = "a parameter with an attribute"
        elif kind == 2:
            tensor = torch.nn.Buffer(tensor)
        elif kind == 3:
            tensor = tensor.as_subclass(PlainTensor)
        self.tensors.append(tensor)
        return tensor

    def flat_dict(self):
        kind = self.rng.choice([dict, OrderedDict])
        return kind((self.name(), self.tensor()) for _ in range(self.rng.randint(1, 8)))

    def nested(self, depth=2):
        """Dictionaries and lists inside one another, with numbers and text between the tensors."""
        rng = self.rng
        named = {self.name(): self.tensor(), f"epoch{self.named}": rng.choice([3, 0.5, "x", None])}
        for _ in range(rng.randint(1, 3)):
            inner = [self.tensor(), (self.tensor(),)] if rng.random() < 0.3 else self.flat_dict()
            deeper = depth > 1 and rng.random() < 0.4
            named[f"{rng.choice(WORDS)}{self.named}x"] = self.nested(depth - 1) if deeper else inner
        return named

    def module(self):
        rng = self.rng
        return torch.nn.Sequential(
            torch.nn.Linear(rng.randint(1, 5), rng.randint(1, 5)),
            torch.nn.BatchNorm1d(rng.randint(1, 5)),
            torch.nn.Conv2d(rng.randint(1, 3), 2, 3),
        ).state_dict()

    def checkpoint(self):
        rng = self.rng
        kind = rng.randrange(10)
        if kind == 0:
            return Checkpoint(self.tensor())
        if kind == 1:
            return Checkpoint(rng.choice([list, tuple])(self.tensor() for _ in range(3)))
        if kind == 2:
            return Checkpoint([self.tensor(), self.flat_dict(), [self.tensor()]])
        state = rng.choice([self.flat_dict, self.nested, self.module])()
        beside = {"epoch": 3, "lr": 0.1, "optimizer": {"state": {0: self.tensor()}, "note": "x"}}
        if kind == 3:
            key = rng.choice(["state_dict", "model", "module"])
            return Checkpoint({**beside, key: state}, (key,))
        if kind == 4:
            wrapped = {"state_dict": {"state_dict": state, "version": 2}, **beside}
            return Checkpoint(wrapped, ("state_dict", "state_dict"))
        if kind == 5:
            return Checkpoint({"weights": state}, ("weights",))
        return Checkpoint(state)
