"""Models, mounts and the page cache for the benchmarks.

RUNS says how often each thing is measured. CKPTFS names the program; without it the release build is measured.
"""

import json
import os
import random
import struct
import subprocess
import tempfile
import time
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from ckptfs.bench import page_cache
from ckptfs.bench.schedule import take_turns
from ckptfs.bench.usage import memory, processor_seconds

from bench import REPOSITORY

RUNS = int(os.environ.get("RUNS", "5"))
CKPTFS = os.environ.get("CKPTFS", str(REPOSITORY / "target/release/ckptfs"))

# Tensors are cut out of so much noise, each at another place: making noise is slow.
_NOISE_BYTES = 64 << 20


def uniform(shards, tensors, elements):
    """Shards for `write_model` with equal tensors, whose names are as long as those of large models."""
    return [
        [(f"model.language_model.layers.{shard}.mlp.experts.{n}.gate_up_proj.weight", 2 * elements)
         for n in range(tensors)]
        for shard in range(shards)
    ]  # fmt: skip


def write_model(folder, shards):
    """Writes a sharded model of BF16 noise with an index, and returns its files. `shards` has the names and bytes of
    the tensors of each. No tensor equals another."""
    folder.mkdir(parents=True)
    noise, rng = memoryview(os.urandom(_NOISE_BYTES)), random.Random(11)
    weight_map, files, number = {}, [], 0
    for shard, tensors in enumerate(shards):
        file = folder / f"model-{shard + 1:05}-of-{len(shards):05}.safetensors"
        header, at = {}, 0
        for name, size in tensors:
            header[name] = {"dtype": "BF16", "shape": [size // 2], "data_offsets": [at, at + size]}
            at += size
            weight_map[name] = file.name
        text = json.dumps(header).encode()
        # As the usual writer does, so that every tensor can be used in place.
        text += b" " * (-len(text) % 8)
        with open(file, "wb", buffering=1 << 20) as out:
            out.write(struct.pack("<Q", len(text)) + text)
            for _, size in tensors:
                number += 1
                rest = size - out.write(struct.pack("<Q", number)[:size])
                while rest:
                    start = rng.randrange(_NOISE_BYTES // 2)
                    rest -= out.write(noise[start : start + rest])
        files.append(str(file))
    index = {"metadata": {"total_size": sum(size for shard in shards for _, size in shard)}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    return files


def in_page_cache(paths):
    """Bytes of each of these files in the page cache, in whole pages."""
    page = os.sysconf("SC_PAGE_SIZE")
    return [round(page_cache.cached([path]) * -(-os.stat(path).st_size // page)) * page for path in paths]


def first_byte(path):
    """Seconds until the first byte of a file is read."""
    start = time.perf_counter()
    with open(path, "rb") as file:
        assert file.read(1)
    return time.perf_counter() - start


def alternate(names, measure, runs=RUNS):
    """What each name took, run by run, measured in turn."""
    found = [{} for _ in range(runs)]
    for run, name in take_turns(names, runs):
        found[run][name] = measure(name)
    return [{name: one[name] for name in names} for one in found]


@dataclass(frozen=True)
class Daemon:
    """A mount and the process behind it. `seconds` is what the command took that made it."""

    point: Path
    pid: int
    budget: int
    seconds: float

    @property
    def cpu(self):
        """Processor seconds so far."""
        return processor_seconds(self.pid)

    @property
    def peak(self):
        """Bytes of memory at the peak."""
        return memory("VmHWM", self.pid)

    def wait_for_end(self):
        """Waits until the process has ended."""
        while Path(f"/proc/{self.pid}/exe").exists():
            time.sleep(0.01)


@contextmanager
def mounted(source, point, cache=None, views=None):
    """A mount by a daemon of its own, which has ended when this has. `cache` is the folder of its access traces and of its
    cache on disk; without one it begins with an empty one. `views` is a recipe."""
    with tempfile.TemporaryDirectory() as empty:
        env = os.environ | {"XDG_CACHE_HOME": str(cache or empty)}
        start = time.perf_counter()
        options = ["--views", views] if views else []
        subprocess.run([CKPTFS, "mount", *options, source, point], check=True, env=env)
        seconds = time.perf_counter() - start
        try:
            listed = json.loads(subprocess.run([CKPTFS, "status", "--json"], check=True, capture_output=True).stdout)
            (stats,) = (each["stats"] for each in listed if each["mountpoint"] == str(point))
            daemon = Daemon(Path(point), stats["pid"], stats["memory"]["budget"], seconds)
            yield daemon
        finally:
            subprocess.run([CKPTFS, "unmount", point], check=True)
        daemon.wait_for_end()
