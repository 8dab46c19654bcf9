"""What every part of a run needs: its options, its folders and its time limit."""

import time
from dataclasses import dataclass
from pathlib import Path

from ckptfs.bench.process import WorkerProcess

from gpu_check import REPOSITORY
from gpu_check.table import CheckTable

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
    missing_packages: dict
    # Bytes that were free on the device.
    free_device_bytes: int | None
    # The Rust test that needs a device, as a program, if there is a pack.
    rust_test: Path | None
    deadline: float | None
    table: CheckTable

    def worker(self, *packages, environment=None):
        """A worker process that finds these packages first."""
        folders = [self.folders[name] for name in packages if name in self.folders]
        return WorkerProcess([*folders, _TESTS], environment)

    def explain_missing(self, *names):
        """Why one of these packages is missing."""
        for name in names:
            if name in self.missing_packages:
                return f"{name}: {self.missing_packages[name]}"
        return None

    def is_out_of_time(self, part):
        """Whether the time is over. If so the table says that this part was not begun."""
        is_late = self.deadline is not None and time.monotonic() >= self.deadline
        if is_late:
            self.table.add_missing(part)
        return is_late
