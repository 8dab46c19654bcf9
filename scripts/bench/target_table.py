"""What the mount and the loader promise beside the plain filesystem and others, and the table of what was measured."""

import statistics
from dataclasses import dataclass

from ckptfs.bench.tables import spread

from bench.columns import label


@dataclass(frozen=True)
class Target:
    """A row: what is measured, its baseline, and the maximum that it may be. `baseline` names several where the best of
    them is meant, the one with the least median."""

    row: str
    ours: str
    baseline: str | tuple | None
    limit: float
    goal: float | None = None
    unit: str = "s"

    def figures(self, runs):
        """A number for each run: the ratio to the baseline; without one, ours."""
        if self.unit == "ms":
            return [run[self.ours] * 1000 for run in runs]
        if self.unit == "MB":
            return [(run[self.ours] - run[self.baseline]) / 1e6 for run in runs]
        best = self.best(runs)
        return [run[self.ours] / run[best] for run in runs]

    @property
    def is_plain(self):
        """Whether this is no ratio, but a number of something."""
        return self.unit in ("ms", "MB")

    def best(self, runs):
        baselines = (self.baseline,) if isinstance(self.baseline, str) else self.baseline
        return min(baselines, key=lambda name: statistics.median(run[name] for run in runs))

    def measured(self, runs):
        """What is held against the limit: the median; of memory the maximum."""
        return (max if self.unit == "MB" else statistics.median)(self.figures(runs))

    def side(self, name, runs):
        """The median of one side."""
        if not self.baseline:
            return ""
        value = statistics.median(run[name] for run in runs)
        return f"{name} {value:.2f} s" if self.unit == "s" else f"{name} {value / 1e9:.2f} GB"

    def with_unit(self, text):
        return f"{text} {self.unit}" if self.is_plain else text


PEERS = ("safetensors", "fastsafetensors", "runai-model-streamer")

TARGETS = {target.row: target for target in [
    Target("from_pretrained", "mount", "ext4", 0.85, 0.65),
    Target("load_file", "mount", "ext4", 0.9, 0.7),
    Target("random order", "mount", "ext4", 1.0, 0.8),
    Target(".bin", "mount", "ext4", 0.9, 0.7),
    Target("remembered, from_pretrained", "again", "first", 0.95, 0.85),
    Target("remembered, random order", "again", "first", 0.95, 0.85),
    Target("8 processes", "mount", "ext4", 1.1, 0.9),
    Target("8 processes, read from the disk", "read", "model", 1.1, unit="GB"),
    Target("daemon CPU", "daemon", "cat", 2.0),
    Target("page cache", "cached", "model", 1.1, unit="GB"),
    Target("page cache, of a cached source changed", "changed", "source", 0.0, unit="GB"),
    Target("owned, cold", "ckptfs", PEERS, 0.95, 0.7),
    Target("owned, cached", "ckptfs", PEERS, 0.95, 0.7),
    Target("mapped", "ckptfs", "safetensors", 1.05, 1.0),
    Target("first byte", "mount", None, 500, 200, unit="ms"),
    Target("owned through the mount", "mount", "ext4", 2.2, 1.6),
    Target("owned through the mount, again", "mount", "ext4", 1.1, 1.0),
    Target("daemon memory", "peak", "budget", 64, unit="MB"),
]}  # fmt: skip


def target_of(row):
    return TARGETS[row["row"][0]]


def is_reached(row):
    target = target_of(row)
    return target.measured(row["runs"]) <= target.limit


def is_missed(row):
    return not is_reached(row)


def figures(row, rows):
    return target_of(row).figures(row["runs"])


def ours(row, rows):
    target = target_of(row)
    return target.side(target.ours, row["runs"])


def baseline(row, rows):
    target = target_of(row)
    return target.baseline and target.side(target.best(row["runs"]), row["runs"]) or ""


def measured(row, rows):
    target = target_of(row)
    return target.with_unit(spread(figures(row, rows), 0 if target.is_plain else 2))


def limit(row, rows):
    target = target_of(row)
    missed = "" if is_reached(row) else ", missed"
    return target.with_unit(f"{target.limit:g}") + missed


def goal(row, rows):
    target = target_of(row)
    return "" if target.goal is None else target.with_unit(f"{target.goal:g}")


COLUMNS = (
    label(), ("", ours), ("baseline", baseline), ("measured: median (least to most)", measured), ("target", limit),
    ("goal", goal),
)  # fmt: skip
