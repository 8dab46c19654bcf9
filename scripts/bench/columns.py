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
    """`part` measures it. `chart`, if it has one, is drawn beside it, and so is each of `more_charts`, by a suffix of the
    table's name. `order` is that of its rows, where it is not
    that in which they are measured. `source` names the table of the results, where its rows are only some of another's:
    those that `has_row`."""

    part: str
    columns: tuple
    chart: object = None
    order: tuple = ()
    source: str = ""
    has_row: Callable = lambda row: True
    more_charts: tuple = ()

    def charts(self, name):
        """The name of each chart, and the chart."""
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


def held(runs):
    """Those that were measured while a ballast held free memory."""
    return [run for run in runs if run.get("ballast", 1)]


def free(runs):
    """Those without."""
    return [run for run in runs if not run.get("ballast", 1)]


def split_by_ballast(runs):
    """The runs with the ballast and those without, as far as there are any."""
    return [group for group in (held(runs), free(runs)) if group]


def of_runs(select, figures, default=()):
    """The figures, or the cell, of those runs that `select` returns; without any, the default."""
    def of(row):
        return {**row, "runs": select(row["runs"])}

    return lambda row, rows: figures(of(row), [of(each) for each in rows]) if select(row["runs"]) else default


# Columns.


def beside_ballast(*columns):
    """The columns of the runs with the ballast, and the last of them without it, too."""
    heading, cell = columns[-1]
    with_ballast = [(heading, of_runs(held, cell, "")) for heading, cell in columns]
    return *with_ballast, ("without ballast", of_runs(free, cell, ""))


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
