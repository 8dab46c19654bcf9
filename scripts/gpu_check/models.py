"""Models to load, and what the machine has room for. No tensor of a model is like another."""

import json
import random
import shutil
import struct
from pathlib import Path

from bench.fixtures import write_model

# As most models have it.
_SHARD_BYTES = 4 * 10**9

GB = 10**9


def plan_sizes(kind, size):
    """Bytes of each tensor of a model. "large" has few large ones, "small" many of 64 KiB to 1 MiB, "tiny" as many as
    `size`, of a few KiB."""
    rng = random.Random(7)
    if kind == "tiny":
        return [2 * rng.randint(1, 4096) for _ in range(size)]
    sizes, remaining = [], size
    while remaining > 0:
        if kind == "small":
            layer = [2 * rng.randint(32 << 10, 512 << 10)]
        else:
            # Beside the matrices of a layer there are vectors.
            layer = [min(size // 8, 256 << 20) & ~1, 16 << 10]
        sizes += layer
        remaining -= sum(layer)
    return sizes


def write_shards(folder, sizes):
    """Writes a model of BF16 tensors with an index, and returns its files in their order."""
    shards, shard_bytes = [[]], 0
    for n, size in enumerate(sizes):
        if shards[-1] and shard_bytes + size > _SHARD_BYTES:
            shards.append([])
            shard_bytes = 0
        shards[-1].append((f"model.layers.{n}.weight", size))
        shard_bytes += size
    return write_model(folder, shards)


def plain_reader():
    """A loader that reads a model as its files say it: what all others are compared with."""
    import torch

    def load(request):
        tensors = {}
        for file in request["files"]:
            with open(file, "rb") as f:
                (length,) = struct.unpack("<Q", f.read(8))
                for name, entry in json.loads(f.read(length)).items():
                    start, end = entry["data_offsets"]
                    f.seek(8 + length + start)
                    tensor = torch.frombuffer(bytearray(f.read(end - start)), dtype=torch.bfloat16)
                    tensors[name] = tensor.to(request["device"], copy=True).view(entry["shape"])
        return tensors

    return load


def copy(files, folder):
    """The same model in another folder."""
    folder.mkdir(parents=True)
    for file in Path(files[0]).parent.iterdir():
        shutil.copyfile(file, folder / file.name)
    return [str(folder / Path(file).name) for file in files]


def find_free_memory():
    """Bytes that a program may take here before others suffer: what the system has, within what it allows."""
    meminfo = dict(line.split(":") for line in Path("/proc/meminfo").read_text().splitlines())
    free = int(meminfo["MemAvailable"].split()[0]) << 10
    try:
        limit = int(Path("/sys/fs/cgroup/memory.max").read_text())
        used = int(Path("/sys/fs/cgroup/memory.current").read_text())
        stat = dict(line.split() for line in Path("/sys/fs/cgroup/memory.stat").read_text().splitlines())
    except (OSError, ValueError):
        return free
    # What is cached of files is given back when it is needed.
    return min(free, limit - used + int(stat["inactive_file"]) + int(stat["active_file"]))


def find_room(folder, device_free):
    """The largest model for which there is room in a folder, in memory and on the device, and what bounds it.
    Some loaders hold a model once more in memory, and some once more on the device."""
    bounds = {
        f"the disk of {folder}": shutil.disk_usage(folder).free * 8 // 10,
        # The page cache, a copy in memory, and one that a program makes.
        "memory": find_free_memory() // 4,
    }
    if device_free is not None:
        bounds["the device"] = device_free * 10 // 25
    resource = min(bounds, key=bounds.get)
    return bounds[resource], resource
