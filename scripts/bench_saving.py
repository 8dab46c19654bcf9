"""Saving in shards beside safetensors: each in a process of its own, in turn, tensors that are in memory.
Measures seconds, seconds of processor and the memory at the peak above the tensors, as a share of them.

    bench_saving.py              measures everything
    bench_saving.py once WAY     does it once, here, and prints what it took as JSON

In: RUNS. Out: `saving.json`, and its table.
"""

import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from bench_common import in_turn, of_status, settle
from bench_results import Results


def sharded(**how):
    def save(shards, folder):
        from ckptfs.torch import save_sharded

        tensors = {name: tensor for shard in shards for name, tensor in shard.items()}
        most = max(sum(tensor.nbytes for tensor in shard.values()) for shard in shards)
        save_sharded(tensors, folder, most, **how)

    return save


def by_safetensors(synced):
    def save(shards, folder):
        from safetensors.torch import save_file

        for n, shard in enumerate(shards):
            path = Path(folder) / f"model-{n + 1:05}-of-{len(shards):05}.safetensors"
            save_file(shard, path, {"format": "pt"})
            if synced:
                with open(path, "rb") as file:
                    os.fsync(file.fileno())

    return save


WAYS = {
    "ckptfs, `save_sharded`": sharded(),
    "the same, `num_threads=1`": sharded(num_threads=1),
    "the same, `sync=False`": sharded(sync=False),
    "safetensors, `save_file`, left in the page cache": by_safetensors(False),
    "the same and `fsync`": by_safetensors(True),
}


def once(way):
    import ckptfs.torch
    import safetensors.torch
    import torch

    make = torch.empty(5 << 20, dtype=torch.bfloat16)
    shards = [{f"layers.{s}.{n}": make.clone().fill_(n) for n in range(50)} for s in range(4)]
    size = sum(tensor.nbytes for shard in shards for tensor in shard.values())
    with tempfile.TemporaryDirectory() as folder:
        os.sync()
        settle(size * 5 // 4)
        Path("/proc/self/clear_refs").write_text("5")
        before = of_status("VmRSS")
        start, used = time.perf_counter(), time.process_time()
        WAYS[way](shards, folder)
        took = {"seconds": time.perf_counter() - start, "cpu": time.process_time() - used}
        took["peak"] = (of_status("VmHWM") - before) / size
        took["bytes"] = sum(path.stat().st_size for path in Path(folder).glob("*.safetensors"))
    assert took["bytes"] >= size
    print(json.dumps(took))


def apart(way):
    done = subprocess.run([sys.executable, __file__, "once", way], check=True, capture_output=True, text=True)
    return json.loads(done.stdout)


def main():
    results = Results("saving")
    runs = in_turn(list(WAYS), apart)
    for way in WAYS:
        results.add("saving", [way], [run[way] for run in runs])


if __name__ == "__main__":
    match sys.argv[1:]:
        case ["once", way]:
            once(way)
        case _:
            main()
