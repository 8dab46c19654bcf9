"""The mount beside the plain filesystem: the same file once as it is exported, once as the mount shows it. In the
tables, speeds above 1 are faster than the plain filesystem."""

import json
import os
import subprocess
import time

from bench.fixtures import CKPTFS, RUNS, first_byte, alternate, uniform, write_model
from bench.machine import load, machine
from bench.memory_ballast import Ballast
from bench.models import in_process, many_tensors, small_pickle
from bench.results import Results


def fio(*options):
    """A function that reads a file as these options say, and returns seconds."""
    def read(path):
        command = ["fio", "--name=read", f"--filename={path}", "--readonly", "--allow_file_create=0",
                   "--invalidate=0", "--output-format=json", *options]
        done = subprocess.run(command, check=True, capture_output=True, text=True)
        job = json.loads(done.stdout)["jobs"][0]
        assert job["error"] == 0, done.stdout
        return job["read"]["runtime"] / 1000

    return read


READS = {
    "sequential `read`, 1 MiB": fio("--rw=read", "--bs=1M", "--ioengine=psync"),
    "sequential through `mmap`": fio("--rw=read", "--bs=1M", "--ioengine=mmap"),
    "16,384 random reads of 4 KiB": fio("--rw=randread", "--bs=4k", "--ioengine=psync", "--io_size=64M",
                                        "--randseed=7", "--norandommap"),
}  # fmt: skip

STATES = ("cold", "source cached", "second read")


class MountComparison:
    """The same model on the plain filesystem and through the mount, and the source of the mount."""

    def __init__(self, machine):
        self.machine = machine
        self.model, self.plain = machine.folder / "model", machine.folder / "plain.safetensors"
        self.tiny = machine.folder / "tiny"
        write_model(self.model, uniform(4, 50, 5 << 20))
        write_model(self.tiny, uniform(1, 2, 1 << 10))
        subprocess.run([CKPTFS, "export", self.model, self.plain], check=True, stdout=subprocess.DEVNULL)

    def read(self, way, state, side):
        """Seconds of a read."""
        def seconds(path):
            self.machine.ready()
            return way(path)

        self.prepare(state, side)
        if side == "plain":
            return seconds(self.plain)
        with self.machine.mounted(self.model):
            self.read_before(state)
            return seconds(self.machine.virtual_file)

    def load(self, state, side):
        """Seconds of a load, every page touched."""
        path, source = (self.plain, None) if side == "plain" else (self.machine.virtual_file, self.model)
        took, _ = self.machine.run(
            load("safetensors"), path, self.tiny, source=source, prepare=lambda: self.prepare(state, side),
            begin=lambda: side == "plain" or self.read_before(state),
        )  # fmt: skip
        return took["seconds"]

    def prepare(self, state, side):
        if state == "cold":
            self.machine.cold()
        else:
            self.machine.warm(self.plain if side == "plain" else self.model)

    def read_before(self, state):
        if state == "second read":
            self.machine.read(self.machine.virtual_file)
            self.machine.ballast.take()


def throughput(results, machine):
    comparison = MountComparison(machine)
    loads = {title: lambda state, side, way=way: comparison.read(way, state, side) for title, way in READS.items()}
    for title, one in (loads | {"`load_file`, every page touched": comparison.load}).items():
        for state in STATES:
            sides = ["plain", "mount"]
            runs = machine.measure_with_and_without_ballast(lambda: alternate(sides, lambda side: one(state, side)))
            results.add("mount", [title, state], runs)


def checkpoints(results, machine):
    sample = machine.folder / "sample.pt"
    in_process(small_pickle, path=sample)
    data = sample.read_bytes()
    for count in (1, 100, 10_000):
        many = machine.folder / f"many{count}"
        many.mkdir()
        for n in range(count):
            (many / f"model{n}.pt").write_bytes(data)
        runs = []
        for _ in range(RUNS):
            machine.cold()
            machine.ready()
            with machine.mounted(many) as daemon:
                byte = first_byte(daemon.point / f"model{count - 1}.safetensors")
                start = time.perf_counter()
                assert len(os.listdir(daemon.point)) == count
                runs.append({"mount": daemon.seconds, "byte": byte, "listed": time.perf_counter() - start})
        results.add("checkpoints", [f"{count:,}"], runs)


def large_header(results, machine):
    many = machine.folder / "tensors"
    in_process(many_tensors, folder=many)
    built, again = [], []
    for _ in range(RUNS):
        machine.cold()
        with machine.mounted(many):
            machine.ready()
            built.append({"seconds": first_byte(machine.virtual_file)})
            time.sleep(1)
            again.append({"seconds": first_byte(machine.virtual_file)})
    results.add("first-byte", ["after the mount, caches dropped"], built)
    results.add("first-byte", ["once built"], again)


def main():
    results = Results("mount")
    with machine(has_ballast=False) as measuring:
        throughput(results, measuring)
        with measuring.with_ballast(Ballast()):
            for measure in (checkpoints, large_header):
                measure(results, measuring)
