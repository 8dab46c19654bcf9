"""What was measured, as one page of HTML that needs nothing else. In: what `--json` prints. Out: the page.

Every text goes through `_text`: paths and names are whoever's made them.
"""

import html
import statistics

from ckptfs.bench import machine
from ckptfs.bench.loaders import MOUNTED, OURS
from ckptfs.bench.report import HEADS, row, shown, size_of, states

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
th:first-child, td:first-child { text-align: left; }
.wide { overflow-x: auto; } svg { max-width: 100%; height: auto; display: block; }
svg text { fill: var(--ink); font: 13px system-ui, sans-serif; } li, dd { overflow-wrap: anywhere; }
.ours { fill: var(--ours); } .other { fill: var(--other); } .spread { stroke: var(--ink); fill: none; }
dl { display: grid; grid-template-columns: max-content auto; gap: 0 1rem; } dd { margin: 0; }
"""

_POLICY = "default-src 'none'; style-src 'unsafe-inline'"

# Of a chart: widths of the names, the bars and the numbers, and the height of a bar with what is around it.
_NAMES, _BARS, _NUMBERS, _STEP = 170, 420, 210, 26


def page(found):
    """The page, as it is written to a file."""
    return "\n".join(_parts(found)).encode("utf-8", "backslashreplace")


def _parts(found):
    title = _text(f"ckptfs bench: {found['path']}")
    yield '<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">'
    # A page that would load anything, or run it, is not this one.
    yield f'<meta http-equiv="Content-Security-Policy" content="{_POLICY}">'
    yield '<meta name="viewport" content="width=device-width, initial-scale=1">'
    yield f"<title>{title}</title>\n<style>\n{_STYLE}</style>\n</head>\n<body>\n<h1>{title}</h1>"
    about = f"{found['format']}: {size_of(found)}, to {found['device']}, {found['runs']} loads of each kind"
    yield f"<p>{_text(about)}. All loaders gave equal tensors.</p>"
    for state, words in states(found):
        yield f"<h2>{_text(words)}</h2>"
        yield from _table(found[state], found["against"])
        yield from _charts(found[state])
    yield "<h2>Measured on</h2>\n<dl>"
    for what, which in machine.in_words(found["machine"]):
        yield f"<dt>{_text(what)}</dt><dd>{_text(which)}</dd>"
    yield "</dl>"
    if found["notes"]:
        yield "<h2>Notes</h2>\n<ul>"
        yield from (f"<li>{_text(note)}</li>" for note in found["notes"])
        yield "</ul>"
    yield "</body>\n</html>\n"


def _table(told, against):
    heads = ["loader", *HEADS[1:-1], f"speed-up against {against}" if against else HEADS[-1]]
    rows = [row(name, one) for name, one in told.items()]
    kept = [n for n in range(len(heads)) if any(cells[n] for cells in rows)]
    yield '<div class="wide"><table>'
    yield f"<tr>{''.join(f'<th>{_text(heads[n])}</th>' for n in kept)}</tr>"
    for cells in rows:
        yield f"<tr>{''.join(f'<td>{_text(cells[n])}</td>' for n in kept)}</tr>"
    yield "</table></div>"


def _charts(told):
    took = {name: one["seconds"] for name, one in told.items()}
    yield from _chart("Seconds until all was there", "s", 4, took)
    busy = {name: _processors(one) for name, one in told.items()}
    yield from _chart("Seconds of the processors, with the daemon's", "s", 3, busy)
    peaks = {name: [peak / 1e6 for peak in one["peak_bytes"] or []] for name, one in told.items()}
    yield from _chart("Peak of memory", "MB", 1, peaks)


def _processors(one):
    daemon = one["daemon_cpu_seconds"] or [0] * len(one["cpu_seconds"])
    return [own + its for own, its in zip(one["cpu_seconds"], daemon)]


def _chart(title, unit, digits, values):
    """A bar for each loader, as long as its median, with a line from the least to the most."""
    values = {name: some for name, some in values.items() if some}
    if not values:
        return
    longest = max(map(max, values.values())) or 1
    wide, high = _NAMES + _BARS + _NUMBERS, _STEP * len(values)
    yield f"<h3>{_text(title)}</h3>"
    yield f'<svg viewBox="0 0 {wide} {high}" width="{wide}" role="img" aria-label="{_text(title)}">'
    for place, (name, some) in enumerate(values.items()):
        top, middle = place * _STEP + 4, place * _STEP + _STEP / 2
        median, least, most = statistics.median(some), min(some), max(some)
        bar, start, end = (value / longest * _BARS for value in (median, least, most))
        kind = "ours" if name in OURS + MOUNTED else "other"
        spread = f"M{_NAMES + start:.1f} {middle - 4}v8m0 -4H{_NAMES + end:.1f}m0 -4v8"
        words = f"{median:,.{digits}f} {unit} ({least:,.{digits}f} to {most:,.{digits}f})"
        yield f'<text x="{_NAMES - 8}" y="{middle + 4}" text-anchor="end">{_text(name)}</text>'
        yield f'<rect class="{kind}" x="{_NAMES}" y="{top}" width="{bar:.1f}" height="{_STEP - 8}"/>'
        yield f'<path class="spread" d="{spread}"/>'
        yield f'<text x="{_NAMES + _BARS + 8}" y="{middle + 4}">{_text(words)}</text>'
    yield "</svg>"


def _text(words):
    return html.escape(shown(words), quote=True)
