"""Open handles, slices, prefetching, and tensors of the caller's."""

import random
import threading

import ckptfs
import safetensors.torch
import torch
from ckptfs.torch import load_file

import samples
from gpu_check.assertions import check, assert_same
from compare import any_index


def write_model(context):
    """A model in shards, and its tensors."""
    return context.folder / "model", samples.write_shards(context.folder / "model", 1, 3, 6, 500)


@check("safe_open: get_tensor and get_tensors")
def _(context):
    path, expected = write_model(context)
    for _ in range(context.repeats):
        for backend in "mmap", "pread":
            with ckptfs.safe_open(path, "pt", device=context.device, backend=backend) as f:
                assert_same({name: f.get_tensor(name) for name in f.keys()}, expected, context.device)
                assert_same(f.get_tensors(), expected, context.device)
                layer = {name: tensor for name, tensor in expected.items() if name.startswith("layers.1.")}
                assert_same(f.get_tensors("layers.1.*"), layer, context.device)


# Indexes other than integers, slices and an ellipsis.
_MASK = torch.arange(60) % 3 == 0
_OTHER_INDEXES = [
    None, (None, 3), ([0, 1],), (slice(None), [0, 1]), ([0, 5], [1, 2]), (0, slice(None), [0, 1]), range(3),
    (Ellipsis, range(2)), torch.tensor([[0, 1]]), _MASK, (_MASK, 0), torch.tensor(3), True, (), slice(0, 99),
    (slice(1, 3), slice(None), [3, -1]), slice(4, 2), (slice(None), slice(-9, 99, 2)), (0, None, Ellipsis, None),
]  # fmt: skip


@check("get_slice with many kinds of index")
def _(context):
    expected = {"cube": samples.numbers(1, 60, 50, 40), "flat": samples.numbers(2, 100_003),
                "bytes": torch.arange(60 * 77, dtype=torch.int16).view(60, 77).to(torch.uint8)}  # fmt: skip
    path, rng = context.folder / "slices.safetensors", random.Random(9)
    safetensors.torch.save_file(expected, path)
    torch.save({"turned": expected["cube"].permute(2, 0, 1), **expected}, context.folder / "slices.pt")
    count = 40 if context.quick else 300
    for source in path, context.folder / "slices.pt":
        for backend in "mmap", "pread":
            with ckptfs.safe_open(source, "pt", device=context.device, backend=backend) as f:
                for name, tensor in expected.items():
                    for index in [any_index(rng, tensor.shape) for _ in range(count)]:
                        actual = f.get_slice(name)[index]
                        assert_same({repr(index): actual}, {repr(index): tensor[index]}, context.device)
                for index in _OTHER_INDEXES:
                    actual, expected_slice = f.get_slice("cube")[index], expected["cube"][index]
                    assert_same({repr(index): actual}, {repr(index): expected_slice}, context.device)


@check("prefetch")
def _(context):
    path, expected = write_model(context)
    for _ in range(context.repeats):
        with ckptfs.safe_open(path, "pt", device=context.device) as f:
            with f.prefetch() as loader:
                assert_same(dict(loader), expected, context.device)
            plan = {"layers.0.1.weight": slice(10, 33), "layers.2.5.weight": None}
            parts = {name: expected[name][rows or slice(None)] for name, rows in plan.items()}
            with f.prefetch(plan, threads=2) as loader:
                assert_same({name: loader.take(name) for name in reversed(plan)}, parts, context.device)
            # Closed before its end.
            with f.prefetch() as loader:
                loader.take("layers.0.0.weight")


@check("into= memory on the device")
def _(context):
    path, expected = write_model(context)
    for _ in range(context.repeats):
        into = {name: torch.full_like(tensor, -1, device=context.device) for name, tensor in expected.items()}
        addresses = {name: tensor.data_ptr() for name, tensor in into.items()}
        loaded = load_file(path, into=into)
        assert_same(loaded, expected, context.device)
        assert {name: tensor.data_ptr() for name, tensor in loaded.items()} == addresses
        halves = {name: torch.zeros(tensor.shape, dtype=torch.bfloat16, device=context.device)
                  for name, tensor in expected.items()}  # fmt: skip
        cast = {name: tensor.bfloat16() for name, tensor in expected.items()}
        assert_same(load_file(path, into=halves, dtype=torch.bfloat16), cast, context.device)
        # What lies beside a part of a tensor stays.
        whole = torch.full((1500, 500), 3.0, device=context.device)
        load_file(path, names=["layers.0.0.weight"], into={"layers.0.0.weight": whole[500:1000]})
        expected_whole = torch.full((1500, 500), 3.0)
        expected_whole[500:1000] = expected["layers.0.0.weight"]
        assert_same({"whole": whole}, {"whole": expected_whole}, context.device)


@check("from several threads")
def _(context):
    path, expected = write_model(context)
    faults = []

    def load_repeatedly(n):
        try:
            for _ in range(context.repeats):
                backend = ("mmap", "pread")[n % 2]
                assert_same(load_file(path, context.device, backend=backend), expected, context.device)
                with ckptfs.safe_open(path, "pt", device=context.device) as f:
                    part = f.get_slice("layers.0.0.weight")[n : n + 9]
                    assert_same({"part": part}, {"part": expected["layers.0.0.weight"][n : n + 9]}, context.device)
        except BaseException as fault:
            faults.append(fault)

    threads = [threading.Thread(target=load_repeatedly, args=(n,)) for n in range(4 if context.quick else 8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if faults:
        raise faults[0]
