"""The results of `ckptfs bench`, which `--json` prints, as one page of HTML that needs nothing else.

Every text goes through `_text` or `chart`, which escape it: paths and names may have any characters.
"""

import html
import re

from ckptfs.bench import chart, machine
from ckptfs.bench.loaders import MOUNTED, OURS
from ckptfs.bench.report import size, states, table
from ckptfs.bench.tables import spread
from ckptfs.errors import one_line

_STYLE = """\
:root { color-scheme: light dark; --ink: #1b1f24; --paper: #ffffff; --faint: #d5dae0; --ours: #2166ac;
  --other: #8c96a0; }
@media (prefers-color-scheme: dark) {
  :root { --ink: #e3e7eb; --paper: #14181c; --faint: #3a424a; --ours: #67a9e0; --other: #7d8791; } }
body { color: var(--ink); background: var(--paper); font: 15px/1.5 system-ui, sans-serif;
  max-width: 64rem; margin: 2rem auto; padding: 0 1rem; }
h1 { font-size: 1.3rem; overflow-wrap: anywhere; } h2 { font-size: 1.1rem; margin-top: 2rem; }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; }
th, td { padding: .2rem .7rem; border-bottom: 1px solid var(--faint); text-align: right; }
th { vertical-align: bottom; } td, .key { white-space: nowrap; }
th:first-child, td:first-child { text-align: left; }
.summary { font-weight: 600; } .key { margin-right: 1.2rem; }
.key svg { display: inline-block; vertical-align: middle; }
.wide { overflow-x: auto; } svg { max-width: 100%; height: auto; display: block; }
svg text { fill: var(--ink); font: 13px system-ui, sans-serif; } li, dd { overflow-wrap: anywhere; }
.ours { fill: var(--ours); } .other { fill: var(--other); } .spread { stroke: var(--ink); fill: none; }
dl { display: grid; grid-template-columns: max-content auto; gap: 0 1rem; } dd { margin: 0; }
"""

_POLICY = "default-src 'none'; style-src 'unsafe-inline'"

# The widths of a chart's names, bars and numbers.
_NAMES, _BARS, _NUMBERS = 170, 420, 290

_MARKS = {
    '<rect class="ours" width="28" height="12"/>': "ckptfs, by itself or through its mount (median)",
    '<rect class="other" width="28" height="12"/>': "another library (median)",
    '<path class="spread" d="M2 2v8m0 -4H26m0 -4v8"/>': "from the least to the most of all rounds",
}

_WORDS = {
    "owned": "each tensor has memory of its own",
    "mapped": "tensors are used where they lie in the file, and each page is read when it is first used",
    "mount": "safetensors reads the file that a mount of ckptfs shows",
    "returned, all there": "until the call returned, and until every byte was in memory",
    "CPU": "processor time of the loading process; a mount's daemon has its own",
    "peak memory": "what the process held at most above what it had before the load",
}


def page(results):
    """The page as bytes."""
    return "\n".join(_parts(results)).encode("utf-8", "backslashreplace")


def _parts(results):
    title = _text(f"ckptfs bench: {results['path']}")
    yield '<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">'
    # The page loads nothing and runs nothing.
    yield f'<meta http-equiv="Content-Security-Policy" content="{_POLICY}">'
    yield '<meta name="viewport" content="width=device-width, initial-scale=1">'
    yield f"<title>{title}</title>\n<style>\n{_STYLE}</style>\n</head>\n<body>\n<h1>{title}</h1>"
    about = f"{results['format']}: {size(results)}, to {results['device']}, {results['runs']} loads of each kind"
    yield f"<p>{_figures(about)}. All loaders gave equal tensors.</p>"
    yield f'<p class="summary">{_figures(results["summary"])}</p>'
    yield from _legend()
    for state, words in states(results):
        yield f"<h2>{_text(words)}</h2>"
        yield from _table(*table(results, state, "loader"))
        yield from _charts(results[state])
    yield "<h2>Measured on</h2>\n<dl>"
    for name, value in machine.in_words(results["machine"]):
        yield f"<dt>{_text(name)}</dt><dd>{_figures(value)}</dd>"
    yield "</dl>"
    if results["notes"]:
        yield "<h2>Notes</h2>\n<ul>"
        yield from (f"<li>{_text(note)}</li>" for note in results["notes"])
        yield "</ul>"
    yield "</body>\n</html>\n"


def _legend():
    """What colors, lines and words mean."""
    yield '<p class="legend">'
    for mark, words in _MARKS.items():
        yield f'<span class="key"><svg width="28" height="12" aria-hidden="true">{mark}</svg> {_text(words)}</span>'
    yield "</p>\n<dl>"
    yield from (f"<dt>{_text(word)}</dt><dd>{_text(meaning)}</dd>" for word, meaning in _WORDS.items())
    yield "</dl>"


def _table(heads, rows):
    yield '<div class="wide"><table>'
    yield f"<tr>{''.join(f'<th>{_text(head)}</th>' for head in heads)}</tr>"
    for row in rows:
        yield f"<tr>{''.join(f'<td>{_text(cell)}</td>' for cell in row)}</tr>"
    yield "</table></div>"


def _charts(loaders):
    took = {name: one["seconds"] for name, one in loaders.items()}
    yield from _chart("Seconds until all was there", "s", 4, took)
    busy = {name: _processors(one) for name, one in loaders.items()}
    yield from _chart("Seconds of the processors, with the daemon's", "s", 3, busy)
    peaks = {name: [peak / 1e6 for peak in one["peak_bytes"] or []] for name, one in loaders.items()}
    yield from _chart("Peak of memory", "MB", 1, peaks)


def _processors(one):
    daemon = one["daemon_cpu_seconds"] or [0] * len(one["cpu_seconds"])
    return [own + its for own, its in zip(one["cpu_seconds"], daemon)]


def _chart(title, unit, digits, loaders):
    """A bar for each loader that has values."""
    bars = [
        chart.ChartBar(one_line(name), values, name in OURS + MOUNTED, spread(values, digits, unit))
        for name, values in loaders.items() if values
    ]  # fmt: skip
    if not bars:
        return
    wide, high = _NAMES + _BARS + _NUMBERS, chart.STEP * len(bars)
    yield f"<h3>{_text(title)}</h3>"
    yield f'<svg viewBox="0 0 {wide} {high}" width="{wide}" role="img" aria-label="{_text(title)}">'
    yield from chart.elements(bars, _NAMES, _BARS)
    yield "</svg>"


def _figures(words):
    """A text in which no line ends between a number and its unit."""
    return re.sub(r"(?<=\d) (?=(?:s|MB|GB|GB/s|times)\b)", "\N{NO-BREAK SPACE}", _text(words))


def _text(words):
    return html.escape(one_line(words), quote=True)
