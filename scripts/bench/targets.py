"""What the mount and the loader are held to: each case several times, in turn with its baseline. `target_table` has
the targets.

SIZE is the part of the model to try it out with. CKPTFS_BENCH_MODELS names a folder that keeps the models from one run
to the next.
"""

import json
import os
import shutil
import subprocess
import time
from contextlib import closing, contextmanager
from pathlib import Path
from threading import Thread

from ckptfs.bench.usage import processor_seconds

from bench import REPOSITORY, workloads
from bench.fixtures import RUNS, first_byte, in_page_cache, alternate
from bench.machine import load, machine, span
from bench.models import Models
from bench.results import Results
from bench.workloads import make_request

SIZE = float(os.environ.get("SIZE", "1"))

CONSTANT_MOUNT = REPOSITORY / "target/constant-mount/release/constant-mount"

FROM_PRETRAINED = load(f"{workloads.__name__}:from_pretrained")
RANDOM_ORDER = make_request(workloads.touch_in_random_order)


class Bench:
    """The machine, and the models in each of their forms."""

    def __init__(self, machine, models):
        self.machine = machine
        self.models = models

    def time_request(self, *arguments, **options):
        """Seconds that a request of `machine.run` takes, and its result."""
        timing, result = self.machine.run(*arguments, **options)
        return timing["seconds"], result

    def compare_with_ext4(self, request, tiny, source, mounted_path, plain_path, ideal_path):
        """Seconds for what the mount of the source shows there, for what lies on the plain filesystem, and the ideal."""
        return self.machine.compare({
            "mount": lambda: self.time_request(request, mounted_path, tiny, source=source),
            "ext4": lambda: self.time_request(request, plain_path, tiny),
            "ideal": lambda: self.time_ideal(request, ideal_path, tiny),
        })  # fmt: skip

    def time_ideal(self, request, path, tiny, count=1):
        """Seconds of requests to a mount whose daemon has no work of its own. It answers with constant bytes. Once a
        twentieth of the model was requested, fio reads it from the disk. A daemon that does not guess has fetched no
        more until then. There is no result to compare."""
        workers = [self.machine.worker(request, path, tiny) for _ in range(count)]
        self.machine.cold()
        reader = DiskReader(self.models.sources, percent=95)
        with constant_mount(self.models.plain(), self.machine.point) as daemon:
            begin = Thread(target=lambda: (daemon.wait_until_begun(), reader.begin()))
            results = self.machine.measure(workers, begin.start)
            begin.join()
            disk = reader.end()
        disk_end = daemon.begun + disk["seconds"]
        return max(span(results), disk_end - min(result["start"] for result in results)), None

    def read_from_disk(self):
        """Seconds, and processor seconds, for which fio reads the model."""
        self.machine.cold()
        self.machine.ready()
        reader = DiskReader(self.models.sources)
        reader.begin()
        return reader.end()

    def compare_folders(self, find_folder):
        # A model's folder whose weights are those of the mount.
        folder = self.machine.folder / "ideal"
        folder.mkdir(exist_ok=True)
        for path in self.models.shards().glob("*config.json"):
            shutil.copy(path, folder)
        link = folder / self.machine.virtual_file.name
        if not link.is_symlink():
            link.symlink_to(self.machine.virtual_file)
        return self.compare_with_ext4(
            FROM_PRETRAINED, find_folder("tiny"), find_folder(), self.machine.point, find_folder(), folder
        )

    def compare_files(self, request):
        models, virtual_file = self.models, self.machine.virtual_file
        return self.compare_with_ext4(
            request, models.plain("tiny"), models.shards(), virtual_file, models.plain(), virtual_file
        )

    def compare_loaders(self, prepare, loaders, runs=RUNS, with_ideal=False):
        """Seconds of each loader with the shards on the plain filesystem. The ideal only reads them from the disk."""
        models = self.models

        def make_run(loader):
            return lambda: self.time_request(load(loader), models.shards(), models.shards("tiny"), prepare=prepare)

        sides = {name: make_run(loader) for name, loader in loaders.items()}
        if with_ideal:
            sides["ideal"] = lambda: (self.read_from_disk()["seconds"], None)
        return self.machine.compare(sides, runs)


def measure_from_pretrained(bench):
    yield "from_pretrained", bench.compare_folders(bench.models.shards)


def measure_load_file(bench):
    yield "load_file", bench.compare_files(load("safetensors"))


def measure_random_order(bench):
    yield "random order", bench.compare_files(RANDOM_ORDER)


def measure_pickles(bench):
    yield ".bin", bench.compare_folders(bench.models.bins)


def measure_eight_processes(bench):
    models, machine, counts_before, reads = bench.models, bench.machine, [], []
    request, tiny = make_request(workloads.map_file), models.plain("tiny")

    def prepare():
        machine.cold()
        counts_before.append(count_disk_bytes(models.folder))

    def time_mount():
        result = bench.time_request(request, machine.virtual_file, tiny, source=models.shards(), count=8,
                                    prepare=prepare)  # fmt: skip
        reads.append({"read": count_disk_bytes(models.folder) - counts_before[-1], "model": models.bytes})
        return result

    def time_ext4():
        return bench.time_request(request, models.plain(), tiny, count=8, prepare=prepare)

    def time_ideal():
        return bench.time_ideal(request, machine.virtual_file, tiny, count=8)

    yield "8 processes", machine.compare({"mount": time_mount, "ext4": time_ext4, "ideal": time_ideal})
    yield "8 processes, read from the disk", reads


def count_disk_bytes(folder):
    """Bytes that were ever read from the device of a folder."""
    device = os.stat(folder).st_dev
    fields = Path(f"/sys/dev/block/{os.major(device)}:{os.minor(device)}/stat").read_text().split()
    return int(fields[2]) * 512


def measure_daemon_cpu(bench):
    models = bench.models

    def measure_side(side):
        bench.machine.cold()
        if side == "cat":
            return time_cat(bench.machine, models.plain())
        if side == "daemon":
            read, mount = 0, bench.machine.mounted(models.shards())
        else:
            # What it takes to read the model, and to answer with what is in the page cache.
            read = bench.read_from_disk()["cpu"]
            bench.machine.warm(*models.sources)
            mount = copying_mount(bench)
        with mount as daemon:
            before = daemon.cpu
            time_cat(bench.machine, bench.machine.virtual_file)
            return read + daemon.cpu - before

    yield "daemon CPU", alternate(["daemon", "cat", "ideal"], measure_side)


def time_cat(machine, path):
    """Processor seconds of `cat`."""
    machine.ready()
    with open(path, "rb") as file:
        process = subprocess.Popen(["cat"], stdin=file, stdout=subprocess.DEVNULL)
        _, status, usage = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    assert process.returncode == 0, path
    return usage.ru_utime + usage.ru_stime


def measure_page_cache(bench):
    models, machine, cached_runs, changed_runs = bench.models, bench.machine, [], []

    def count_cached_bytes(prepare):
        """Bytes in the page cache: of the sources before a load and after it, and of the virtual file."""
        worker = machine.worker(load("safetensors"), machine.virtual_file, models.plain("tiny"))
        prepare()
        with machine.mounted(models.shards()):
            machine.refill()
            before = sum(in_page_cache(models.sources))
            machine.measure([worker])
            return before, sum(in_page_cache(models.sources)), sum(in_page_cache([machine.virtual_file]))

    for _ in range(RUNS):
        _, sources, virtual_file = count_cached_bytes(machine.cold)
        cached_runs.append({"cached": sources + virtual_file, "model": models.bytes})
        before, sources, _ = count_cached_bytes(lambda: machine.warm(*models.sources))
        changed_runs.append({"changed": abs(sources - before), "source": before})
    yield "page cache", cached_runs
    yield "page cache, of a cached source changed", changed_runs


def measure_owned_loads(bench):
    loaders = {
        "ckptfs": "ckptfs owned", "safetensors": "safetensors owned", "fastsafetensors": "fastsafetensors",
        "runai-model-streamer": "runai",
    }  # fmt: skip
    for state, prepare in bench.machine.states(bench.models.shards()):
        yield f"owned, {state}", bench.compare_loaders(prepare, loaders, with_ideal=state == "cold")


def measure_mapped_loads(bench):
    _, (_, prepare_cached) = bench.machine.states(bench.models.shards())
    loaders = {"ckptfs": "ckptfs mapped", "safetensors": "safetensors"}
    # The loads are short, and close to each other.
    yield "mapped", bench.compare_loaders(prepare_cached, loaders, 4 * RUNS)


def measure_first_byte(bench):
    runs, folder, machine = [], bench.models.many, bench.machine
    for _ in range(RUNS):
        machine.warm(folder)
        with machine.mounted(folder):
            machine.ready()
            runs.append({"mount": first_byte(machine.virtual_file)})
    yield "first byte", runs


def measure_cached_mount_loads(bench):
    """The first load and the second one, with the sources in the page cache. Beside it, those of the plain file, and of
    mounts whose daemons answer with constant bytes, and with what is in the page cache."""
    for way, loader in (("mapped", "safetensors"), ("owned", "safetensors owned")):
        sides = ["mount", "constant", "ideal", "ext4"]
        runs = alternate(sides, lambda side, loader=loader: time_two_loads(bench, side, loader))
        for index, suffix in ((0, ""), (1, ", again")):
            yield f"cached, {way}{suffix}", [{side: run[side][index] for side in run} for run in runs]
        daemons = {"daemon": "mount", "ideal": "ideal", "constant": "constant"}
        yield f"cached, {way}, daemon for 2 GB", [
            {name: run[side][2] * 2e9 / bench.models.bytes for name, side in daemons.items()} for run in runs
        ]


def time_two_loads(bench, side, loader):
    """Seconds of the first and of the second load, and the daemon's processor seconds for the first. The first leaves in
    the page cache what is read."""
    models, machine = bench.models, bench.machine
    mounts = {
        "mount": lambda: machine.mounted(models.shards()),
        "constant": lambda: constant_mount(models.plain(), machine.point),
        "ideal": lambda: copying_mount(bench),
        "ext4": lambda: closing(NoDaemon()),
    }
    path = models.plain() if side == "ext4" else machine.virtual_file
    machine.warm(models.shards() if side in ("mount", "ideal") else models.plain())

    def time_load():
        worker = machine.worker(load(loader), path, models.plain("tiny"))
        # The memory of the load before is free by now.
        machine.ballast.take()
        (timing,) = machine.measure([worker])
        return timing["end"] - timing["start"]

    with mounts[side]() as daemon:
        before = daemon.cpu
        first, used = time_load(), daemon.cpu - before
        machine.read(path)
        return first, time_load(), used


class NoDaemon:
    cpu = 0

    def close(self):
        pass


class DiskReader:
    """fio, which reads these files, or so much of each, past the page cache."""

    def __init__(self, paths, percent=100):
        self.bytes = sum(path.stat().st_size for path in paths) * percent / 100
        self.command = [
            "fio", "--name=read", f"--filename={':'.join(map(str, paths))}", f"--size={percent}%", "--rw=read",
            "--readonly", "--direct=1", "--bs=1M", "--ioengine=libaio", "--iodepth=8", "--output-format=json",
        ]  # fmt: skip

    def begin(self):
        self.process = subprocess.Popen(self.command, stdout=subprocess.PIPE, text=True)

    def end(self):
        """Seconds that it read, and its processor seconds."""
        (job,) = json.loads(self.process.communicate()[0])["jobs"]
        read = job["read"]
        if read["io_bytes"] < self.bytes * 0.99:
            raise SystemExit("failed: fio did not read the model")
        seconds = read["runtime"] / 1000
        return {"seconds": seconds, "cpu": seconds * (job["usr_cpu"] + job["sys_cpu"]) / 100}


@contextmanager
def constant_mount(path, point, shards=()):
    """A mount by stubs/constant-mount, of a file like this one. With shards it shows what they hold."""
    process = subprocess.Popen([CONSTANT_MOUNT, path, point, *shards], stdout=subprocess.PIPE, text=True)
    try:
        if process.stdout.readline() != "ready\n":
            raise SystemExit("failed: constant-mount did not mount")
        yield ConstantDaemon(process)
    finally:
        subprocess.run(["umount", point], check=True)
        process.wait()


def copying_mount(bench):
    """A mount whose daemon hands over what lies in the page cache, and does nothing else."""
    return constant_mount(bench.models.plain(), bench.machine.point, bench.models.sources)


class ConstantDaemon:
    """`begun` is when a twentieth of its file had been read."""

    def __init__(self, process):
        self.process = process
        self.begun = None

    def wait_until_begun(self):
        if self.process.stdout.readline() != "begun\n":
            raise SystemExit("failed: the load did not read its file")
        self.begun = time.monotonic()

    @property
    def cpu(self):
        """Processor seconds so far."""
        return processor_seconds(self.process.pid)


def measure_daemon_memory(bench):
    def find_peaks():
        return [peak for peak in bench.machine.peaks if peak["ballast"] == bench.machine.has_ballast]

    if not find_peaks():
        bench.compare_files(load("safetensors"))
    yield "daemon memory", find_peaks()


CASES = {
    "from_pretrained": measure_from_pretrained,
    "load_file": measure_load_file,
    "random order": measure_random_order,
    ".bin": measure_pickles,
    "8 processes": measure_eight_processes,
    "daemon CPU": measure_daemon_cpu,
    "page cache": measure_page_cache,
    "owned": measure_owned_loads,
    "mapped": measure_mapped_loads,
    "first byte": measure_first_byte,
    "cached": measure_cached_mount_loads,
    # The last, for it is about all of them.
    "daemon memory": measure_daemon_memory,
}


def main(*names):
    if unknown := [name for name in names if name not in CASES]:
        raise SystemExit(f"no case {unknown[0]!r}; there are: {', '.join(CASES)}")
    results = Results("targets", names)
    with machine(has_ballast=False) as bench_machine:
        bench = Bench(bench_machine, Models(os.environ.get("CKPTFS_BENCH_MODELS", bench_machine.folder), SIZE))
        for name in [name for name in CASES if name in names or not names]:
            rows = {}
            for mark in bench_machine.each_ballast():
                for row, runs in CASES[name](bench):
                    rows.setdefault(row, []).extend(run | mark for run in runs)
            for row, runs in rows.items():
                results.add("targets", [row], runs)
