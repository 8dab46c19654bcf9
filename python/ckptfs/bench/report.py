"""The results of `ckptfs bench`, which `--json` prints, as text for a terminal."""

import math
import statistics

from ckptfs import _ckptfs
from ckptfs.bench import machine
from ckptfs.bench.loaders import MOUNTED, OURS
from ckptfs.bench.tables import aligned, without_empty
from ckptfs.errors import one_line

_HEADS = ["returned", "all there", "least to most", "GB/s", "CPU", "daemon's CPU", "peak memory"]

# Of less than this, the milliseconds that opening and starting threads take decide which loader is faster.
_MIN_JUDGED_BYTES = 100_000_000


def summary(results):
    """The results in a sentence for each state, or why they say nothing."""
    if results["bytes"] < _MIN_JUDGED_BYTES:
        smallest = f"{_MIN_JUDGED_BYTES / 1e6:.0f} MB"
        return f"Too small to judge: what a load costs before it reads outweighs {size(results)}. " \
               f"Measure a model of at least {smallest}."  # fmt: skip
    phrases = _STORE_STATES if _ckptfs.is_source_url(results["path"]) else _LOCAL_STATES
    return " ".join(f"{words}, {_sentence(results[state], results['against'])}." for state, words in phrases.items()
                    if results[state])  # fmt: skip


_LOCAL_STATES = {"cold": "From the disk", "cached": "From the page cache"}
_STORE_STATES = {"cold": "From the store", "cached": "From the cache on disk"}


def _sentence(loaders, against):
    ours, mounted = (_fastest(loaders, names) for names in (OURS, MOUNTED))
    said = f"{ours} takes {loaders[ours]['median_seconds']:.3f} s ({loaders[ours]['gb_per_second']:.2f} GB/s)"
    if against not in loaders:
        return said
    said += f" and is {_compared(loaders[ours])} as {against}"
    if mounted:
        said += f"; safetensors through a mount is {_compared(loaders[mounted])} as {against}"
    return said


def _fastest(loaders, names):
    """The loader of these with the least time; `None` if none of them was measured."""
    return min((name for name in names if name in loaders), key=lambda name: loaders[name]["median_seconds"],
               default=None)  # fmt: skip


def _compared(one):
    """A speed-up in words. A difference that is not there in every round is none."""
    if one["speedup_least"] <= 1 <= one["speedup_most"]:
        return "about as fast"
    return f"{one['speedup']:.2f} times as fast"


def lines(results):
    """The lines, without a character that a terminal would obey."""
    yield from map(one_line, _lines(results))


def _lines(results):
    about = f"{size(results)}, to {results['device']}, median of {results['runs']}"
    yield f"{results['path']} ({results['format']}): {about}"
    yield f"{', '.join(results['loaders'])}: gave equal tensors"
    yield results["summary"]
    for state, title in states(results):
        yield ""
        has_speedup = any(one["speedup"] is not None for one in results[state].values())
        yield title + (f"; speed-up against {results['against']}" if has_speedup else "")
        for heads, rows in _narrow_tables(results, state):
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


def _narrow_tables(results, state):
    """What `table` has, as two tables that fit on a terminal of 80 columns: times, and what they cost."""
    loaders = results[state].items()
    times = [[name, _spread(one["median_seconds"], one["seconds"]), _figure(one["gb_per_second"]), _speedup(one)]
             for name, one in loaders]  # fmt: skip
    yield without_empty(["", "all there, s", "GB/s", "speed-up"], times)
    costs = []
    for name, one in loaders:
        daemon, peak = one["daemon_cpu_seconds"], one["peak_bytes"]
        costs.append([
            name, _figure(statistics.median(one["returned_seconds"])), _figure(statistics.median(one["cpu_seconds"])),
            "" if daemon is None else _figure(statistics.median(daemon)), "" if peak is None else _figure(max(peak) / 1e6),
        ])  # fmt: skip
    yield without_empty(["", "returned, s", "CPU, s", "daemon's CPU, s", "peak memory, MB"], costs)


def _speedup(one):
    """A speed-up, and the least and the most of all rounds; empty if there is none."""
    return "" if one["speedup"] is None else _spread(one["speedup"], [one["speedup_least"], one["speedup_most"]])


def _spread(value, values):
    return f"{_figure(value)} ({_figure(min(values))} to {_figure(max(values))})"


def _figure(value):
    """Three significant digits, of which at most four lie behind the point."""
    digits = 2 - math.floor(math.log10(value)) if value > 0 else 0
    return f"{value:,.{min(max(digits, 0), 4)}f}"


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
        yield "cold", f"cold, {_cleared(results['cleared_by'])}"
    if results["cached"]:
        is_in_store = _ckptfs.is_source_url(results["path"])
        yield "cached", "in the cache on disk" if is_in_store else "in the page cache"


def _cleared(means):
    """What was cleared before each cold load, in words."""
    means, _, drops_all = means.partition(", /proc/")
    if means.startswith("/proc/"):
        return "all caches dropped"
    words = next(words for start, words in _CLEARED.items() if means.startswith(start))
    return f"{words}, all caches dropped" if drops_all else words


_CLEARED = {
    "posix_fadvise": "these files evicted",
    "ckptfs cache prune": "nothing of it in the cache on disk",
    "CKPTFS_NO_CACHE=1": "without a cache on disk",
}


def size(results):
    """The amount that was loaded, in words."""
    return f"{results['tensors']:,} tensors, {results['bytes'] / 1e6:,.1f} MB"
