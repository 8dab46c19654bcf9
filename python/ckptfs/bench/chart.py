"""Bars in SVG: a median as a bar, a line from the least to the most, and a mark at a target."""

import statistics
from html import escape
from typing import NamedTuple

# The height of a bar with the space around it.
STEP = 26


class ChartBar(NamedTuple):
    """A row of a chart. `is_ours` decides its color, `text` stands behind it."""

    name: str
    values: list
    is_ours: bool
    text: str
    mark: float | None = None


def elements(bars, left, width, top=0):
    """The elements of a chart whose names end at `left`, and whose bars are at most `width` long."""
    longest = max(value for bar in bars for value in (*bar.values, bar.mark or 0)) or 1
    for place, bar in enumerate(bars):
        edge, middle = top + place * STEP + 4, top + place * STEP + STEP / 2
        length, start, end = (
            value / longest * width for value in (statistics.median(bar.values), min(bar.values), max(bar.values))
        )
        spread = f"M{left + start:.1f} {middle - 4}v8m0 -4H{left + end:.1f}m0 -4v8"
        kind = "ours" if bar.is_ours else "other"
        yield f'<text x="{left - 8}" y="{middle + 4}" text-anchor="end">{escape(bar.name)}</text>'
        yield f'<rect class="{kind}" x="{left}" y="{edge}" width="{max(length, 0):.1f}" height="{STEP - 8}"/>'
        yield f'<path class="spread" d="{spread}"/>'
        if bar.mark is not None:
            yield f'<path class="mark" d="M{left + bar.mark / longest * width:.1f} {edge - 2}v{STEP - 4}"/>'
        yield f'<text x="{left + width + 8}" y="{middle + 4}">{escape(bar.text)}</text>'
