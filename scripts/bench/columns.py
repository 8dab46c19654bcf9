"""The columns of tables: each is a heading, and a function of a row and all rows of its table that returns a cell.

Rows are those of results: `{"row": ["…"], "runs": [{"…": 0.1}]}`.
"""

import math
import statistics
from collections.abc import Callable
from dataclasses import dataclass

from ckptfs.bench.tables import markdown, spread


@dataclass(frozen=True)
class PageTable:
    """`part` measures it, and `chart`, if it has one, is drawn beside it. So are `more_charts`: pairs of a suffix for the
    file name and a chart. `order` is that of its rows, where it is not that in which they are measured. `source` names the
    table of the results, where its rows are only some of another's: those that `has_row`."""

    part: str
    columns: tuple
    chart: object = None
    order: tuple = ()
    source: str = ""
    has_row: Callable = lambda row: True
    more_charts: tuple = ()

    def charts(self, name):
        """Yields the file name of each chart, and the chart."""
        if self.chart:
            yield name, self.chart
        for suffix, chart in self.more_charts:
            yield f"{name}-{suffix}", chart

    def place(self, row):
        """What rows are sorted by."""
        return self.order.index(row["row"][0]) if self.order else 0

    def lines(self, rows, beside=None):
        """Markdown of these rows, which may stand in a table `beside` others."""
        cells = [[cell(row, beside or rows) for _, cell in self.columns] for row in rows]
        return [*markdown([heading for heading, _ in self.columns], cells)]


def numbers(key, scale=1):
    return lambda row, rows: [run[key] * scale for run in row["runs"]]


def ratios(key, other):
    """The ratio of two numbers of each run."""
    return lambda row, rows: [run[key] / run[other] for run in row["runs"]]


def first_row(row, rows):
    """The first row that was measured in the same state."""
    return next(each for each in rows if each["row"][1:] == row["row"][1:])


def ratio_to_first(key):
    """The ratio of each run to that of the first row in the same state."""
    def figures(row, rows):
        return [run[key] / first[key] for run, first in zip(row["runs"], first_row(row, rows)["runs"], strict=True)]

    return figures


def speed_of_first(key):
    """How many times as fast as the first row."""
    return lambda row, rows: [1 / ratio for ratio in ratio_to_first(key)(row, rows)]


def growth_exponent(before, row, key):
    """The power of its count by which a number grows from one row to the next: 1 is linear growth."""
    def at(each, key):
        return statistics.median(run[key] for run in each["runs"])

    return math.log(at(row, key) / at(before, key)) / math.log(at(row, "count") / at(before, "count"))


def runs_with_ballast(runs):
    """Runs that were measured while a ballast held free memory."""
    return [run for run in runs if run.get("ballast", 1)]


def runs_without_ballast(runs):
    """Runs that were measured without it."""
    return [run for run in runs if not run.get("ballast", 1)]


def split_by_ballast(runs):
    """The runs with the ballast and those without, as far as there are any."""
    return [group for group in (runs_with_ballast(runs), runs_without_ballast(runs)) if group]


def for_selected_runs(select, figures, default=()):
    """`figures` of the runs that `select` keeps; `default` if it keeps none."""
    def with_selected_runs(row):
        return {**row, "runs": select(row["runs"])}

    return lambda row, rows: (
        figures(with_selected_runs(row), [with_selected_runs(each) for each in rows]) if select(row["runs"]) else default
    )


# Columns.


def columns_by_ballast(*columns):
    """These columns with the ballast, then the last one without it."""
    heading, cell = columns[-1]
    with_ballast = [(heading, for_selected_runs(runs_with_ballast, cell, "")) for heading, cell in columns]
    return *with_ballast, (f"{heading}, without ballast", for_selected_runs(runs_without_ballast, cell, ""))


def label(heading="", place=0):
    return heading, lambda row, rows: row["row"][place]


def median(heading, key, digits=2, scale=1):
    figures = numbers(key, scale)
    return heading, lambda row, rows: f"{statistics.median(figures(row, rows)):.{digits}f}"


def maximum(heading, key, scale):
    figures = numbers(key, scale)
    return heading, lambda row, rows: f"{max(figures(row, rows)):.0f}"


def spreads(heading, figures, digits=2):
    return heading, lambda row, rows: spread(figures(row, rows), digits)


def promise(heading, by_row):
    """A promise by the row's first word, or by all of them."""
    return heading, lambda row, rows: by_row.get(tuple(row["row"]), by_row.get(row["row"][0], ""))
