"""Models to load, and what the machine has room for.

In: a kind and a size. Out: shards of a checkpoint as their usual writer makes them, in which no tensor is like
another; how much fits, and why not more.
"""

import json
import os
import random
import shutil
import struct
from pathlib import Path

# Tensors are cut out of so much noise, each at another place, and begin with their number: to make noise is slow.
_NOISE = 64 << 20

# As most models have it.
_SHARD = 4 * 10**9

GB = 10**9


def sizes_of(kind, size):
    """Bytes of each tensor of a model: "large" has few large ones, "small" many of 64 KiB to 1 MiB, "tiny" as
    many as `size`, of a few KiB."""
    rng = random.Random(7)
    if kind == "tiny":
        return [2 * rng.randint(1, 4096) for _ in range(size)]
    sizes, left = [], size
    while left > 0:
        if kind == "small":
            some = [2 * rng.randint(32 << 10, 512 << 10)]
        else:
            # Beside the matrices of a layer there are vectors.
            some = [min(size // 8, 256 << 20) & ~1, 16 << 10]
        sizes += some
        left -= sum(some)
    return sizes


def write(folder, sizes):
    """Writes a model of BF16 tensors, with an index. Gives its files, in their order."""
    folder.mkdir(parents=True)
    noise, rng = os.urandom(_NOISE), random.Random(11)
    shards, held = [[]], 0
    for n, size in enumerate(sizes):
        if shards[-1] and held + size > _SHARD:
            shards.append([])
            held = 0
        shards[-1].append((f"model.layers.{n}.weight", n, size))
        held += size
    weight_map, files = {}, []
    for at, shard in enumerate(shards):
        file = folder / f"model-{at + 1:05}-of-{len(shards):05}.safetensors"
        weight_map |= {name: file.name for name, _, _ in shard}
        _write_shard(file, shard, noise, rng)
        files.append(str(file))
    index = {"metadata": {"total_size": sum(sizes)}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    return files


def _write_shard(path, shard, noise, rng):
    header, at = {}, 0
    for name, _, size in shard:
        header[name] = {"dtype": "BF16", "shape": [size // 2], "data_offsets": [at, at + size]}
        at += size
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    noise = memoryview(noise)
    with open(path, "wb", buffering=1 << 20) as out:
        out.write(struct.pack("<Q", len(text)) + text)
        for _, n, size in shard:
            head = struct.pack("<Q", n)[:size]
            out.write(head)
            left = size - len(head)
            while left:
                start = rng.randrange(len(noise) // 2)
                part = noise[start : start + left]
                out.write(part)
                left -= len(part)


def copy(files, folder):
    """The same model in another folder."""
    folder.mkdir(parents=True)
    for file in Path(files[0]).parent.iterdir():
        shutil.copyfile(file, folder / file.name)
    return [str(folder / Path(file).name) for file in files]


def memory():
    """Bytes that a program may have here before others suffer: what the system has, within what it allows."""
    about = dict(line.split(":") for line in Path("/proc/meminfo").read_text().splitlines())
    free = int(about["MemAvailable"].split()[0]) << 10
    try:
        most = int(Path("/sys/fs/cgroup/memory.max").read_text())
        held = int(Path("/sys/fs/cgroup/memory.current").read_text())
        stat = dict(line.split() for line in Path("/sys/fs/cgroup/memory.stat").read_text().splitlines())
    except (OSError, ValueError):
        return free
    # What is cached of files is given back when it is needed.
    return min(free, most - held + int(stat["inactive_file"]) + int(stat["active_file"]))


def room(folder, device_free):
    """The largest model for which there is room in a folder, in memory and on the device, and what bounds it.
    Some of those that are measured hold a model once more in memory, and some once more on the device."""
    bounds = {
        f"the disk of {folder}": shutil.disk_usage(folder).free * 8 // 10,
        # The page cache, a copy in memory, and one that a program makes.
        "memory": memory() // 4,
    }
    if device_free is not None:
        bounds["the device"] = device_free * 10 // 25
    what = min(bounds, key=bounds.get)
    return bounds[what], what
