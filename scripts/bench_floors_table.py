"""What the mount and the loader promise beside the plain filesystem and others, and the table that says what was
measured of it.

In: rows of results, as scripts/bench_floors.py has them. Out: lines of Markdown.
"""

import statistics
from dataclasses import dataclass


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

    def best(self, runs):
        others = (self.other,) if isinstance(self.other, str) else self.other
        return min(others, key=lambda name: statistics.median(run[name] for run in runs))

    def measured(self, runs):
        """What the floor is held against: the median; of memory the most."""
        return (max if self.unit == "MB" else statistics.median)(self.figures(runs))


PEERS = ("safetensors", "fastsafetensors", "runai-model-streamer")

FLOORS = [
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
]

HEAD = "| | | beside | measured: median (least to most) | floor | goal |\n|---|---|---|---|---|---|"


def line(floor, runs):
    def middle(name):
        value = statistics.median(run[name] for run in runs)
        return f"{value:.2f} s" if floor.unit == "s" else f"{value / 1e9:.2f} GB"

    plain = floor.unit in ("ms", "MB")
    digits, unit = (0, f" {floor.unit}") if plain else (2, "")
    other = floor.best(runs) if floor.other else ""
    sides = (f"{floor.ours} {middle(floor.ours)}", f"{other} {middle(other)}") if other else ("", "")
    figures = floor.figures(runs)
    spread = f"{min(figures):.{digits}f} to {max(figures):.{digits}f}"
    measured = f"{statistics.median(figures):.{digits}f}{unit} ({spread})"
    missed = "" if floor.measured(runs) <= floor.floor else ", missed"
    goal = "" if floor.goal is None else f"{floor.goal:g}{unit}"
    return f"| {floor.row} | {sides[0]} | {sides[1]} | {measured} | {floor.floor:g}{unit}{missed} | {goal} |"
