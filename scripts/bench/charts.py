"""A table's figures as bars, in SVG that can be read on light and on dark: the median as a bar, a line from the least
to the most, and where there is one a mark at what is promised.

In: rows of results. Out: the text of an SVG file, the same for the same rows.
"""

import statistics
from collections.abc import Callable
from dataclasses import dataclass
from xml.sax.saxutils import escape

WIDTH, HEAD, ROW = 760, 40, 24
LEFT, RIGHT = 330, 70

STYLE = """text{font:12px system-ui,sans-serif;fill:#24292f}.title{font-weight:600}.axis{stroke:#8c959f}
.bar{fill:#8c959f}.ours{fill:#1a7f6b}.spread{stroke:#24292f;stroke-width:1.5}.mark{stroke:#cf222e;stroke-width:2}
@media(prefers-color-scheme:dark){text{fill:#e6edf3}.bar{fill:#6e7681}.ours{fill:#2ea58c}
.spread{stroke:#e6edf3}.mark{stroke:#ff7b72}}"""


@dataclass(frozen=True)
class Chart:
    """`figures` gives one number for each run of a row; `is_ours` tells whose bar it is; `mark` the promise."""

    title: str
    figures: Callable
    is_ours: Callable = lambda row: True
    mark: Callable = lambda row: None
    is_drawn: Callable = lambda row: True

    def svg(self, rows):
        drawn = [(row, self.figures(row, rows), self.mark(row)) for row in rows if self.is_drawn(row)]
        furthest = max(value for _, figures, mark in drawn for value in (*figures, mark or 0))
        scale = (WIDTH - LEFT - RIGHT) / (furthest or 1)
        height = HEAD + ROW * len(drawn) + 10
        lines = [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" width="{WIDTH}" '
            f'height="{height}" role="img">',
            f"<style>{STYLE}</style>",
            f'<text class="title" x="10" y="20">{escape(plain(self.title))}</text>',
            f'<line class="axis" x1="{LEFT}" y1="{HEAD - 6}" x2="{LEFT}" y2="{height - 6}"/>',
        ]
        for n, (row, figures, mark) in enumerate(drawn):
            lines += self.bar(row, figures, mark, scale, HEAD + ROW * n)
        return "\n".join([*lines, "</svg>\n"])

    def bar(self, row, figures, mark, scale, top):
        def at(value):
            return f"{LEFT + value * scale:.1f}"

        median, middle = statistics.median(figures), top + ROW // 2 - 2
        kind = "ours" if self.is_ours(row) else "bar"
        name = escape(plain(", ".join(row["row"])))
        yield f'<text x="{LEFT - 8}" y="{middle + 4}" text-anchor="end">{name}</text>'
        yield f'<rect class="{kind}" x="{LEFT}" y="{top + 2}" width="{max(median, 0) * scale:.1f}" height="{ROW - 8}"/>'
        yield f'<path class="spread" d="M{at(min(figures))} {middle}H{at(max(figures))}"/>'
        if mark is not None:
            yield f'<path class="mark" d="M{at(mark)} {top}V{top + ROW - 4}"/>'
        end = max(*figures, mark or 0, 0) * scale + LEFT + 6
        yield f'<text x="{end:.1f}" y="{middle + 4}">{median:.2f}</text>'


def plain(text):
    """Without the marks of Markdown."""
    return text.replace("`", "")
