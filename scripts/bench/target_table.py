"""What the mount and the loader promise beside the plain filesystem and others, and the table that says what was
measured of it.

In: rows of results, as scripts/bench/targets.py has them. Out: the columns of the table, and figures for its chart.
"""

import statistics
from dataclasses import dataclass

from bench.columns import label, spread


@dataclass(frozen=True)
class Floor:
    """A row: what is measured, beside what, and the most that it may be. `other` names several where the best of
    them is meant, the one with the least median."""

    row: str
    ours: str
    other: str | tuple | None
    floor: float
    goal: float | None = None
    unit: str = "s"

    def figures(self, runs):
        """One for each run: how much of the other ours is; without another, ours."""
        if self.unit == "ms":
            return [run[self.ours] * 1000 for run in runs]
        if self.unit == "MB":
            return [(run[self.ours] - run[self.other]) / 1e6 for run in runs]
        best = self.best(runs)
        return [run[self.ours] / run[best] for run in runs]

    @property
    def is_plain(self):
        """No ratio, but a number of something."""
        return self.unit in ("ms", "MB")

    def best(self, runs):
        others = (self.other,) if isinstance(self.other, str) else self.other
        return min(others, key=lambda name: statistics.median(run[name] for run in runs))

    def measured(self, runs):
        """What the floor is held against: the median; of memory the most."""
        return (max if self.unit == "MB" else statistics.median)(self.figures(runs))


PEERS = ("safetensors", "fastsafetensors", "runai-model-streamer")

FLOORS = {floor.row: floor for floor in [
    Floor("from_pretrained", "mount", "ext4", 0.85, 0.65),
    Floor("load_file", "mount", "ext4", 0.9, 0.7),
    Floor("random order", "mount", "ext4", 1.0, 0.8),
    Floor(".bin", "mount", "ext4", 0.9, 0.7),
    Floor("remembered, from_pretrained", "again", "first", 0.95, 0.85),
    Floor("remembered, random order", "again", "first", 0.95, 0.85),
    Floor("8 processes", "mount", "ext4", 1.1, 0.9),
    Floor("8 processes, read from the disk", "read", "model", 1.1, unit="GB"),
    Floor("daemon CPU", "daemon", "cat", 2.0),
    Floor("page cache", "cached", "model", 1.1, unit="GB"),
    Floor("page cache, of a cached source changed", "changed", "source", 0.0, unit="GB"),
    Floor("owned, cold", "ckptfs", PEERS, 0.95, 0.7),
    Floor("owned, cached", "ckptfs", PEERS, 0.95, 0.7),
    Floor("mapped", "ckptfs", "safetensors", 1.05, 1.0),
    Floor("first byte", "mount", None, 500, 200, unit="ms"),
    Floor("owned through the mount", "mount", "ext4", 2.2, 1.6),
    Floor("owned through the mount, again", "mount", "ext4", 1.1, 1.0),
    Floor("daemon memory", "peak", "budget", 64, unit="MB"),
]}  # fmt: skip


def floor_of(row):
    return FLOORS[row["row"][0]]


def figures(row, rows):
    return floor_of(row).figures(row["runs"])


def side(name, row):
    """The median of one side."""
    floor = floor_of(row)
    value = statistics.median(run[name] for run in row["runs"])
    return f"{name} {value:.2f} s" if floor.unit == "s" else f"{name} {value / 1e9:.2f} GB"


def ours(row, rows):
    floor = floor_of(row)
    return side(floor.ours, row) if floor.other else ""


def other(row, rows):
    floor = floor_of(row)
    return side(floor.best(row["runs"]), row) if floor.other else ""


def with_unit(text, floor):
    return f"{text} {floor.unit}" if floor.is_plain else text


def measured(row, rows):
    floor = floor_of(row)
    return with_unit(spread(figures(row, rows), 0 if floor.is_plain else 2), floor)


def held(row, rows):
    floor = floor_of(row)
    missed = "" if floor.measured(row["runs"]) <= floor.floor else ", missed"
    return with_unit(f"{floor.floor:g}", floor) + missed


def goal(row, rows):
    floor = floor_of(row)
    return "" if floor.goal is None else with_unit(f"{floor.goal:g}", floor)


COLUMNS = (
    label(), ("", ours), ("beside", other), ("measured: median (least to most)", measured), ("target", held),
    ("goal", goal),
)  # fmt: skip
