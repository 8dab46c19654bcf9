"""Whole checkpoints: every type, shape and form, against safetensors and torch on the CPU."""

import os
import random

import ckptfs
import safetensors.torch
import torch
from ckptfs.dtypes import TYPES
from ckptfs.torch import load_file, save_file

import samples
from gpu_check.assertions import Skipped, check, same
from writers import numbers as any_bits


def every_type(count):
    """A tensor of any bits of each type that this torch has."""
    rng = random.Random(3)
    kinds = [getattr(torch, name) for name in TYPES.values() if hasattr(torch, name)]
    return {str(kind): any_bits(rng, kind, count) for kind in kinds}


@check("every type, whole")
def _(place):
    path = place.folder / "types.safetensors"
    expected = every_type(100_003)
    save_file(expected, path)
    for _ in range(place.times):
        for backend in "mmap", "pread":
            same(load_file(path, place.device, backend=backend), expected, place.device)
    # Those that safetensors has, as it reads them.
    theirs = {}
    with safetensors.safe_open(path, "pt") as f:
        for name in expected:
            try:
                theirs[name] = f.get_tensor(name)
            except Exception:
                continue
    same(load_file(path, place.device, names=list(theirs)), theirs, place.device)
    without = sorted({*expected} - {*theirs})
    return f"{len(expected)} types" + (f"; safetensors has no {', '.join(without)}" if without else "")


@check("empty, 0-d, odd and many small tensors")
def _(place):
    path = place.folder / "small.safetensors"
    expected = samples.small_tensors(5, 3000) | {
        "empty": torch.empty(0), "empty.2": torch.empty(3, 0, 5), "scalar": torch.tensor(7.5),
        "flag": torch.tensor(True), "one": torch.ones(1, 1, 1, dtype=torch.float64),
    }  # fmt: skip
    expected |= {f"odd.{n}": torch.arange(n, dtype=torch.uint8) for n in range(1, 300)}
    safetensors.torch.save_file(expected, path)
    for _ in range(place.times):
        same(load_file(path, place.device), safetensors.torch.load_file(path), place.device)


@check("larger than any chunk, and with bounds of memory and threads")
def _(place):
    path = place.folder / "large.safetensors"
    sizes = [3 << 20, 9 << 20, 100, (4 << 20) + 4, 64, (32 if place.quick else 256) << 20, 12, 70_001]
    expected = {f"t{n}": any_bits(random.Random(n), torch.uint8, size) for n, size in enumerate(sizes)}
    safetensors.torch.save_file(expected, path)
    for how in {}, {"num_threads": 1}, {"num_threads": 32}, {"memory": "8M"}, {"leave_cache": True}:
        same(load_file(path, place.device, backend="pread", **how), expected, place.device)
    return repr(ckptfs.last_report())


def forms(folder):
    """A checkpoint of each form, with what torch or safetensors reads of it on the CPU."""
    sources_by_file, _ = samples.write_all(folder, 1)
    for source in sources_by_file.values():
        path = folder / source
        if path.is_dir():
            read = {}
            for shard in sorted(path.glob("*.safetensors")):
                read |= safetensors.torch.load_file(shard)
        else:
            read = torch.load(path, weights_only=True)
        yield source, path, read


@check("sharded, .bin, strided .pt, swapped and older forms")
def _(place):
    for _, path, expected in forms(place.folder):
        for _ in range(place.times):
            for backend in "mmap", "pread":
                same(load_file(path, place.device, backend=backend), expected, place.device)
            some = sorted(expected)[::2]
            same(load_file(path, place.device, names=some), {name: expected[name] for name in some}, place.device)


@check("load_many")
def _(place):
    every = {source: (path, expected) for source, path, expected in forms(place.folder)}
    for _ in range(place.times):
        for backend in "mmap", "pread":
            loaded = ckptfs.load_many({name: path for name, (path, _) in every.items()}, device=place.device,
                                      backend=backend)  # fmt: skip
            for name, (_, expected) in every.items():
                same(loaded[name], expected, place.device)


@check("dtype= casts")
def _(place):
    path = place.folder / "cast.safetensors"
    expected = {str(kind): samples.numbers(n, 300, 257).to(kind) for n, kind in
                enumerate((torch.float64, torch.float32, torch.float16, torch.bfloat16))}  # fmt: skip
    expected["whole"] = torch.arange(999)
    safetensors.torch.save_file(expected, path)
    for kind in torch.float64, torch.float32, torch.float16, torch.bfloat16:
        cast = {name: tensor.to(kind) if tensor.is_floating_point() else tensor for name, tensor in expected.items()}
        for how in {}, {"backend": "pread"}, {"memory": "8M"}:
            same(load_file(path, place.device, dtype=kind, **how), cast, place.device)


@check("a file that is cut short is an error, and nothing is left of it")
def _(place):
    path = place.folder / "cut.safetensors"
    safetensors.torch.save_file({f"t{n}": torch.ones(2 << 20) for n in range(4)}, path)
    with ckptfs.safe_open(path, "pt", device=place.device, backend="pread") as f:
        # Opened while it was whole.
        first = f.get_tensor("t0")
        held = torch.cuda.memory_allocated() if place.is_gpu else 0
        os.truncate(path, os.path.getsize(path) - (6 << 20))
        try:
            f.get_tensors()
        except ckptfs.SafetensorError as refused:
            words = str(refused)
        else:
            raise AssertionError("it was loaded")
    assert not place.is_gpu or torch.cuda.memory_allocated() == held
    assert bool((first == 1).all())
    return words.split(": ", 1)[-1]


@check("as the device is called otherwise")
def _(place):
    if not place.is_gpu:
        raise Skipped("there is no GPU")
    path = place.folder / "x.safetensors"
    expected = {"a": samples.numbers(1, 30, 20)}
    safetensors.torch.save_file(expected, path)
    device = torch.device(place.device)
    torch.cuda.set_device(device)
    for name in ("cuda", device, device.index, str(device)):
        same(load_file(path, name), expected, place.device)
