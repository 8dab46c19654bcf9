"""The memory and the descriptors that are held before and after many loads."""

import contextlib
import gc
import os
import shutil

from ckptfs.bench.usage import memory

from gpu_check import models

# Loads before it counts: what is made once stays.
_WARM_UP_COUNT = 5

_LIMIT_SECONDS = 300

_MB = 1 << 20

# What may be more afterwards: allocators round, and other programs use the device. A leak of a load is more.
_MAX_GROWTH = {
    "torch.cuda.memory_allocated": 0, "device memory used": 32 * _MB, "VmRSS": 64 * _MB, "VmLck": 0, "VmPin": 0,
    "descriptors": 0,
}  # fmt: skip


def check_leaks(job):
    if job.is_out_of_time("leaks"):
        return
    repeats = 10 if job.quick else 50
    folder = job.disk / "leaks"
    files = models.write_shards(folder, models.plan_sizes("large", min(256 << 20, int(job.sizes[0] * models.GB))))
    try:
        with job.worker("ckptfs", "safetensors 0.8") as worker:
            *_, report = worker.call(f"{__name__}:count_held", _LIMIT_SECONDS, device=job.device, folder=str(folder),
                                     repeats=repeats)  # fmt: skip
    finally:
        shutil.rmtree(folder)
    if "fault" in report:
        job.table.add("leaks", f"{repeats} loads", "FAILED", reason=report["fault"])
        return
    for name, (before, after) in report["held"].items():
        result = "ok" if after - before <= _MAX_GROWTH[name] else "FAILED"
        reason = f"{before:,} before, {after:,} after; may grow by {_MAX_GROWTH[name]:,}"
        job.table.add("leaks", name, result, where=f"{repeats} loads of {len(files)} files", reason=reason)


def count_held(_, device, folder, repeats):
    """What a worker holds before and after so many loads."""
    import ckptfs
    import torch
    from ckptfs.torch import load_file

    def load():
        for backend in "mmap", "pread":
            tensors = load_file(folder, device=device, backend=backend)
            assert {tensor.device for tensor in tensors.values()} == {torch.device(device)}
            del tensors
        with ckptfs.safe_open(folder, "pt", device=device) as f, f.prefetch() as loader:
            for _, tensor in loader:
                del tensor

    for _ in range(_WARM_UP_COUNT):
        load()
    before = measure_held(device)
    for _ in range(repeats):
        load()
    after = measure_held(device)
    return {"held": {name: [before[name], after[name]] for name in before}}


def measure_held(device):
    """The amounts that this process holds, by name."""
    import torch

    gc.collect()
    amounts = {}
    if device != "cpu":
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
        free, total = torch.cuda.mem_get_info(device)
        amounts["torch.cuda.memory_allocated"] = torch.cuda.memory_allocated(device)
        amounts["device memory used"] = total - free
    for name in "VmRSS", "VmLck", "VmPin":
        with contextlib.suppress(OSError):
            amounts[name] = memory(name)
    return amounts | {"descriptors": len(os.listdir("/proc/self/fd"))}
