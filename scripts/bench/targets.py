"""What the mount and the loader are held to, in one run: each case several times, in turn with what it is beside,
every load in a process of its own. Cold means that free memory is the machine's own, caches are dropped and the
daemon is new; programs are in memory before. Needs root. The table says what was promised.

    bench.targets              measures everything
    bench.targets CASE...      these alone, by the names of CASES

In: RUNS, CKPTFS, SIZE (a part of the model, to try it out), CKPTFS_BENCH_MODELS (a folder that keeps the models
from one run to the next). Out: `targets.json`, and the table.
"""

import os
import subprocess
import sys
import tempfile
from pathlib import Path

from bench import workloads as ways
from bench.fixtures import RUNS, first_byte, in_page_cache, in_turn
from bench.machine import machine
from bench.models import Models
from bench.worker import Measured
from bench.results import Results

SIZE = float(os.environ.get("SIZE", "1"))


class Bench:
    """The machine, and the models in each of their forms."""

    def __init__(self, machine, models):
        self.machine = machine
        self.models = models

    def seconds(self, *load, **how):
        took, number = self.machine.apart(*load, **how)
        return took["seconds"], number

    def beside_ext4(self, way, tiny, source, shown, plain):
        """What the mount of the source shows there, and what lies on the plain filesystem."""
        return self.machine.compared({
            "mount": lambda: self.seconds(way, tiny, shown, source=source),
            "ext4": lambda: self.seconds(way, tiny, plain),
        })  # fmt: skip

    def of_folder(self, kind):
        point = self.machine.point
        return self.beside_ext4((ways.touching, ways.from_pretrained), kind("tiny"), kind(), point, kind())

    def of_one_file(self, *way):
        m = self.models
        return self.beside_ext4(way, m.plain("tiny"), m.shards(), self.machine.image, m.plain())


def from_pretrained(bench):
    yield "from_pretrained", bench.of_folder(bench.models.shards)


def load_file(bench):
    yield "load_file", bench.of_one_file(ways.touching, ways.safetensors_mapped)


def random_order(bench):
    yield "random order", bench.of_one_file(ways.in_random_order)


def pickled(bench):
    yield ".bin", bench.of_folder(bench.models.bins)


def remembered(bench):
    m, machine = bench.models, bench.machine
    for name, *load in [
        ("from_pretrained", (ways.touching, ways.from_pretrained), m.shards("tiny"), machine.point),
        ("random order", (ways.in_random_order,), m.plain("tiny"), machine.image),
    ]:
        runs = []
        for _ in range(RUNS):
            with tempfile.TemporaryDirectory() as cache:
                first, again = (bench.seconds(*load, source=m.shards(), remembered=cache)[0] for _ in range(2))
            runs.append({"first": first, "again": again})
        yield f"remembered, {name}", runs


def eight_processes(bench):
    m, machine, before, reads = bench.models, bench.machine, [], []

    def prepare():
        machine.cold()
        before.append(read_from_disk(m.folder))

    way, tiny = (ways.mapping,), m.plain("tiny")

    def of_mount():
        took = bench.seconds(way, tiny, machine.image, source=m.shards(), count=8, prepare=prepare)
        reads.append({"read": read_from_disk(m.folder) - before[-1], "model": m.bytes})
        return took

    def of_ext4():
        return bench.seconds(way, tiny, m.plain(), count=8, prepare=prepare)

    yield "8 processes", machine.compared({"mount": of_mount, "ext4": of_ext4})
    yield "8 processes, read from the disk", reads


def read_from_disk(folder):
    """Bytes that were ever read from the device under it."""
    device = os.stat(folder).st_dev
    words = Path(f"/sys/dev/block/{os.major(device)}:{os.minor(device)}/stat").read_text().split()
    return int(words[2]) * 512


def daemon_cpu(bench):
    m = bench.models

    def one(side):
        bench.machine.cold()
        if side == "cat":
            return cat(bench.machine, m.plain())
        with bench.machine.mounted(m.shards()) as daemon:
            before = daemon.cpu
            cat(bench.machine, bench.machine.image)
            return daemon.cpu - before

    yield "daemon CPU", in_turn(["daemon", "cat"], one)


def cat(machine, path):
    """Seconds of processor that it takes."""
    machine.ready()
    with open(path, "rb") as file:
        process = subprocess.Popen(["cat"], stdin=file, stdout=subprocess.DEVNULL)
        _, status, usage = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    assert process.returncode == 0, path
    return usage.ru_utime + usage.ru_stime


def page_cache(bench):
    m, machine, used, changed = bench.models, bench.machine, [], []

    def held(prepare):
        """Bytes in the page cache: of the sources before a load and after it, and of the image."""
        process = Measured((ways.touching, ways.safetensors_mapped), m.plain("tiny"), machine.image)
        prepare()
        with machine.mounted(m.shards()):
            machine.refill()
            before = sum(in_page_cache(m.sources))
            machine.measured([process])
            return before, sum(in_page_cache(m.sources)), sum(in_page_cache([machine.image]))

    for _ in range(RUNS):
        _, sources, image = held(machine.cold)
        used.append({"cached": sources + image, "model": m.bytes})
        before, sources, _ = held(lambda: machine.warm(*m.sources))
        changed.append({"changed": abs(sources - before), "source": before})
    yield "page cache", used
    yield "page cache, of a cached source changed", changed


def beside_others(bench, state, loaders, runs=RUNS):
    m, machine = bench.models, bench.machine
    prepare = machine.cold if state == "cold" else lambda: machine.warm(m.shards())

    def load(loader):
        return lambda: bench.seconds((ways.touching, loader), m.shards("tiny"), m.shards(), prepare=prepare)

    return machine.compared({name: load(loader) for name, loader in loaders.items()}, runs)


def owned(bench):
    loaders = {
        "ckptfs": ways.ckptfs_owned, "safetensors": ways.safetensors_owned,
        "fastsafetensors": ways.fastsafetensors_buffer, "runai-model-streamer": ways.runai_buffer,
    }  # fmt: skip
    for state in ("cold", "cached"):
        yield f"owned, {state}", beside_others(bench, state, loaders)


def mapped(bench):
    loaders = {"ckptfs": ways.ckptfs_mapped, "safetensors": ways.safetensors_mapped}
    # Short, and close to each other.
    yield "mapped", beside_others(bench, "cached", loaders, 4 * RUNS)


def to_first_byte(bench):
    runs, many, machine = [], bench.models.many, bench.machine
    for _ in range(RUNS):
        machine.warm(many)
        with machine.mounted(many):
            machine.ready()
            runs.append({"mount": first_byte(machine.image)})
    yield "first byte", runs


def owned_through_the_mount(bench):
    m, machine, first, again = bench.models, bench.machine, [], []
    way = ways.touching, ways.safetensors_owned

    def load(path):
        process = Measured(way, m.plain("tiny"), path)
        # What the load before had is free by now.
        machine.keeper.take()
        (took,) = machine.measured([process])
        return took["end"] - took["start"]

    def twice(path):
        """The first load leaves what is read in the page cache."""
        first = load(path)
        machine.read(path)
        return [first, load(path)]

    def one(side):
        if side == "ext4":
            machine.warm(m.plain())
            return twice(m.plain())
        machine.warm(m.shards())
        with machine.mounted(m.shards()):
            return twice(machine.image)

    for run in in_turn(["mount", "ext4"], one):
        for rows, n in [(first, 0), (again, 1)]:
            rows.append({side: took[n] for side, took in run.items()})
    yield "owned through the mount", first
    yield "owned through the mount, again", again


def daemon_memory(bench):
    if not bench.machine.peaks:
        bench.of_one_file(ways.touching, ways.safetensors_mapped)
    yield "daemon memory", bench.machine.peaks


CASES = {
    "from_pretrained": from_pretrained,
    "load_file": load_file,
    "random order": random_order,
    ".bin": pickled,
    "remembered": remembered,
    "8 processes": eight_processes,
    "daemon CPU": daemon_cpu,
    "page cache": page_cache,
    "owned": owned,
    "mapped": mapped,
    "first byte": to_first_byte,
    "owned through the mount": owned_through_the_mount,
    # The last, for it is about all of them.
    "daemon memory": daemon_memory,
}


def main(names):
    if unknown := [name for name in names if name not in CASES]:
        raise SystemExit(f"no case {unknown[0]!r}; there are: {', '.join(CASES)}")
    results = Results("targets", whole=not names)
    with machine() as measuring:
        bench = Bench(measuring, Models(os.environ.get("CKPTFS_BENCH_MODELS", measuring.folder), SIZE))
        for name in [name for name in CASES if name in names or not names]:
            for row, runs in CASES[name](bench):
                results.add("targets", [row], runs)


if __name__ == "__main__":
    main(sys.argv[1:])
