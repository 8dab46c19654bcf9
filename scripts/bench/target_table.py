"""What the mount and the loader promise beside the plain filesystem and others, and the table of what was measured."""

import statistics
from dataclasses import dataclass, replace

from ckptfs.bench.tables import spread

from bench.columns import label, runs_with_ballast, runs_without_ballast, split_by_ballast


@dataclass(frozen=True)
class Target:
    """A row: the side that is measured, its baseline, and the maximum that it may be. `baseline` names several where the
    best of them is meant, the one with the least median. `ideal` is what nothing can beat, where it was measured."""

    row: str
    side: str
    baseline: str | tuple | None
    limit: float
    goal: float | None = None
    unit: str = "s"
    ideal: str = "ideal"

    def compute_figures(self, runs):
        """A number for each run: the ratio to the baseline; without one, that of the side itself."""
        if self.unit == "CPU s":
            return [run[self.side] for run in runs]
        if self.unit == "ms":
            return [run[self.side] * 1000 for run in runs]
        if self.unit == "MB":
            return [(run[self.side] - run[self.baseline]) / 1e6 for run in runs]
        best_baseline = self.find_best_baseline(runs)
        return [run[self.side] / run[best_baseline] for run in runs]

    @property
    def is_absolute(self):
        """Whether this is no ratio, but a number of something."""
        return self.unit in ("ms", "MB", "CPU s")

    def find_best_baseline(self, runs):
        baselines = (self.baseline,) if isinstance(self.baseline, str) else self.baseline
        return min(baselines, key=lambda name: statistics.median(run[name] for run in runs))

    def meets_limit(self, runs):
        """Whether the median meets the limit; for memory, the maximum."""
        middle = max if self.unit == "MB" else statistics.median
        return middle(self.compute_figures(runs)) <= self.limit

    def compute_ideals(self, runs):
        """The figures that the ideal would have; none where it was not measured."""
        if self.ideal not in runs[0]:
            return []
        return replace(self, side=self.ideal).compute_figures(runs)

    def is_in_reach(self, runs):
        """Whether the ideal meets the limit, as far as is known."""
        ideals = self.compute_ideals(runs)
        return not ideals or statistics.median(ideals) <= self.limit

    def format_side(self, name, runs):
        """The median of one side."""
        if not self.baseline:
            return ""
        value = statistics.median(run[name] for run in runs)
        return f"{name} {value:.2f} s" if self.unit == "s" else f"{name} {value / 1e9:.2f} GB"

    def add_unit(self, text):
        return f"{text} {self.unit}" if self.is_absolute else text


PEERS = ("safetensors", "fastsafetensors", "runai-model-streamer")

TARGETS = {target.row: target for target in [
    Target("from_pretrained", "mount", "ext4", 0.85, 0.65),
    Target("load_file", "mount", "ext4", 0.9, 0.7),
    Target("random order", "mount", "ext4", 1.0, 0.8),
    Target(".bin", "mount", "ext4", 0.9, 0.7),
    Target("8 processes", "mount", "ext4", 1.1, 0.9),
    Target("8 processes, read from the disk", "read", "model", 1.1, unit="GB"),
    Target("daemon CPU", "daemon", "cat", 2.0),
    Target("page cache", "cached", "model", 1.1, unit="GB"),
    Target("page cache, of a cached source changed", "changed", "source", 0.01, unit="GB"),
    Target("owned, cold", "ckptfs", PEERS, 0.95, 0.7),
    Target("owned, cached", "ckptfs", PEERS, 0.95, 0.7),
    Target("mapped", "ckptfs", "safetensors", 1.05, 1.0),
    Target("first byte", "mount", None, 500, 200, unit="ms"),
    Target("cached, mapped", "mount", "constant", 1.15),
    Target("cached, owned", "mount", "constant", 1.15),
    Target("cached, mapped, daemon for 2 GB", "daemon", None, 0.5, unit="CPU s"),
    Target("cached, owned, daemon for 2 GB", "daemon", None, 0.5, unit="CPU s"),
    Target("cached, mapped, again", "mount", "ext4", 1.0, ideal="constant"),
    Target("cached, owned, again", "mount", "ext4", 1.0, ideal="constant"),
    Target("daemon memory", "peak", "budget", 64, unit="MB"),
]}  # fmt: skip


def find_target(row):
    return TARGETS[row["row"][0]]


def is_reached(row):
    target = find_target(row)
    return all(map(target.meets_limit, split_by_ballast(row["runs"])))


def is_missed(row):
    return not is_reached(row)


def compute_figures(row, rows):
    return find_target(row).compute_figures(row["runs"])


def format_measured_side(row, rows):
    target = find_target(row)
    return target.format_side(target.side, runs_with_ballast(row["runs"]))


def format_baseline(row, rows):
    target = find_target(row)
    runs = runs_with_ballast(row["runs"])
    return target.baseline and target.format_side(target.find_best_baseline(runs), runs) or ""


def format_result(select):
    def figures(row, rows):
        target, runs = find_target(row), select(row["runs"])
        digits = 0 if target.unit in ("ms", "MB") else 2
        return target.add_unit(spread(target.compute_figures(runs), digits)) if runs else ""

    return figures


def format_limit(row, rows):
    target = find_target(row)
    missed = [runs for runs in split_by_ballast(row["runs"]) if not target.meets_limit(runs)]
    outcome = ", missed" if any(map(target.is_in_reach, missed)) else ", out of reach" if missed else ""
    return target.add_unit(f"{target.limit:g}") + outcome


def format_ideal(row, rows):
    """The median ideal with the ballast, and without."""
    target = find_target(row)
    ideals = filter(None, map(target.compute_ideals, split_by_ballast(row["runs"])))
    return ", ".join(f"{statistics.median(figures):.2f}" for figures in ideals)


def format_goal(row, rows):
    target = find_target(row)
    return "" if target.goal is None else target.add_unit(f"{target.goal:g}")


COLUMNS = (
    label(), ("", format_measured_side), ("baseline", format_baseline),
    ("measured: median (least to most)", format_result(runs_with_ballast)), ("without ballast", format_result(runs_without_ballast)),
    ("ideal: with, without", format_ideal),
    ("target", format_limit), ("goal", format_goal),
)  # fmt: skip
