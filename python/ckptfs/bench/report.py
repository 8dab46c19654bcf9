"""The results of `ckptfs bench`, which `--json` prints, as text for a terminal."""

import statistics

from ckptfs.bench import machine
from ckptfs.bench.tables import aligned, without_empty

_HEADS = ["returned", "all there", "least to most", "GB/s", "CPU", "daemon's CPU", "peak memory"]


def lines(results):
    """The lines, without a character that a terminal would obey."""
    yield from map(printable, _lines(results))


def _lines(results):
    about = f"{size(results)}, to {results['device']}, median of {results['runs']}"
    yield f"{results['path']} ({results['format']}): {about}"
    yield f"{', '.join(results['loaders'])}: gave equal tensors"
    for state, title in states(results):
        heads, rows = table(results, state, title)
        yield ""
        yield from aligned(heads, [[f"  {name}", *cells] for name, *cells in rows])
    yield ""
    for name, value in machine.in_words(results["machine"]):
        yield f"{name}: {value}"
    for note in results["notes"]:
        yield f"note: {note}"


def table(results, state, title):
    """The heads and rows of what was measured in a state. A column that is unknown for all loaders is left out."""
    against = results["against"]
    heads = [title, *_HEADS, f"speed-up against {against}" if against else "speed-up"]
    return without_empty(heads, [_row(name, one) for name, one in results[state].items()])


def _row(name, one):
    speedup = ""
    if one["speedup"] is not None:
        speedup = f"{one['speedup']:.2f}x ({one['speedup_least']:.2f} to {one['speedup_most']:.2f})"
    seconds, daemon, peak = one["seconds"], one["daemon_cpu_seconds"], one["peak_bytes"]
    return [
        name,
        f"{statistics.median(one['returned_seconds']):.4f} s",
        f"{one['median_seconds']:.4f} s",
        f"{min(seconds):.4f} to {max(seconds):.4f}",
        f"{one['gb_per_second']:.3f}",
        f"{statistics.median(one['cpu_seconds']):.3f} s",
        "" if daemon is None else f"{statistics.median(daemon):.2f} s",
        "" if peak is None else f"{max(peak) / 1e6:,.1f} MB",
        speedup,
    ]


def states(results):
    """The states that were measured, each with its title."""
    if results["cold"]:
        yield "cold", f"cold, by {results['cleared_by']}"
    yield "cached", "in the page cache"


def size(results):
    """The amount that was loaded, in words."""
    return f"{results['tensors']:,} tensors, {results['bytes'] / 1e6:,.1f} MB"


def printable(text):
    """A text with invisible characters escaped: names of files may have any."""
    return "".join(
        letter if letter.isprintable() else letter.encode("unicode_escape", "surrogatepass").decode()
        for letter in text
    )
