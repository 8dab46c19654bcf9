"""The machine that measures, in a known state: free memory is its own, caches are dropped or filled, each load has a
process of its own and each cold one a daemon of its own. Needs root.

In: what to load, and how. Out: seconds, until the last page is touched; what giving it up again takes is not counted.
"""

import os
import tempfile
from contextlib import closing, contextmanager, nullcontext
from pathlib import Path

from bench.fixtures import RUNS, drop_caches, in_page_cache, in_turn, mounted, warm
from bench.memory_ballast import Keeper
from bench.worker import Measured

IMAGE = "model.safetensors"


class Machine:
    """A folder for models, a place to mount them, who keeps free memory, and the peak memory of every daemon so far."""

    def __init__(self, folder, keeper):
        self.folder = folder
        self.keeper = keeper
        self.point = folder / "mount"
        self.point.mkdir()
        self.image = self.point / IMAGE
        self.peaks = []
        self.warmed = []

    def cold(self):
        self.warmed = []
        drop_caches()
        self.keeper.take()

    def warm(self, *paths):
        """All files of folders, too."""
        self.cold()
        self.read(*paths)

    def read(self, *paths):
        """These are in the page cache from now on, whenever something is measured."""
        self.warmed = [
            file for path in map(Path, paths) for file in (sorted(path.iterdir()) if path.is_dir() else [path])
        ]  # fmt: skip
        warm(self.warmed)

    def refill(self):
        """Reads again what was read and let go of since: the system may reclaim what it thinks unused, within a
        second or two."""
        gone = self.warmed
        for _ in range(8):
            there = in_page_cache(gone) if gone else []
            gone = [path for path, held in zip(gone, there, strict=True) if held < path.stat().st_size]
            if not gone:
                return
            warm(gone)
        raise SystemExit(f"failed: the page cache does not keep {gone[0]}, which is to be measured from there")

    def ready(self):
        """Right before a clock starts."""
        self.keeper.renew()
        self.refill()

    @contextmanager
    def mounted(self, source, **how):
        with mounted(source, self.point, **how) as daemon:
            yield daemon
            self.peaks.append({"peak": daemon.peak, "budget": daemon.budget})

    def apart(self, way, tiny, path, source=None, count=1, prepare=None, begin=None, env=None, remembered=None):
        """What so many processes took that do it at once, through a fresh mount of the source if there is one, and
        the number that they all have. `prepare` comes before the mount and `begin` behind it."""
        processes = [Measured(way, tiny, path, env) for _ in range(count)]
        (prepare or self.cold)()
        with self.mounted(source, remembered=remembered) if source else nullcontext():
            if begin:
                begin()
            took = self.measured(processes)
        (number,) = {each["number"] for each in took}
        seconds = max(each["end"] for each in took) - min(each["start"] for each in took)
        return {"seconds": seconds, **{key: sum(each[key] for each in took) for key in ("cpu", "peak")}}, number

    def measured(self, processes):
        """They end together: none gives up what it has while another is at work."""
        try:
            self.ready()
            for each in processes:
                each.go()
            return [each.took() for each in processes]
        finally:
            for each in processes:
                each.end()

    def compared(self, loads, runs=RUNS):
        """The runs of loads by name, each a call that gives what it took and a number, which is the same for all."""
        numbers = set()

        def took(name):
            found, number = loads[name]()
            numbers.add(number)
            return found

        found = in_turn(list(loads), took, runs)
        assert len(numbers) == 1, numbers
        return found


@contextmanager
def machine():
    assert os.geteuid() == 0, "dropping caches needs root"
    with tempfile.TemporaryDirectory() as folder, closing(Keeper()) as keeper:
        yield Machine(Path(folder), keeper)
