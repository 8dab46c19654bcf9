"""Saving in shards beside safetensors: each in a process of its own, in turn, tensors that are in memory. Measures
seconds, seconds of processor and the memory at the peak above the tensors, as a share of them. Needs root.

In: RUNS. Out: `saving.json`, and its table.
"""

import os
import tempfile
from pathlib import Path

from bench.machine import machine
from bench.results import Results

SHARDS, TENSORS, ELEMENTS = 4, 50, 5 << 20
SIZE = SHARDS * TENSORS * ELEMENTS * 2


def sharded(**how):
    from ckptfs.torch import save_sharded

    def save(shards, folder):
        tensors = {name: tensor for shard in shards for name, tensor in shard.items()}
        most = max(sum(tensor.nbytes for tensor in shard.values()) for shard in shards)
        save_sharded(tensors, folder, most, **how)

    return save


def by_safetensors(synced):
    from safetensors.torch import save_file

    def save(shards, folder):
        for n, shard in enumerate(shards):
            path = Path(folder) / f"model-{n + 1:05}-of-{len(shards):05}.safetensors"
            save_file(shard, path, {"format": "pt"})
            if synced:
                with open(path, "rb") as file:
                    os.fsync(file.fileno())

    return save


WAYS = {
    "ckptfs, `save_sharded`": lambda: sharded(),
    "the same, `num_threads=1`": lambda: sharded(num_threads=1),
    "the same, `sync=False`": lambda: sharded(sync=False),
    "safetensors, `save_file`, left in the page cache": lambda: by_safetensors(False),
    "the same and `fsync`": lambda: by_safetensors(True),
}


def saving(folder, way):
    import torch

    save = WAYS[way]()
    with tempfile.TemporaryDirectory() as tiny:
        save([{"weight": torch.zeros(8)}], tiny)
    make = torch.empty(ELEMENTS, dtype=torch.bfloat16)
    shards = [{f"layers.{s}.{n}": make.clone().fill_(n) for n in range(TENSORS)} for s in range(SHARDS)]

    def saved():
        save(shards, folder)
        return sum(path.stat().st_size for path in Path(folder).glob("*.safetensors")) // SIZE

    return saved


def main():
    results = Results("saving")
    with machine() as measuring:

        def save(way):
            with tempfile.TemporaryDirectory(dir=measuring.folder) as folder:
                took, number = measuring.apart((saving, way), None, folder)
            assert number == 1, way
            return {**took, "peak": took["peak"] / SIZE}, number

        runs = measuring.compared({way: lambda way=way: save(way) for way in WAYS})
        for way in WAYS:
            results.add("saving", [way], [run[way] for run in runs])


if __name__ == "__main__":
    main()
