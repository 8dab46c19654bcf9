"""The mount beside the plain filesystem, in one run: the same file once as it is exported, once as the
mount shows it. Cold means caches dropped and a fresh daemon; needs root. Prints medians and the spread
of the ratios, in which more than 1 is faster than the plain filesystem.
"""

import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from contextlib import contextmanager
from pathlib import Path

from bench_common import drop_caches, settle, warm, write_shards

RUNS = int(os.environ.get("RUNS", "5"))

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

CKPTFS = sys.argv[1]
assert os.geteuid() == 0, "dropping caches needs root"


def sh(*command, **options):
    return subprocess.run(command, check=True, **options)


@contextmanager
def mounted(source, point, *options):
    sh(CKPTFS, "mount", source, point, *options)
    try:
        yield point
    finally:
        sh(CKPTFS, "unmount", point)


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


WAYS = {
    "sequential `read`, 1 MiB": lambda path: fio(path, "--rw=read", "--bs=1M", "--ioengine=psync"),
    "sequential through `mmap`": lambda path: fio(path, "--rw=read", "--bs=1M", "--ioengine=mmap"),
    "`load_file`, every page touched": load,
}

RANDOM = ["--rw=randread", "--bs=4k", "--ioengine=psync", "--io_size=64M", "--randseed=7", "--norandommap"]


def compare(title, plain, shown, originals, way, state, options=()):
    """Runs in turn: the plain file, then the mount, in the same state."""
    pairs = []
    for _ in range(RUNS):
        drop_caches()
        if state != "cold":
            warm([plain])
        settle(SETTLED)
        ours = way(plain)
        drop_caches()
        if state != "cold":
            warm(originals)
        with tempfile.TemporaryDirectory() as point, mounted(shown.parent, point, *options):
            file = Path(point) / "model.safetensors"
            if state == "second read":
                warm([file])
            settle(SETTLED)
            theirs = way(file)
        pairs.append((ours, theirs))
    ratios = sorted(a / b for a, b in pairs)
    a, b = (statistics.median(column) for column in zip(*pairs))
    spread = f"{statistics.median(ratios):.2f} ({ratios[0]:.2f} to {ratios[-1]:.2f})"
    print(f"| {title} | {state} | {a:.2f} | {b:.2f} | {spread} |", flush=True)


def throughput(folder, what, options=()):
    model, plain = folder / "model", folder / "plain.safetensors"
    if not model.exists():
        write_shards(model, 4, 50, 5 << 20)
        sh(CKPTFS, "export", model, plain, stdout=subprocess.DEVNULL)
    originals = sorted(model.glob("*.safetensors"))
    print(f"\n| {what} | | plain s | mount s | speed against plain: median (worst to best) |")
    print("|---|---|---|---|---|")
    for title, way in WAYS.items():
        for state in ("cold", "source cached", "second read"):
            compare(title, plain, model / "model.safetensors", originals, way, state, options)
    for state in ("cold", "source cached", "second read"):
        random = lambda path: fio(path, *RANDOM)
        compare("16,384 random reads of 4 KiB", plain, model / "model.safetensors", originals, random, state, options)


def first_bytes(folder):
    print("\n| checkpoints in the directory | `ckptfs mount` s | first byte of one s | listing all s |")
    print("|---|---|---|---|")
    for count in (1, 100, 10_000):
        many = folder / f"many{count}"
        many.mkdir()
        sample = folder / "sample.pt"
        sh(sys.executable, "-c", "import sys, torch; torch.save({'w': torch.zeros(64)}, sys.argv[1])", sample)
        data = sample.read_bytes()
        for n in range(count):
            (many / f"model{n}.pt").write_bytes(data)
        times = []
        for _ in range(RUNS):
            drop_caches()
            with tempfile.TemporaryDirectory() as point:
                start = time.perf_counter()
                with mounted(many, point):
                    up = time.perf_counter()
                    with open(f"{point}/model{count - 1}.safetensors", "rb") as file:
                        assert file.read(1)
                    byte = time.perf_counter()
                    assert len(os.listdir(point)) == count
                    listed = time.perf_counter()
                times.append((up - start, byte - up, listed - byte))
        row = " | ".join(f"{statistics.median(column):.3f}" for column in zip(*times))
        print(f"| {count:,} | {row} |", flush=True)


def large_header(folder):
    model = folder / "tensors"
    write_shards(model, 160, 625, 32)
    times = []
    for _ in range(RUNS):
        drop_caches()
        with tempfile.TemporaryDirectory() as point, mounted(model, point):
            def first():
                start = time.perf_counter()
                with open(f"{point}/model.safetensors", "rb") as file:
                    assert file.read(1)
                return time.perf_counter() - start
            built = first()
            time.sleep(1)
            times.append((built, first()))
    built, again = (statistics.median(column) * 1000 for column in zip(*times))
    print("\n| first byte of 100,000 tensors in 160 shards | ms | floor |\n|---|---|---|")
    print(f"| after the mount, caches dropped | {built:.0f} | 500 |")
    print(f"| once built | {again:.1f} | 10 |")


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        throughput(Path(folder), "2.1 GB in 4 shards, 200 tensors")
        first_bytes(Path(folder))
        large_header(Path(folder))
