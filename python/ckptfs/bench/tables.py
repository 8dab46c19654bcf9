"""Text of tables and figures, for every benchmark."""

import statistics

# So much of a fault's words is repeated.
MAX_FAULT_CHARACTERS = 300


def spread(values, digits=2, unit=""):
    """The median of values, and their range."""
    median, least, most = (f"{figure(values):,.{digits}f}" for figure in (statistics.median, min, max))
    return f"{median}{' ' * bool(unit)}{unit} ({least} to {most})"


def markdown(heads, rows):
    """The lines of a Markdown table."""
    yield f"| {' | '.join(heads)} |"
    yield "|---" * len(heads) + "|"
    for row in rows:
        yield f"| {' | '.join(cell.replace('|', '/') for cell in row)} |"


def aligned(heads, rows):
    """The lines of a table for a terminal: the first column to the left, the others to the right."""
    lines = [heads, *rows]
    widths = [max(map(len, column)) for column in zip(*lines)]
    for first, *others in lines:
        yield "  ".join([first.ljust(widths[0]), *(cell.rjust(width) for cell, width in zip(others, widths[1:]))])


def without_empty(heads, rows):
    """A table without the columns that say nothing."""
    kept = [n for n in range(len(heads)) if any(row[n] for row in rows)]
    return [heads[n] for n in kept], [[row[n] for n in kept] for row in rows]


def fault_line(fault):
    """An exception on one line."""
    words = " ".join([str(fault), *getattr(fault, "__notes__", [])]).split()
    return f"{type(fault).__name__}: {' '.join(words)}"[:MAX_FAULT_CHARACTERS]
