"""What the mount and the loader are held to, in one run: each case several times, in turn with what it is beside,
every load in a process of its own. Cold means that free memory is the machine's own, caches are dropped and the
daemon is new; programs are in memory before. Needs root. The table says what was promised.

    bench_floors.py              measures everything
    bench_floors.py CASE...      these alone, by the names of CASES

In: RUNS, CKPTFS, SIZE (a part of the model, to try it out), CKPTFS_BENCH_MODELS (a folder that keeps the models
from one run to the next). Out: `floors.json`, and the table.
"""

import os
import subprocess
import sys
import tempfile
from contextlib import closing, contextmanager, nullcontext
from pathlib import Path

import bench_loader
import bench_process as ways
from bench_common import RUNS, drop_caches, first_byte, in_turn, mounted, warm
from bench_memory import Keeper
from bench_models import Models
from bench_process import Measured
from bench_results import Results

SIZE = float(os.environ.get("SIZE", "1"))
IMAGE = "model.safetensors"


class Bench:
    """The models, a place to mount them, who keeps free memory, and the peak memory of every daemon so far."""

    def __init__(self, folder, models, keeper):
        self.models = models
        self.keeper = keeper
        self.point = folder / "mount"
        self.point.mkdir()
        self.image = self.point / IMAGE
        self.peaks = []

    def cold(self):
        drop_caches()
        self.keeper.take()

    def warm(self, paths):
        self.cold()
        warm(paths)

    @contextmanager
    def mounted(self, source, **how):
        with mounted(source, self.point, **how) as daemon:
            yield daemon
            self.peaks.append({"peak": daemon.peak, "budget": daemon.budget})

    def load(self, way, tiny, path, source=None, count=1, prepare=None, **how):
        """Seconds until all of so many processes are done, and the sum that they all have; through a fresh mount
        of the source, if there is one."""
        processes = [Measured(way, tiny, path) for _ in range(count)]
        (prepare or self.cold)()
        with self.mounted(source, **how) if source else nullcontext():
            for each in processes:
                each.go()
            took = [each.took() for each in processes]
        (total,) = {each["sum"] for each in took}
        return max(each["end"] for each in took) - min(each["start"] for each in took), total

    def beside_ext4(self, way, tiny, source, shown, plain):
        """What the mount of the source shows there, and what lies on the plain filesystem: they have one sum."""
        sides = {"mount": (shown, source), "ext4": (plain,)}
        sums = set()

        def one(side):
            seconds, total = self.load(way, tiny, *sides[side])
            sums.add(total)
            return seconds

        runs = in_turn(list(sides), one)
        assert len(sums) == 1, sums
        return runs

    def of_one_file(self, way):
        m = self.models
        return self.beside_ext4(way, m.plain("tiny"), m.shards(), self.image, m.plain())


def from_pretrained(bench):
    m = bench.models
    yield "from_pretrained", bench.beside_ext4(
        ways.from_pretrained, m.shards("tiny"), m.shards(), bench.point, m.shards()
    )


def load_file(bench):
    yield "load_file", bench.of_one_file(ways.load_file)


def random_order(bench):
    yield "random order", bench.of_one_file(ways.random_order)


def pickled(bench):
    m = bench.models
    yield ".bin", bench.beside_ext4(ways.from_pretrained, m.bins("tiny"), m.bins(), bench.point, m.bins())


def remembered(bench):
    m = bench.models
    for name, way, tiny, path in [
        ("from_pretrained", ways.from_pretrained, m.shards("tiny"), bench.point),
        ("random order", ways.random_order, m.plain("tiny"), bench.image),
    ]:
        runs = []
        for _ in range(RUNS):
            with tempfile.TemporaryDirectory() as cache:
                first, again = (bench.load(way, tiny, path, m.shards(), remembered=cache)[0] for _ in range(2))
            runs.append({"first": first, "again": again})
        yield f"remembered, {name}", runs


def eight_processes(bench):
    m, reads = bench.models, []
    sides = {"mount": (bench.image, m.shards()), "ext4": (m.plain(),)}

    def one(side):
        before = []

        def prepare():
            bench.cold()
            before.append(read_from_disk(m.folder))

        seconds, _ = bench.load(ways.mapped, m.plain("tiny"), *sides[side], count=8, prepare=prepare)
        if side == "mount":
            reads.append({"read": read_from_disk(m.folder) - before[0], "model": m.bytes})
        return seconds

    yield "8 processes", in_turn(list(sides), one)
    yield "8 processes, read from the disk", reads


def read_from_disk(folder):
    """Bytes that were ever read from the device under it."""
    device = os.stat(folder).st_dev
    words = Path(f"/sys/dev/block/{os.major(device)}:{os.minor(device)}/stat").read_text().split()
    return int(words[2]) * 512


def daemon_cpu(bench):
    m = bench.models

    def one(side):
        bench.cold()
        if side == "cat":
            return cat(m.plain())
        with bench.mounted(m.shards()) as daemon:
            before = daemon.cpu
            cat(bench.image)
            return daemon.cpu - before

    yield "daemon CPU", in_turn(["daemon", "cat"], one)


def cat(path):
    """Seconds of processor that it takes."""
    with open(path, "rb") as file:
        process = subprocess.Popen(["cat"], stdin=file, stdout=subprocess.DEVNULL)
        _, status, usage = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    assert process.returncode == 0, path
    return usage.ru_utime + usage.ru_stime


def page_cache(bench):
    m, used, changed = bench.models, [], []

    def held(prepare):
        """Bytes in the page cache: of the sources before a load and after it, and of the image."""
        process = Measured(ways.load_file, m.plain("tiny"), bench.image)
        prepare()
        with bench.mounted(m.shards()):
            before = cached(m.sources)
            process.go()
            process.took()
            return before, cached(m.sources), cached([bench.image])

    for _ in range(RUNS):
        _, sources, image = held(bench.cold)
        used.append({"cached": sources + image, "model": m.bytes})
        before, sources, _ = held(lambda: bench.warm(m.sources))
        changed.append({"changed": abs(sources - before), "source": before})
    yield "page cache", used
    yield "page cache, of a cached source changed", changed


def cached(paths):
    told = subprocess.run(["fincore", "--bytes", "--noheadings", "--raw", "--output", "RES", *paths], check=True,
                          capture_output=True, text=True)  # fmt: skip
    return sum(map(int, told.stdout.split()))


def beside_others(bench, state, loaders, runs=RUNS):
    return in_turn(
        list(loaders),
        lambda name: bench_loader.once("load", state, loaders[name], None, bench.models.sources)["seconds"],
        runs,
    )


def owned(bench):
    loaders = {
        "ckptfs": bench_loader.ckptfs_owned, "safetensors": bench_loader.safetensors_pread,
        "fastsafetensors": bench_loader.fastsafetensors_buffer, "runai-model-streamer": bench_loader.runai_buffer,
    }  # fmt: skip
    for state in ("cold", "cached"):
        yield f"owned, {state}", beside_others(bench, state, loaders)


def mapped(bench):
    loaders = {"ckptfs": bench_loader.ckptfs_mapped, "safetensors": bench_loader.safetensors_mapped}
    # Short, and close to each other.
    yield "mapped", beside_others(bench, "cached", loaders, 4 * RUNS)


def to_first_byte(bench):
    runs, many = [], bench.models.many
    for _ in range(RUNS):
        bench.warm(sorted(many.iterdir()))
        with bench.mounted(many):
            runs.append({"mount": first_byte(bench.image)})
    yield "first byte", runs


def owned_through_the_mount(bench):
    m, first, again = bench.models, [], []

    def load(path):
        process = Measured(ways.load_file_owned, m.plain("tiny"), path)
        # What the load before had is free by now.
        bench.keeper.take()
        process.go()
        took = process.took()
        return took["end"] - took["start"]

    def one(side):
        if side == "ext4":
            bench.warm([m.plain()])
            return [load(m.plain())]
        bench.warm(m.sources)
        with bench.mounted(m.shards()):
            return [load(bench.image), load(bench.image)]

    for run in in_turn(["mount", "ext4"], one):
        first.append({"mount": run["mount"][0], "ext4": run["ext4"][0]})
        again.append({"mount": run["mount"][1], "ext4": run["ext4"][0]})
    yield "owned through the mount", first
    yield "owned through the mount, again", again


def daemon_memory(bench):
    if not bench.peaks:
        bench.of_one_file(ways.load_file)
    yield "daemon memory", bench.peaks


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
    assert os.geteuid() == 0, "dropping caches needs root"
    results = Results("floors", whole=not names)
    with tempfile.TemporaryDirectory() as folder, closing(Keeper()) as keeper:
        models = Models(Path(os.environ.get("CKPTFS_BENCH_MODELS", folder)), SIZE)
        bench = Bench(Path(folder), models, keeper)
        for name in [name for name in CASES if name in names or not names]:
            for row, runs in CASES[name](bench):
                results.add("floors", [row], runs)


if __name__ == "__main__":
    main(sys.argv[1:])
