"""What the mount and the loader are held to: each case several times, in turn with its baseline. `target_table` has
the targets.

SIZE is the part of the model to try it out with. CKPTFS_BENCH_MODELS names a folder that keeps the models from one run
to the next.
"""

import os
import subprocess
import tempfile
from pathlib import Path

from bench import workloads
from bench.fixtures import RUNS, first_byte, in_page_cache, alternate
from bench.machine import load, machine
from bench.models import Models
from bench.results import Results
from bench.workloads import workload

SIZE = float(os.environ.get("SIZE", "1"))

FROM_PRETRAINED = load(f"{workloads.__name__}:from_pretrained")
RANDOM_ORDER = workload(workloads.in_random_order)


class Bench:
    """The machine, and the models in each of their forms."""

    def __init__(self, machine, models):
        self.machine = machine
        self.models = models

    def seconds(self, *words, **options):
        took, outcome = self.machine.run(*words, **options)
        return took["seconds"], outcome

    def beside_ext4(self, request, tiny, source, shown, plain):
        """Seconds for what the mount of the source shows there, and for what lies on the plain filesystem."""
        return self.machine.compare({
            "mount": lambda: self.seconds(request, shown, tiny, source=source),
            "ext4": lambda: self.seconds(request, plain, tiny),
        })  # fmt: skip

    def of_folder(self, kind):
        return self.beside_ext4(FROM_PRETRAINED, kind("tiny"), kind(), self.machine.point, kind())

    def of_one_file(self, request):
        m = self.models
        return self.beside_ext4(request, m.plain("tiny"), m.shards(), self.machine.virtual_file, m.plain())


def from_pretrained(bench):
    yield "from_pretrained", bench.of_folder(bench.models.shards)


def load_file(bench):
    yield "load_file", bench.of_one_file(load("safetensors"))


def random_order(bench):
    yield "random order", bench.of_one_file(RANDOM_ORDER)


def pickled(bench):
    yield ".bin", bench.of_folder(bench.models.bins)


def remembered(bench):
    m, machine = bench.models, bench.machine
    for name, *words in [
        ("from_pretrained", FROM_PRETRAINED, machine.point, m.shards("tiny")),
        ("random order", RANDOM_ORDER, machine.virtual_file, m.plain("tiny")),
    ]:
        runs = []
        for _ in range(RUNS):
            with tempfile.TemporaryDirectory() as cache:
                first, again = (bench.seconds(*words, source=m.shards(), remembered=cache)[0] for _ in range(2))
            runs.append({"first": first, "again": again})
        yield f"remembered, {name}", runs


def eight_processes(bench):
    m, machine, before, reads = bench.models, bench.machine, [], []
    request, tiny = workload(workloads.mapping), m.plain("tiny")

    def prepare():
        machine.cold()
        before.append(read_from_disk(m.folder))

    def of_mount():
        took = bench.seconds(request, machine.virtual_file, tiny, source=m.shards(), count=8, prepare=prepare)
        reads.append({"read": read_from_disk(m.folder) - before[-1], "model": m.bytes})
        return took

    def of_ext4():
        return bench.seconds(request, m.plain(), tiny, count=8, prepare=prepare)

    yield "8 processes", machine.compare({"mount": of_mount, "ext4": of_ext4})
    yield "8 processes, read from the disk", reads


def read_from_disk(folder):
    """Bytes that were ever read from the device of a folder."""
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
            cat(bench.machine, bench.machine.virtual_file)
            return daemon.cpu - before

    yield "daemon CPU", alternate(["daemon", "cat"], one)


def cat(machine, path):
    """Processor seconds of `cat`."""
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
        """Bytes in the page cache: of the sources before a load and after it, and of the virtual file."""
        worker = machine.worker(load("safetensors"), machine.virtual_file, m.plain("tiny"))
        prepare()
        with machine.mounted(m.shards()):
            machine.refill()
            before = sum(in_page_cache(m.sources))
            machine.measure([worker])
            return before, sum(in_page_cache(m.sources)), sum(in_page_cache([machine.virtual_file]))

    for _ in range(RUNS):
        _, sources, virtual_file = held(machine.cold)
        used.append({"cached": sources + virtual_file, "model": m.bytes})
        before, sources, _ = held(lambda: machine.warm(*m.sources))
        changed.append({"changed": abs(sources - before), "source": before})
    yield "page cache", used
    yield "page cache, of a cached source changed", changed


def beside_others(bench, prepare, loaders, runs=RUNS):
    m, machine = bench.models, bench.machine

    def seconds(loader):
        return lambda: bench.seconds(load(loader), m.shards(), m.shards("tiny"), prepare=prepare)

    return machine.compare({name: seconds(loader) for name, loader in loaders.items()}, runs)


def owned(bench):
    loaders = {
        "ckptfs": "ckptfs owned", "safetensors": "safetensors owned", "fastsafetensors": "fastsafetensors",
        "runai-model-streamer": "runai",
    }  # fmt: skip
    for state, prepare in bench.machine.states(bench.models.shards()):
        yield f"owned, {state}", beside_others(bench, prepare, loaders)


def mapped(bench):
    _, (_, cached) = bench.machine.states(bench.models.shards())
    # The loads are short, and close to each other.
    yield "mapped", beside_others(bench, cached, {"ckptfs": "ckptfs mapped", "safetensors": "safetensors"}, 4 * RUNS)


def to_first_byte(bench):
    runs, many, machine = [], bench.models.many, bench.machine
    for _ in range(RUNS):
        machine.warm(many)
        with machine.mounted(many):
            machine.ready()
            runs.append({"mount": first_byte(machine.virtual_file)})
    yield "first byte", runs


def owned_through_the_mount(bench):
    m, machine, first, again = bench.models, bench.machine, [], []

    def owned(path):
        worker = machine.worker(load("safetensors owned"), path, m.plain("tiny"))
        # The memory of the load before is free by now.
        machine.ballast.take()
        (took,) = machine.measure([worker])
        return took["end"] - took["start"]

    def twice(path):
        """The first load leaves in the page cache what is read."""
        first = owned(path)
        machine.read(path)
        return [first, owned(path)]

    def one(side):
        if side == "ext4":
            machine.warm(m.plain())
            return twice(m.plain())
        machine.warm(m.shards())
        with machine.mounted(m.shards()):
            return twice(machine.virtual_file)

    for run in alternate(["mount", "ext4"], one):
        for rows, n in [(first, 0), (again, 1)]:
            rows.append({side: took[n] for side, took in run.items()})
    yield "owned through the mount", first
    yield "owned through the mount, again", again


def daemon_memory(bench):
    if not bench.machine.peaks:
        bench.of_one_file(load("safetensors"))
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


def main(*names):
    if unknown := [name for name in names if name not in CASES]:
        raise SystemExit(f"no case {unknown[0]!r}; there are: {', '.join(CASES)}")
    results = Results("targets", whole=not names)
    with machine() as measuring:
        bench = Bench(measuring, Models(os.environ.get("CKPTFS_BENCH_MODELS", measuring.folder), SIZE))
        for name in [name for name in CASES if name in names or not names]:
            for row, runs in CASES[name](bench):
                results.add("targets", [row], runs)
