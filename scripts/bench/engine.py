"""The engine by itself (`cargo bench`), and whole processes: reading large headers, and `export` beside `cp` in turn.
Each command runs once unmeasured."""

import os
import re
import shutil
import subprocess
import tempfile
import time
from pathlib import Path

from bench import REPOSITORY
from bench.fixtures import CKPTFS, RUNS, alternate, uniform, write_model
from bench.models import in_process, many_tensors, pickles_of_many
from bench.results import Results

BENCHES = {
    "virtual_file_of_100_000_tensors_in_160_shards": (
        "engine", "virtual file of 100,000 tensors in 160 shards with an index"
    ),
    "virtual_file_of_a_pt_with_10_000_tensors": ("engine", "virtual file of a `.pt` of 10,000 tensors"),
    "plain_pread_in_1_mib_requests": ("reads", "plain `pread` of the same bytes"),
    "read_at_in_1_mib_requests": ("reads", "`VirtualFileReader::read_at`"),
}  # fmt: skip

# As `cargo bench` prints a time.
TIME = r"([\d.]+) (ns|µs|ms|s)\s+"
SCALE = {"ns": 1e-9, "µs": 1e-6, "ms": 1e-3, "s": 1}


def run(command):
    """Seconds, and the peak memory of the process in bytes."""
    start = time.perf_counter()
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL)
    _, status, usage = os.wait4(process.pid, 0)
    assert status == 0, command
    return {"seconds": time.perf_counter() - start, "peak": usage.ru_maxrss * 1024}


def by_cargo(results):
    command = ["cargo", "bench", "--quiet", "--locked", "--bench", "engine"]
    said = subprocess.run(command, check=True, capture_output=True, text=True, cwd=REPOSITORY).stdout
    for name, (table, row) in BENCHES.items():
        found = re.search(rf"{name}\s+{TIME}│ {TIME}│ {TIME}", said)
        numbers, units = found.groups()[::2], found.groups()[1::2]
        least, most, median = (float(number) * SCALE[unit] for number, unit in zip(numbers, units))
        # It reports no more of its many runs.
        results.add(table, [row], [{"seconds": seconds} for seconds in (least, median, most)])


def headers(results, folder):
    # A process's peak memory counts that of the process it was forked from: this one keeps its own small.
    in_process(many_tensors, folder=folder / "many")
    in_process(pickles_of_many, folder=folder)
    for name, path in [
        ("100,000 tensors in 160 shards", "many"),
        ("a `.pt` of 10,000 tensors", "many.pt"),
        ("the same in the older form", "legacy.pt"),
    ]:
        command = [CKPTFS, "inspect", "--json", str(folder / path)]
        run(command)
        results.add("headers", [name], [run(command) for _ in range(RUNS)])


def copies(results, folder):
    model, out = folder / "model", folder / "out"
    files = write_model(model, uniform(4, 50, 5 << 20))

    def timed(command):
        shutil.rmtree(out, ignore_errors=True)
        out.mkdir()
        os.sync()
        return run(command)["seconds"]

    export = [CKPTFS, "export", str(model), str(out / "model.safetensors")]
    copy = ["cp", *files, str(out)]
    copy_and_sync = ["sh", "-c", 'cp "$@" && sync "$0"/*', str(out), *files, str(out)]
    for name, other in [
        ("beside `cp`, which does not wait for the disk", copy),
        ("beside `cp` and `sync`", copy_and_sync),
    ]:
        commands = {"export": export, "other": other}
        timed(export), timed(other)
        results.add("copies", [name], alternate(list(commands), lambda side: timed(commands[side])))


def main():
    with tempfile.TemporaryDirectory() as folder:
        results = Results("engine")
        by_cargo(results)
        headers(results, Path(folder))
        copies(results, Path(folder))
