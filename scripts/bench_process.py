"""The measured process: does its work on something tiny, so that all that it imports is there, says `ready`, waits
for a line, and then does it on PATH and prints what it took as JSON.

    bench_process.py WAY TINY PATH

In: a way of WAYS, a path for a try and the one that counts, which need not be there before the line comes.
Out: when it began and ended, on the system's clock, and a sum of what was touched: one byte in every 4096.
"""

import ctypes
import json
import mmap
import os
import random
import subprocess
import sys
import time
from pathlib import Path

# Python has no name for it.
MADV_POPULATE_READ = 22

os.environ |= {"HF_HUB_OFFLINE": "1", "HF_HUB_DISABLE_PROGRESS_BARS": "1"}


def touched(tensor):
    import torch

    return tensor.view(torch.uint8).reshape(-1)[::4096].sum().item()


def from_pretrained(path):
    import torch
    from transformers import LlamaForCausalLM
    from transformers.utils.logging import disable_progress_bar

    disable_progress_bar()
    model = LlamaForCausalLM.from_pretrained(path, dtype=torch.bfloat16)
    return sum(map(touched, model.state_dict().values()))


def load_file(path, backend="mmap"):
    from safetensors.torch import load_file

    tensors = load_file(path, backend=backend)
    return sum(map(touched, tensors.values()))


def load_file_owned(path):
    return load_file(path, "pread")


def random_order(path):
    from safetensors import safe_open

    with safe_open(path, "pt") as f:
        names = sorted(f.keys())
        random.Random(7).shuffle(names)
        return sum(touched(f.get_tensor(name)) for name in names)


def mapped(path):
    """Without torch, for many at once."""
    with open(path, "rb") as file, mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ) as view:
        return sum(view[:: mmap.PAGESIZE])


def keep_programs():
    """Has all pages of this process's programs mapped: those that are not go when caches are dropped, and the kernel
    then reads half a gigabyte of libraries beside what is measured."""
    libc = ctypes.CDLL(None)
    for line in Path("/proc/self/maps").read_text().splitlines():
        place, access, _, _, _, *path = line.split(maxsplit=5)
        if access.startswith("r") and path and path[0].startswith("/"):
            start, end = (int(address, 16) for address in place.split("-"))
            libc.madvise(ctypes.c_void_p(start), ctypes.c_size_t(end - start), MADV_POPULATE_READ)


WAYS = {way.__name__: way for way in (from_pretrained, load_file, load_file_owned, random_order, mapped)}


class Measured:
    """Such a process, seen from who measures. It is ready when this is made."""

    def __init__(self, way, tiny, path):
        command = [sys.executable, __file__, way.__name__, str(tiny), str(path)]
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        self._said("ready")

    def go(self):
        self.process.stdin.write("go\n")
        self.process.stdin.flush()

    def took(self):
        took = json.loads(self._said("{"))
        self.process.communicate()
        return took

    def _said(self, start):
        line = self.process.stdout.readline()
        if not line.startswith(start):
            raise SystemExit(f"failed: {' '.join(self.process.args)}")
        return line


def main(way, tiny, path):
    if way != mapped.__name__:
        import torch

        torch.set_num_threads(1)
    WAYS[way](tiny)
    keep_programs()
    print("ready", flush=True)
    sys.stdin.readline()
    start = time.monotonic()
    total = WAYS[way](path)
    print(json.dumps({"start": start, "end": time.monotonic(), "sum": total}), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
