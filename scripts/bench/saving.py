"""Saving in shards beside safetensors: tensors that are in memory. Peak memory is that above the tensors, as a share of
them."""

import os
import tempfile
from functools import partial
from pathlib import Path

from bench.machine import machine
from bench.results import Results
from bench.workloads import make_request

SHARDS, TENSORS, ELEMENTS = 4, 50, 5 << 20
SIZE_BYTES = SHARDS * TENSORS * ELEMENTS * 2


def sharded(**options):
    from ckptfs.torch import save_sharded

    def save(shards, folder):
        tensors = {name: tensor for shard in shards for name, tensor in shard.items()}
        most = max(sum(tensor.nbytes for tensor in shard.values()) for shard in shards)
        save_sharded(tensors, folder, most, **options)

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


SAVERS = {
    "ckptfs, `save_sharded`": sharded,
    "the same, `num_threads=1`": partial(sharded, num_threads=1),
    "the same, `sync=False`": partial(sharded, sync=False),
    "safetensors, `save_file`, left in the page cache": partial(by_safetensors, False),
    "the same and `fsync`": partial(by_safetensors, True),
}


def saving(request):
    """Saves a model to a folder."""
    import torch

    save = SAVERS[request["saver"]]()
    with tempfile.TemporaryDirectory() as tiny:
        save([{"weight": torch.zeros(8)}], tiny)
    make = torch.empty(ELEMENTS, dtype=torch.bfloat16)
    shards = [{f"layers.{s}.{n}": make.clone().fill_(n) for n in range(TENSORS)} for s in range(SHARDS)]
    yield
    save(shards, request["path"])
    saved = sum(path.stat().st_size for path in Path(request["path"]).glob("*.safetensors"))
    yield {"number": saved // SIZE_BYTES}


def main():
    results = Results("saving")
    with machine() as measuring:

        def save(saver):
            with tempfile.TemporaryDirectory(dir=measuring.folder) as folder:
                took, number = measuring.run(make_request(saving, saver=saver), folder)
            assert number == 1, saver
            return {**took, "peak": took["peak"] / SIZE_BYTES}, number

        runs = measuring.compare({saver: partial(save, saver) for saver in SAVERS})
        results.add_all("saving", None, runs)
