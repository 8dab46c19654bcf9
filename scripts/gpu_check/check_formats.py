"""Whole checkpoints: every type, shape and form, against safetensors and torch on the CPU."""

import os
import random

import ckptfs
import safetensors.torch
import torch
from ckptfs.dtypes import TYPES
from ckptfs.torch import load_file, save_file

import samples
from gpu_check.assertions import Skipped, check, assert_same
from writers import numbers as any_bits


def make_every_type(count):
    """A tensor of any bits of each type that this torch has."""
    rng = random.Random(3)
    kinds = [getattr(torch, name) for name in TYPES.values() if hasattr(torch, name)]
    return {str(kind): any_bits(rng, kind, count) for kind in kinds}


@check("every type, whole")
def _(context):
    path = context.folder / "types.safetensors"
    expected = make_every_type(100_003)
    save_file(expected, path)
    for _ in range(context.repeats):
        for backend in "mmap", "pread":
            assert_same(load_file(path, context.device, backend=backend), expected, context.device)
    # Those that safetensors has, as it reads them.
    safetensors_tensors = {}
    with safetensors.safe_open(path, "pt") as f:
        for name in expected:
            try:
                safetensors_tensors[name] = f.get_tensor(name)
            except Exception:
                continue
    assert_same(load_file(path, context.device, names=list(safetensors_tensors)), safetensors_tensors, context.device)
    missing_types = sorted({*expected} - {*safetensors_tensors})
    return f"{len(expected)} types" + (f"; safetensors has no {', '.join(missing_types)}" if missing_types else "")


@check("empty, 0-d, odd and many small tensors")
def _(context):
    path = context.folder / "small.safetensors"
    expected = samples.small_tensors(5, 3000) | {
        "empty": torch.empty(0), "empty.2": torch.empty(3, 0, 5), "scalar": torch.tensor(7.5),
        "flag": torch.tensor(True), "one": torch.ones(1, 1, 1, dtype=torch.float64),
    }  # fmt: skip
    expected |= {f"odd.{n}": torch.arange(n, dtype=torch.uint8) for n in range(1, 300)}
    safetensors.torch.save_file(expected, path)
    for _ in range(context.repeats):
        assert_same(load_file(path, context.device), safetensors.torch.load_file(path), context.device)


@check("larger than any chunk, and with bounds of memory and threads")
def _(context):
    path = context.folder / "large.safetensors"
    sizes = [3 << 20, 9 << 20, 100, (4 << 20) + 4, 64, (32 if context.quick else 256) << 20, 12, 70_001]
    expected = {f"t{n}": any_bits(random.Random(n), torch.uint8, size) for n, size in enumerate(sizes)}
    safetensors.torch.save_file(expected, path)
    for options in {}, {"num_threads": 1}, {"num_threads": 32}, {"memory": "8M"}, {"leave_cache": True}:
        assert_same(load_file(path, context.device, backend="pread", **options), expected, context.device)
    return repr(ckptfs.last_report())


def write_every_form(folder):
    """A checkpoint of each form, with what torch or safetensors reads of it on the CPU."""
    sources_by_file, _ = samples.write_all(folder, 1)
    for source in sources_by_file.values():
        path = folder / source
        if path.is_dir():
            tensors = {}
            for shard in sorted(path.glob("*.safetensors")):
                tensors |= safetensors.torch.load_file(shard)
        else:
            tensors = torch.load(path, weights_only=True)
        yield source, path, tensors


@check("sharded, .bin, strided .pt, swapped and older forms")
def _(context):
    for _, path, expected in write_every_form(context.folder):
        for _ in range(context.repeats):
            for backend in "mmap", "pread":
                assert_same(load_file(path, context.device, backend=backend), expected, context.device)
            names = sorted(expected)[::2]
            chosen = {name: expected[name] for name in names}
            assert_same(load_file(path, context.device, names=names), chosen, context.device)


@check("load_many")
def _(context):
    checkpoints = {source: (path, expected) for source, path, expected in write_every_form(context.folder)}
    for _ in range(context.repeats):
        for backend in "mmap", "pread":
            loaded = ckptfs.load_many({name: path for name, (path, _) in checkpoints.items()}, device=context.device,
                                      backend=backend)  # fmt: skip
            for name, (_, expected) in checkpoints.items():
                assert_same(loaded[name], expected, context.device)


@check("dtype= casts")
def _(context):
    path = context.folder / "cast.safetensors"
    expected = {str(kind): samples.numbers(n, 300, 257).to(kind) for n, kind in
                enumerate((torch.float64, torch.float32, torch.float16, torch.bfloat16))}  # fmt: skip
    expected["whole"] = torch.arange(999)
    safetensors.torch.save_file(expected, path)
    for kind in torch.float64, torch.float32, torch.float16, torch.bfloat16:
        cast = {name: tensor.to(kind) if tensor.is_floating_point() else tensor for name, tensor in expected.items()}
        for options in {}, {"backend": "pread"}, {"memory": "8M"}:
            assert_same(load_file(path, context.device, dtype=kind, **options), cast, context.device)


@check("views: casts on the device")
def _(context):
    path = context.folder / "views.safetensors"
    kinds = torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.float8_e5m2, torch.float8_e4m3fn
    save_file({str(kind): any_bits(random.Random(n), kind, 1_500_001) for n, kind in enumerate(kinds)}, path)
    for kind in "float64", "float32", "float16", "bfloat16":
        views = {"cast": [{"tensors": "*", "to": kind}]}
        expected = load_file(path, views=views)
        cast_bytes = sum(tensor.nbytes for name, tensor in expected.items() if name != f"torch.{kind}")
        for _ in range(context.repeats):
            assert_same(load_file(path, context.device, views=views), expected, context.device)
            report = ckptfs.last_report()
            assert report.cast == cast_bytes, report
            assert report.device_cast == (cast_bytes if context.is_gpu else 0), report
    return repr(report)


@check("a file that is cut short is an error, and nothing is left of it")
def _(context):
    path = context.folder / "cut.safetensors"
    safetensors.torch.save_file({f"t{n}": torch.ones(2 << 20) for n in range(4)}, path)
    with ckptfs.safe_open(path, "pt", device=context.device, backend="pread") as f:
        # Opened while it was whole.
        first = f.get_tensor("t0")
        allocated = torch.cuda.memory_allocated() if context.is_gpu else 0
        os.truncate(path, os.path.getsize(path) - (6 << 20))
        try:
            f.get_tensors()
        except ckptfs.SafetensorError as refused:
            message = str(refused)
        else:
            raise AssertionError("it was loaded")
    assert not context.is_gpu or torch.cuda.memory_allocated() == allocated
    assert bool((first == 1).all())
    return message.split(": ", 1)[-1]


@check("as the device is called otherwise")
def _(context):
    if not context.is_gpu:
        raise Skipped("there is no GPU")
    path = context.folder / "x.safetensors"
    expected = {"a": samples.numbers(1, 30, 20)}
    safetensors.torch.save_file(expected, path)
    device = torch.device(context.device)
    torch.cuda.set_device(device)
    for name in ("cuda", device, device.index, str(device)):
        assert_same(load_file(path, name), expected, context.device)
