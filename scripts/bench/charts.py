"""A table's figures as an SVG file that can be read on light and on dark, the same for the same rows."""

import statistics
from collections.abc import Callable
from dataclasses import dataclass
from xml.sax.saxutils import escape

from ckptfs.bench import chart

WIDTH, HEAD, NAMES, NUMBERS = 760, 40, 330, 70

STYLE = """text{font:12px system-ui,sans-serif;fill:#24292f}.title{font-weight:600}.axis{stroke:#8c959f}
.other{fill:#8c959f}.ours{fill:#1a7f6b}.spread{stroke:#24292f;stroke-width:1.5}.mark{stroke:#cf222e;stroke-width:2}
@media(prefers-color-scheme:dark){text{fill:#e6edf3}.other{fill:#6e7681}.ours{fill:#2ea58c}
.spread{stroke:#e6edf3}.mark{stroke:#ff7b72}}"""


@dataclass(frozen=True)
class Chart:
    """`figures` returns one number for each run of a row, `is_ours` decides the color of its bar, and `mark` is the
    promise."""

    title: str
    figures: Callable
    is_ours: Callable = lambda row: True
    mark: Callable = lambda row: None
    is_drawn: Callable = lambda row: True

    def svg(self, rows):
        """The text of the file."""
        bars = [self.bar(row, rows) for row in rows if self.is_drawn(row)]
        height = HEAD + chart.STEP * len(bars) + 10
        lines = [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" width="{WIDTH}" '
            f'height="{height}" role="img">',
            f"<style>{STYLE}</style>",
            f'<text class="title" x="10" y="20">{escape(plain(self.title))}</text>',
            f'<line class="axis" x1="{NAMES}" y1="{HEAD - 6}" x2="{NAMES}" y2="{height - 6}"/>',
            *chart.elements(bars, NAMES, WIDTH - NAMES - NUMBERS, HEAD),
        ]
        return "\n".join([*lines, "</svg>\n"])

    def bar(self, row, rows):
        figures = self.figures(row, rows)
        name, median = plain(", ".join(row["row"])), f"{statistics.median(figures):.2f}"
        return chart.ChartBar(name, figures, self.is_ours(row), median, self.mark(row))


def plain(text):
    """Text without the marks of Markdown."""
    return text.replace("`", "")
