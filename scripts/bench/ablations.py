"""What each policy of readahead wins: cold loads through the mount with all of them, and with one left out, in turn.

Needs a build with the feature `ablation`, which $CKPTFS names. Arguments name the policies to leave out. Each load runs
in a fork of one process, which has loaded something tiny before: all libraries are in memory. No ballast holds memory.
"""

import mmap
import os
import pickle
import random
import subprocess
import tempfile
import time
from contextlib import contextmanager
from pathlib import Path

from ckptfs.bench import page_cache

from bench.fixtures import alternate, mounted
from bench.models import Models
from bench.results import Results
from bench.targets import SIZE, count_disk_bytes

POLICIES = {
    "touches": "waiting for a reader that only touches pages",
    "delivered": "skipping what the kernel holds",
    "deferral": "blocking reads before what the kernel reads around them",
    "bounds": "ending a stream near the end of its tensor",
    "random": "random reads without blocks",
}


def touch(tensor):
    """Reads a byte of each page."""
    import torch

    return tensor.view(torch.uint8).reshape(-1)[:: mmap.PAGESIZE].sum().item()


def load_file(mount):
    from safetensors.torch import load_file

    return load_file(mount / "model.safetensors")


def from_pretrained(mount):
    import torch
    from transformers import LlamaForCausalLM

    return LlamaForCausalLM.from_pretrained(mount, dtype=torch.bfloat16).state_dict()


def random_order(mount):
    from safetensors import safe_open

    kept = {}
    with safe_open(mount / "model.safetensors", "pt") as file:
        names = sorted(file.keys())
        random.Random(7).shuffle(names)
        for name in names:
            kept[name] = file.get_tensor(name)
            touch(kept[name])
    return kept


def read_in_order(mount):
    subprocess.run(["cat", mount / "model.safetensors"], check=True, stdout=subprocess.DEVNULL)
    return {}


# Each workload, and the model that it loads.
WORKLOADS = {
    "from_pretrained": (from_pretrained, Models.shards),
    "from_pretrained, .bin": (from_pretrained, Models.bins),
    "load_file": (load_file, Models.shards),
    "random order": (random_order, Models.shards),
    "cat": (read_in_order, Models.shards),
}


def time_in_fork(load, mount):
    """Seconds of a load in a process of its own, until its last page is touched."""
    reader, writer = os.pipe()
    pid = os.fork()
    if pid == 0:
        start = time.perf_counter()
        tensors = load(mount)
        for tensor in tensors.values():
            touch(tensor)
        os.write(writer, pickle.dumps(time.perf_counter() - start))
        os._exit(0)
    os.close(writer)
    with open(reader, "rb") as file:
        seconds = file.read()
    os.waitpid(pid, 0)
    if not seconds:
        raise SystemExit("failed: a load ended without a result")
    return pickle.loads(seconds)


@contextmanager
def left_out(policy):
    os.environ["CKPTFS_LEAVE_OUT"] = policy
    try:
        yield
    finally:
        del os.environ["CKPTFS_LEAVE_OUT"]


def main(*names):
    if unknown := [name for name in names if name not in POLICIES]:
        raise SystemExit(f"no policy {unknown[0]!r}; there are: {', '.join(POLICIES)}")
    assert os.geteuid() == 0, "dropping caches needs root"
    policies = [name for name in POLICIES if name in names or not names]
    results = Results("ablations", names)
    with tempfile.TemporaryDirectory() as folder:
        models = Models(os.environ.get("CKPTFS_BENCH_MODELS", folder), SIZE)
        point = Path(folder) / "mount"
        point.mkdir()

        def measure(load, model, policy):
            os.sync()
            page_cache.drop_all()
            read_before = count_disk_bytes(models.folder)
            with left_out(policy), mounted(model, point) as daemon:
                cpu_before = daemon.cpu
                seconds = time_in_fork(load, point)
                cpu = daemon.cpu - cpu_before
            return {"seconds": seconds, "cpu": cpu, "read": count_disk_bytes(models.folder) - read_before}

        for workload, (load, model_of) in WORKLOADS.items():
            with mounted(model_of(models, "tiny"), point):
                load(point)
            model = model_of(models)
            runs = alternate(["", *policies], lambda policy, load=load, model=model: measure(load, model, policy))
            for policy in policies:
                results.add("ablations", [POLICIES[policy], workload], [
                    {"all": run[""]["seconds"], "without": run[policy]["seconds"],
                     "all cpu": run[""]["cpu"], "without cpu": run[policy]["cpu"],
                     "all read": run[""]["read"], "without read": run[policy]["read"]}
                    for run in runs
                ])  # fmt: skip
