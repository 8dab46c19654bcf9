"""What the benchmarks share: a model to read, a machine in a known state, and mounts that begin anew.

In: RUNS, how often each thing is measured, and CKPTFS, the program; without it the release build. Out: calls.
"""

import json
import os
import struct
import subprocess
import tempfile
import time
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[2]
RUNS = int(os.environ.get("RUNS", "5"))
CKPTFS = os.environ.get("CKPTFS", str(REPOSITORY / "target/release/ckptfs"))


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
        # As that writer does, so that every tensor can be used where it lies.
        text += b" " * (-len(text) % 8)
        with open(folder / file, "wb") as out:
            out.write(struct.pack("<Q", len(text)) + text)
            for _ in range(tensors):
                out.write(os.urandom(2 * elements))
    index = {"metadata": {"total_size": 0}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))


def drop_caches():
    os.sync()
    Path("/proc/sys/vm/drop_caches").write_text("3")


def warm(paths):
    for path in paths:
        with open(path, "rb", buffering=0) as file:
            while file.read(1 << 22):
                pass


def in_page_cache(paths):
    """Bytes of each of these files, in whole pages."""
    told = subprocess.run(["fincore", "--bytes", "--noheadings", "--raw", "--output", "RES", *paths], check=True,
                          capture_output=True, text=True)  # fmt: skip
    return [int(number) for number in told.stdout.split()]


def first_byte(path):
    """Seconds until it is there."""
    start = time.perf_counter()
    with open(path, "rb") as file:
        assert file.read(1)
    return time.perf_counter() - start


def of_status(name, pid="self"):
    """Bytes that the system tells of a process, such as `VmRSS`."""
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith(name):
            return int(line.split()[1]) * 1024
    raise KeyError(name)


def in_turn(ways, measure, runs=RUNS):
    """What each took, run by run: all of them in turn, every other time the other way round."""
    rows = []
    for n in range(runs):
        took = {way: measure(way) for way in (ways if n % 2 == 0 else ways[::-1])}
        rows.append({way: took[way] for way in ways})
    return rows


@dataclass(frozen=True)
class Daemon:
    """A mount and the process behind it."""

    point: Path
    pid: int
    budget: int
    # What the command took that made it.
    seconds: float

    @property
    def cpu(self):
        """Seconds of processor so far."""
        words = Path(f"/proc/{self.pid}/stat").read_text().rpartition(")")[2].split()
        return (int(words[11]) + int(words[12])) / os.sysconf("SC_CLK_TCK")

    @property
    def peak(self):
        return of_status("VmHWM", self.pid)

    def wait_for_end(self):
        while Path(f"/proc/{self.pid}/exe").exists():
            time.sleep(0.01)


@contextmanager
def mounted(source, point, remembered=None):
    """A mount by a daemon of its own, which has ended when this has. What it remembers of earlier ones is in
    the folder `remembered`; without one, nothing."""
    with tempfile.TemporaryDirectory() as cache:
        env = os.environ | {"XDG_CACHE_HOME": str(remembered or cache)}
        start = time.perf_counter()
        subprocess.run([CKPTFS, "mount", source, point], check=True, env=env)
        seconds = time.perf_counter() - start
        try:
            told = json.loads(subprocess.run([CKPTFS, "status", "--json"], check=True, capture_output=True).stdout)
            (stats,) = (each["stats"] for each in told if each["mountpoint"] == str(point))
            daemon = Daemon(Path(point), stats["pid"], stats["memory"]["budget"], seconds)
            yield daemon
        finally:
            subprocess.run([CKPTFS, "unmount", point], check=True)
        daemon.wait_for_end()
