"""What is held before and after many loads. A program of `subprocesses`."""

import contextlib
import gc
import os
import sys

import torch

import subprocesses
from bench.fixtures import of_status

# Loads before it counts: what is made once stays.
_BEFORE = 5

_MB = 1 << 20

# What may be more afterwards: allocators round, and other programs use the device. A leak of a load is more.
_BOUNDS = {
    "torch.cuda.memory_allocated": 0, "device memory used": 32 * _MB, "VmRSS": 64 * _MB, "VmLck": 0, "VmPin": 0,
    "descriptors": 0,
}  # fmt: skip


def answer(device, folder, times):
    import ckptfs
    from ckptfs.torch import load_file

    def load():
        for backend in "mmap", "pread":
            tensors = load_file(folder, device=device, backend=backend)
            assert {tensor.device for tensor in tensors.values()} == {torch.device(device)}
            del tensors
        with ckptfs.safe_open(folder, "pt", device=device) as f, f.prefetch() as loader:
            for _, tensor in loader:
                del tensor

    for _ in range(_BEFORE):
        load()
    before = held(device)
    for _ in range(times):
        load()
    after = held(device)
    return {"held": {name: [before[name], after[name], _BOUNDS[name]] for name in before}}


def held(device):
    gc.collect()
    of = {}
    if device != "cpu":
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
        free, total = torch.cuda.mem_get_info(device)
        of |= {"torch.cuda.memory_allocated": torch.cuda.memory_allocated(device), "device memory used": total - free}
    for name in "VmRSS", "VmLck", "VmPin":
        # Some sandboxes tell less.
        with contextlib.suppress(KeyError):
            of[name] = of_status(name)
    return of | {"descriptors": len(os.listdir("/proc/self/fd"))}


if __name__ == "__main__":
    sys.exit(subprocesses.serve(answer))
