"""What every part of a run needs: its options, where things are, and how much time is left."""

import time
from dataclasses import dataclass
from pathlib import Path

from ckptfs.bench.process import WorkerProcess

from gpu_check import REPOSITORY
from gpu_check.table import Table

# What the checks share with the tests.
_TESTS = REPOSITORY / "tests/python/common"


@dataclass
class Job:
    device: str
    quick: bool
    sizes: list
    runs: int
    # Folders on a disk and in memory, the second perhaps missing.
    disk: Path
    shm: Path | None
    # Folders of packages by their names, none where what Python finds is used; and why packages are missing.
    folders: dict
    lacking: dict
    # Bytes that were free on the device.
    free: int | None
    # The Rust test that needs a device, as a program, if there is a pack.
    test: Path | None
    until: float | None
    table: Table

    def worker(self, *packages, environment=None):
        """A worker process that finds these packages first."""
        folders = [self.folders[name] for name in packages if name in self.folders]
        return WorkerProcess([*folders, _TESTS], environment)

    def lacks(self, *names):
        """Why one of these packages is missing."""
        for name in names:
            if name in self.lacking:
                return f"{name}: {self.lacking[name]}"
        return None

    def is_over(self, part):
        """Whether the time is over. If so the table says that this part was not begun."""
        over = self.until is not None and time.monotonic() >= self.until
        if over:
            self.table.lacks(part)
        return over
