"""What every part of a run is given: what was asked for, where things are, and how much time is left.

In: the options of the command line. Out: a `Job`.
"""

import time
from dataclasses import dataclass
from pathlib import Path

from table import Table


@dataclass
class Job:
    device: str
    quick: bool
    sizes: list
    runs: int
    # Folders on a disk and in memory, the second perhaps not there.
    disk: Path
    shm: Path | None
    # Folders of packages by their names, none where what Python finds is used; and why packages are not there.
    folders: dict
    lacking: dict
    # Bytes that were free on the device.
    free: int | None
    # The program of Rust that needs a device, if there is a pack.
    test: Path | None
    until: float | None
    table: Table

    def packages(self, *names):
        """The folders in which these packages are."""
        return [self.folders[name] for name in names if name in self.folders]

    def lacks(self, *names):
        """Why one of these packages is not there."""
        for name in names:
            if name in self.lacking:
                return f"{name}: {self.lacking[name]}"
        return None

    def is_over(self, what):
        """Whether the time is over; then it is said that this was not begun."""
        over = self.until is not None and time.monotonic() >= self.until
        if over:
            self.table.lacks(what)
        return over
