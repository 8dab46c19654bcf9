"""The mount beside the plain filesystem, in one run: the same file once as it is exported, once as the
mount shows it. Cold means caches dropped and a fresh daemon; needs root.

In: RUNS, CKPTFS. Out: `mount.json`, and its tables, in which more than 1 is faster than the plain filesystem.
"""

import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from bench_common import CKPTFS, RUNS, drop_caches, first_byte, in_turn, mounted, settle, warm, write_shards
from bench_results import Results

# Twice the model: its bytes are kept once by the system and once by who loads it.
SETTLED = 4 << 30

LOAD = """
import sys, time, torch
from safetensors.torch import load_file
torch.set_num_threads(1)
start = time.perf_counter()
tensors = load_file(sys.argv[1])
for tensor in tensors.values():
    tensor.view(torch.uint8).reshape(-1)[::4096].sum()
print(time.perf_counter() - start)
"""


def sh(*command, **options):
    return subprocess.run(command, check=True, **options)


def fio(path, *options):
    """Seconds to read the file, or what of it the options say."""
    command = ["fio", "--name=read", f"--filename={path}", "--readonly", "--allow_file_create=0",
               "--invalidate=0", "--output-format=json", *options]
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    job = json.loads(done.stdout)["jobs"][0]
    assert job["error"] == 0, done.stdout
    return job["read"]["runtime"] / 1000


def load(path):
    done = sh(sys.executable, "-c", LOAD, path, capture_output=True, text=True)
    return float(done.stdout)


RANDOM = ["--rw=randread", "--bs=4k", "--ioengine=psync", "--io_size=64M", "--randseed=7", "--norandommap"]

WAYS = {
    "sequential `read`, 1 MiB": lambda path: fio(path, "--rw=read", "--bs=1M", "--ioengine=psync"),
    "sequential through `mmap`": lambda path: fio(path, "--rw=read", "--bs=1M", "--ioengine=mmap"),
    "`load_file`, every page touched": load,
    "16,384 random reads of 4 KiB": lambda path: fio(path, *RANDOM),
}


def compare(results, title, plain, shown, originals, way, state):
    """In turn: the plain file, and the mount, in the same state."""

    def one(side):
        drop_caches()
        if state != "cold":
            warm([plain] if side == "plain" else originals)
        if side == "plain":
            settle(SETTLED)
            return way(plain)
        with tempfile.TemporaryDirectory() as point, mounted(shown.parent, point):
            file = Path(point) / "model.safetensors"
            if state == "second read":
                warm([file])
            settle(SETTLED)
            return way(file)

    results.add("mount", [title, state], in_turn(["plain", "mount"], one))


def throughput(results, folder):
    model, plain = folder / "model", folder / "plain.safetensors"
    write_shards(model, 4, 50, 5 << 20)
    sh(CKPTFS, "export", model, plain, stdout=subprocess.DEVNULL)
    originals = sorted(model.glob("*.safetensors"))
    for title, way in WAYS.items():
        for state in ("cold", "source cached", "second read"):
            compare(results, title, plain, model / "model.safetensors", originals, way, state)


def checkpoints(results, folder):
    for count in (1, 100, 10_000):
        many = folder / f"many{count}"
        many.mkdir()
        sample = folder / "sample.pt"
        sh(sys.executable, "-c", "import sys, torch; torch.save({'w': torch.zeros(64)}, sys.argv[1])", sample)
        data = sample.read_bytes()
        for n in range(count):
            (many / f"model{n}.pt").write_bytes(data)
        runs = []
        for _ in range(RUNS):
            drop_caches()
            with tempfile.TemporaryDirectory() as point, mounted(many, point) as daemon:
                byte = first_byte(f"{point}/model{count - 1}.safetensors")
                start = time.perf_counter()
                assert len(os.listdir(point)) == count
                runs.append({"mount": daemon.seconds, "byte": byte, "listed": time.perf_counter() - start})
        results.add("checkpoints", [f"{count:,}"], runs)


def large_header(results, folder):
    model = folder / "tensors"
    write_shards(model, 160, 625, 32)
    built, again = [], []
    for _ in range(RUNS):
        drop_caches()
        with tempfile.TemporaryDirectory() as point, mounted(model, point) as daemon:
            image = daemon.point / "model.safetensors"
            built.append({"seconds": first_byte(image)})
            time.sleep(1)
            again.append({"seconds": first_byte(image)})
    results.add("first-byte", ["after the mount, caches dropped"], built)
    results.add("first-byte", ["once built"], again)


if __name__ == "__main__":
    assert os.geteuid() == 0, "dropping caches needs root"
    results = Results("mount")
    with tempfile.TemporaryDirectory() as folder:
        throughput(results, Path(folder))
        checkpoints(results, Path(folder))
        large_header(results, Path(folder))
