"""The machine that measures, in a known state.

Free memory is its own, and caches are dropped or filled. Each load has a process of its own, and each cold one a daemon
of its own. A load's time ends when its last page is touched; what giving it up takes is not counted. Needs root.
"""

import os
import tempfile
from contextlib import closing, contextmanager, nullcontext
from pathlib import Path

from ckptfs.bench import page_cache
from ckptfs.bench.process import WorkerProcess

from bench.fixtures import RUNS, in_page_cache, alternate, mounted
from bench.memory_ballast import Ballast, NoBallast

VIRTUAL_FILE = "model.safetensors"


def load(loader):
    """A request that loads with one of the package's loaders, or with "module:function", and touches every page."""
    return {"loader": loader, "device": "cpu", "sum": True}


def span(results):
    """Seconds from the first start to the last end."""
    return max(result["end"] for result in results) - min(result["start"] for result in results)


class Machine:
    """A folder for models, a mountpoint, the owner of free memory, and the peak memory of every daemon so far."""

    def __init__(self, folder, ballast):
        self.folder = folder
        self.ballast = ballast
        self.point = folder / "mount"
        self.point.mkdir()
        self.virtual_file = self.point / VIRTUAL_FILE
        self.peaks = []
        self.warmed = []

    @property
    def has_ballast(self):
        """1 while a ballast holds free memory, else 0."""
        return int(isinstance(self.ballast, Ballast))

    def cold(self):
        """Drops all caches."""
        self.warmed = []
        os.sync()
        page_cache.drop_all()
        self.ballast.take()

    def warm(self, *paths):
        """Brings these files, and all files of these folders, into the page cache, and nothing else."""
        self.cold()
        self.read(*paths)

    def states(self, *paths):
        """Cold, and cached, with what brings these paths there."""
        return [("cold", self.cold), ("cached", lambda: self.warm(*paths))]

    def read(self, *paths):
        """Keeps these files in the page cache from now on, whenever something is measured."""
        self.warmed = [
            file for path in map(Path, paths) for file in (sorted(path.iterdir()) if path.is_dir() else [path])
        ]  # fmt: skip
        page_cache.warm(self.warmed)

    def refill(self):
        """Reads again what was read and evicted since. The system may reclaim what it takes for unused, within a
        second or two."""
        gone = self.warmed
        for _ in range(8):
            there = in_page_cache(gone)
            gone = [path for path, held in zip(gone, there, strict=True) if held < path.stat().st_size]
            if not gone:
                return
            page_cache.warm(gone)
        raise SystemExit(f"failed: the page cache does not keep {gone[0]}, which is to be measured from there")

    def ready(self):
        """Prepares what must be fresh right before a clock starts."""
        self.ballast.renew()
        self.refill()

    @contextmanager
    def with_ballast(self, ballast):
        """Free memory is held by this ballast, if it holds any."""
        before, self.ballast = self.ballast, ballast
        try:
            with closing(ballast):
                yield
        finally:
            self.ballast = before

    def measure_with_and_without_ballast(self, measure):
        """Calls `measure` with the ballast and without it. Returns all runs, each marked with `ballast`."""
        return [run | mark for mark in self.each_ballast() for run in measure()]

    def each_ballast(self):
        """Holds free memory, then leaves it alone. Yields what marks the runs of each."""
        for ballast in (Ballast, NoBallast):
            with self.with_ballast(ballast()):
                yield {"ballast": self.has_ballast}

    @contextmanager
    def mounted(self, source, **options):
        """A mount of its own daemon, whose peak memory is noted."""
        with mounted(source, self.point, **options) as daemon:
            yield daemon
            self.peaks.append({"peak": daemon.peak, "budget": daemon.budget, "ballast": self.has_ballast})

    def worker(self, request, path, warm_up, paths=(), python=None):
        """A process that has done a request on something tiny, and waits to do it on this path. The path need not
        be there before the measurement. `python` is another interpreter than this one."""
        worker = WorkerProcess(paths, python=python)
        tiny = {"warm_up": str(warm_up)} if warm_up else {}
        request = {**request, **tiny, "path": str(path), "threads": 1, "keep_programs": True}
        if fault := worker.prepare(request):
            raise SystemExit(f"failed: {request}: {fault['fault']}")
        return worker

    def run(self, request, path, warm_up=None, source=None, count=1, prepare=None, begin=None, paths=(),
              python=None):  # fmt: skip
        """Runs a request in so many processes at once, through a fresh mount of the source if there is one. Returns
        the time that they took, and the result of them all. `prepare` comes before the mount, `begin` after it."""
        workers = [self.worker(request, path, warm_up, paths, python) for _ in range(count)]
        (prepare or self.cold)()
        with self.mounted(source) if source else nullcontext():
            if begin:
                begin()
            results = self.measure(workers)
        outcomes = [result.get("tensors", result.get("number")) for result in results]
        assert all(outcome == outcomes[0] for outcome in outcomes), outcomes
        seconds = span(results)
        took = {"seconds": seconds, **{key: sum(result[key] for result in results) for key in ("cpu", "peak")}}
        return took, outcomes[0]

    def measure(self, workers, begin=None):
        """Their results. They end together: none frees its memory while another is at work. `begin` comes right before
        they start."""
        try:
            self.ready()
            if begin:
                begin()
            for worker in workers:
                worker.go()
            results = [worker.result() for worker in workers]
        finally:
            for worker in workers:
                worker.close()
        for result in results:
            if "fault" in result:
                raise SystemExit(f"failed: {result['fault']}")
        return results

    def compare_with_and_without_ballast(self, loads):
        """As `compare`, with the ballast and without it. Each timing is marked with `ballast`."""
        runs = self.measure_with_and_without_ballast(lambda: self.compare(loads))
        return [
            {name: took | {"ballast": run["ballast"]} for name, took in run.items() if name != "ballast"} for run in runs
        ]

    def compare(self, loads, runs=RUNS):
        """What each of these calls took, run by run. Each returns that and an outcome, equal wherever it is not None."""
        outcomes = []

        def took(name):
            found, outcome = loads[name]()
            if outcome is not None:
                outcomes.append(outcome)
                assert outcome == outcomes[0], (name, outcome, outcomes[0])
            return found

        return alternate(list(loads), took, runs)


@contextmanager
def machine(has_ballast=True):
    """The machine for a part, as root. Without a ballast free memory is left to the system."""
    assert os.geteuid() == 0, "dropping caches needs root"
    with tempfile.TemporaryDirectory() as folder, closing(Ballast() if has_ballast else NoBallast()) as ballast:
        yield Machine(Path(folder), ballast)
