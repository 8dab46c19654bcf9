"""Open handles, slices, prefetching, and tensors of the caller's."""

import random
import threading

import ckptfs
import safetensors.torch
import torch
from ckptfs.torch import load_file

import samples
from gpu_check.assertions import check, same
from compare import any_index


def model(place):
    """A model in shards, and its tensors."""
    return place.folder / "model", samples.write_shards(place.folder / "model", 1, 3, 6, 500)


@check("safe_open: get_tensor and get_tensors")
def _(place):
    path, expected = model(place)
    for _ in range(place.times):
        for backend in "mmap", "pread":
            with ckptfs.safe_open(path, "pt", device=place.device, backend=backend) as f:
                same({name: f.get_tensor(name) for name in f.keys()}, expected, place.device)
                same(f.get_tensors(), expected, place.device)
                some = {name: tensor for name, tensor in expected.items() if name.startswith("layers.1.")}
                same(f.get_tensors("layers.1.*"), some, place.device)


# Indexes other than integers, slices and an ellipsis.
_MASK = torch.arange(60) % 3 == 0
_OTHERS = [
    None, (None, 3), ([0, 1],), (slice(None), [0, 1]), ([0, 5], [1, 2]), (0, slice(None), [0, 1]), range(3),
    (Ellipsis, range(2)), torch.tensor([[0, 1]]), _MASK, (_MASK, 0), torch.tensor(3), True, (), slice(0, 99),
    (slice(1, 3), slice(None), [3, -1]), slice(4, 2), (slice(None), slice(-9, 99, 2)), (0, None, Ellipsis, None),
]  # fmt: skip


@check("get_slice with many kinds of index")
def _(place):
    expected = {"cube": samples.numbers(1, 60, 50, 40), "flat": samples.numbers(2, 100_003),
                "bytes": torch.arange(60 * 77, dtype=torch.int16).view(60, 77).to(torch.uint8)}  # fmt: skip
    path, rng = place.folder / "slices.safetensors", random.Random(9)
    safetensors.torch.save_file(expected, path)
    torch.save({"turned": expected["cube"].permute(2, 0, 1), **expected}, place.folder / "slices.pt")
    count = 40 if place.quick else 300
    for source in path, place.folder / "slices.pt":
        for backend in "mmap", "pread":
            with ckptfs.safe_open(source, "pt", device=place.device, backend=backend) as f:
                for name, tensor in expected.items():
                    for index in [any_index(rng, tensor.shape) for _ in range(count)]:
                        same({repr(index): f.get_slice(name)[index]}, {repr(index): tensor[index]}, place.device)
                for index in _OTHERS:
                    got, of = f.get_slice("cube")[index], expected["cube"][index]
                    same({repr(index): got}, {repr(index): of}, place.device)


@check("prefetch")
def _(place):
    path, expected = model(place)
    for _ in range(place.times):
        with ckptfs.safe_open(path, "pt", device=place.device) as f:
            with f.prefetch() as loader:
                same(dict(loader), expected, place.device)
            plan = {"layers.0.1.weight": slice(10, 33), "layers.2.5.weight": None}
            parts = {name: expected[name][rows or slice(None)] for name, rows in plan.items()}
            with f.prefetch(plan, threads=2) as loader:
                same({name: loader.take(name) for name in reversed(plan)}, parts, place.device)
            # Closed before its end.
            with f.prefetch() as loader:
                loader.take("layers.0.0.weight")


@check("into= memory on the device")
def _(place):
    path, expected = model(place)
    for _ in range(place.times):
        into = {name: torch.full_like(tensor, -1, device=place.device) for name, tensor in expected.items()}
        at = {name: tensor.data_ptr() for name, tensor in into.items()}
        loaded = load_file(path, into=into)
        same(loaded, expected, place.device)
        assert {name: tensor.data_ptr() for name, tensor in loaded.items()} == at
        halves = {name: torch.zeros(tensor.shape, dtype=torch.bfloat16, device=place.device)
                  for name, tensor in expected.items()}  # fmt: skip
        cast = {name: tensor.bfloat16() for name, tensor in expected.items()}
        same(load_file(path, into=halves, dtype=torch.bfloat16), cast, place.device)
        # What lies beside a part of a tensor stays.
        whole = torch.full((1500, 500), 3.0, device=place.device)
        load_file(path, names=["layers.0.0.weight"], into={"layers.0.0.weight": whole[500:1000]})
        around = torch.full((1500, 500), 3.0)
        around[500:1000] = expected["layers.0.0.weight"]
        same({"whole": whole}, {"whole": around}, place.device)


@check("from several threads")
def _(place):
    path, expected = model(place)
    faults = []

    def work(n):
        try:
            for _ in range(place.times):
                backend = ("mmap", "pread")[n % 2]
                same(load_file(path, place.device, backend=backend), expected, place.device)
                with ckptfs.safe_open(path, "pt", device=place.device) as f:
                    part = f.get_slice("layers.0.0.weight")[n : n + 9]
                    same({"part": part}, {"part": expected["layers.0.0.weight"][n : n + 9]}, place.device)
        except BaseException as fault:
            faults.append(fault)

    threads = [threading.Thread(target=work, args=(n,)) for n in range(4 if place.quick else 8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if faults:
        raise faults[0]
