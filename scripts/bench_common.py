"""What the benchmarks share: a model to read, and a machine in a known state."""

import json
import mmap
import os
import struct
from pathlib import Path

def write_shards(folder, shards, tensors, elements):
    """A sharded model of BF16 tensors as their usual writer makes it, filled with noise."""
    folder.mkdir()
    weight_map = {}
    for shard in range(shards):
        file = f"model-{shard + 1:05}-of-{shards:05}.safetensors"
        header, at = {}, 0
        for n in range(tensors):
            name = f"model.language_model.layers.{shard}.mlp.experts.{n}.gate_up_proj.weight"
            header[name] = {"dtype": "BF16", "shape": [elements], "data_offsets": [at, at + 2 * elements]}
            at += 2 * elements
            weight_map[name] = file
        text = json.dumps(header).encode()
        with open(folder / file, "wb") as out:
            out.write(struct.pack("<Q", len(text)) + text)
            for _ in range(tensors):
                out.write(os.urandom(2 * elements))
    index = {"metadata": {"total_size": 0}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))


def drop_caches():
    os.sync()
    Path("/proc/sys/vm/drop_caches").write_text("3")


def settle(size):
    """Has the system own so much free memory, for a second or two. What was just given back may be lent
    to others by a virtual machine's host, and every page of it that is used again then costs many times
    what copying it does."""
    # Of either kind of page, because what is freed as one is not at once found as the other.
    for huge in (False, True):
        if os.fork() == 0:
            with mmap.mmap(-1, size, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS) as memory:
                if huge:
                    memory.madvise(mmap.MADV_HUGEPAGE)
                for at in range(0, size, mmap.PAGESIZE):
                    memory[at] = 1
            os._exit(0)
    for _ in range(2):
        os.wait()


def warm(paths):
    for path in paths:
        with open(path, "rb", buffering=0) as file:
            while file.read(1 << 22):
                pass


def of_status(name):
    """Bytes that the system tells of this process, such as `VmRSS`."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(name):
            return int(line.split()[1]) * 1024
    raise KeyError(name)
