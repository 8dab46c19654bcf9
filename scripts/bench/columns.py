"""What cells of tables are made of: each column is a heading and what it says of a row, given the row and those
before and after it in its table.

In: rows as results have them, `{"row": ["…"], "runs": [{"…": 0.1}]}`. Out: text.
"""

import statistics
from dataclasses import dataclass


@dataclass(frozen=True)
class Table:
    """`part` measures it; `chart`, if it has one, is drawn beside it; `order` is that of its rows, where it is not
    that in which they are measured."""

    part: str
    columns: tuple
    chart: object = None
    order: tuple = ()

    def place(self, row):
        return self.order.index(row["row"][0]) if self.order else 0

    def head(self):
        return f"| {' | '.join(heading for heading, _ in self.columns)} |\n{'|---' * len(self.columns)}|"

    def line(self, row, rows):
        return f"| {' | '.join(cell(row, rows) for _, cell in self.columns)} |"

    def lines(self, rows):
        return [*self.head().splitlines(), *(self.line(row, rows) for row in rows)]


def numbers(key, scale=1):
    return lambda row, rows: [run[key] * scale for run in row["runs"]]


def ratios(key, other):
    """Of each run by itself."""
    return lambda row, rows: [run[key] / run[other] for run in row["runs"]]


def first_of(row, rows):
    """The first of those that were measured in the same state."""
    return next(each for each in rows if each["row"][1:] == row["row"][1:])


def in_first(key):
    """Of each run, in that of the first in the same state."""
    def figures(row, rows):
        return [run[key] / first[key] for run, first in zip(row["runs"], first_of(row, rows)["runs"], strict=True)]

    return figures


def of_first(key):
    """The other way round: how many times as fast as the first."""
    return lambda row, rows: [1 / ratio for ratio in in_first(key)(row, rows)]


def spread(figures, digits):
    return f"{statistics.median(figures):.{digits}f} ({min(figures):.{digits}f} to {max(figures):.{digits}f})"


# Columns.


def label(heading="", place=0):
    return heading, lambda row, rows: row["row"][place]


def middle(heading, key, digits=2, scale=1):
    figures = numbers(key, scale)
    return heading, lambda row, rows: f"{statistics.median(figures(row, rows)):.{digits}f}"


def most(heading, key, scale):
    figures = numbers(key, scale)
    return heading, lambda row, rows: f"{max(figures(row, rows)):.0f}"


def spreads(heading, figures, digits=2):
    return heading, lambda row, rows: spread(figures(row, rows), digits)


def promised(heading, by_row):
    """By the row's first word, or by all of them."""
    return heading, lambda row, rows: by_row.get(tuple(row["row"]), by_row.get(row["row"][0], ""))
