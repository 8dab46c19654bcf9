"""Whole-process figures: reading large headers, and `export` beside `cp` in turn.

Each command runs once unmeasured and then several times; what is compared alternates, so that a
machine that grows slower does so for both. Prints medians, and the spread of the ratios.
"""

import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from bench_common import write_shards

RUNS = 7

# In a process of its own: a child's peak memory counts that of the parent it was forked from.
TORCH_MODELS = '''
import sys, torch
many = {f"layers.{n}.weight": torch.zeros(4, 4) for n in range(10_000)}
torch.save(many, sys.argv[1] + "/many.pt")
torch.save(many, sys.argv[1] + "/legacy.pt", _use_new_zipfile_serialization=False)
'''


def run(command):
    """Seconds, and the peak memory of the process in MB."""
    start = time.perf_counter()
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL)
    _, status, usage = os.wait4(process.pid, 0)
    assert status == 0, command
    return time.perf_counter() - start, usage.ru_maxrss / 1024


def repeated(command):
    run(command)
    runs = [run(command) for _ in range(RUNS)]
    return statistics.median(seconds for seconds, _ in runs), max(peak for _, peak in runs)


def headers(ckptfs, folder):
    write_shards(folder / "many", 160, 625, 32)
    subprocess.run([sys.executable, "-c", TORCH_MODELS, str(folder)], check=True)
    print("\n| `ckptfs inspect --json` of | seconds | peak MB |\n|---|---|---|")
    for name, path in [
        ("100,000 tensors in 160 shards", "many"),
        ("a `.pt` of 10,000 tensors", "many.pt"),
        ("the same in the older form", "legacy.pt"),
    ]:
        seconds, peak = repeated([ckptfs, "inspect", "--json", str(folder / path)])
        print(f"| {name} | {seconds:.3f} | {peak:.0f} |")


def copies(ckptfs, folder):
    model, out = folder / "model", folder / "out"
    write_shards(model, 4, 50, 5 << 20)
    files = sorted(str(file) for file in model.glob("*.safetensors"))

    def timed(command):
        shutil.rmtree(out, ignore_errors=True)
        out.mkdir()
        os.sync()
        return run(command)[0]

    export = [ckptfs, "export", str(model), str(out / "model.safetensors")]
    copy = ["cp", *files, str(out)]
    copy_and_sync = ["sh", "-c", 'cp "$@" && sync "$0"/*', str(out), *files, str(out)]
    print("\n| 2.1 GB from the page cache | `export` s | the other s | speed of `export` in it: median (worst to best) |")
    print("|---|---|---|---|")
    for name, other in [("beside `cp`, which does not wait for the disk", copy), ("beside `cp` and `sync`", copy_and_sync)]:
        timed(export), timed(other)
        pairs = [(timed(export), timed(other)) for _ in range(RUNS)]
        ratios = sorted(b / a for a, b in pairs)
        ours, theirs = (statistics.median(column) for column in zip(*pairs))
        spread = f"{statistics.median(ratios):.2f} ({ratios[0]:.2f} to {ratios[-1]:.2f})"
        print(f"| {name} | {ours:.2f} | {theirs:.2f} | {spread} |")


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        headers(sys.argv[1], Path(folder))
        copies(sys.argv[1], Path(folder))
