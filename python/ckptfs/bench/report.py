"""What was measured, as a table for a terminal. In: what `--json` prints. Out: lines."""

import statistics

from ckptfs.bench import machine


def table(found):
    """The lines, with nothing in them that a terminal would obey."""
    yield from map(shown, _lines(found))


def _lines(found):
    how = f"{size_of(found)}, to {found['device']}, median of {found['runs']}"
    yield f"{found['path']} ({found['format']}): {how}"
    yield f"{', '.join(found['loaders'])}: gave equal tensors"
    for state, title in states(found):
        rows = [row(name, told) for name, told in found[state].items()]
        heads = list(HEADS)
        if found["against"]:
            heads[-1] = f"speed-up against {found['against']}"
        heads[0] = title
        lines = [heads, *([f"  {cells[0]}", *cells[1:]] for cells in rows)]
        kept = [n for n in range(len(heads)) if any(cells[n] for cells in rows)]
        wide = {n: max(len(line[n]) for line in lines) for n in kept}
        yield ""
        for line in lines:
            yield "  ".join([line[0].ljust(wide[0]), *(line[n].rjust(wide[n]) for n in kept[1:])])
    yield ""
    for what, which in machine.in_words(found["machine"]):
        yield f"{what}: {which}"
    for note in found["notes"]:
        yield f"note: {note}"


HEADS = (
    "", "returned", "all there", "least to most", "GB/s", "CPU", "daemon's CPU", "peak memory", "speed-up",
)  # fmt: skip


def row(name, told):
    """What `HEADS` are the heads of, in words; empty where nothing is known."""
    speedup = ""
    if told["speedup"] is not None:
        speedup = f"{told['speedup']:.2f}x ({told['speedup_least']:.2f} to {told['speedup_most']:.2f})"
    seconds, daemon, peak = told["seconds"], told["daemon_cpu_seconds"], told["peak_bytes"]
    return [
        name,
        f"{statistics.median(told['returned_seconds']):.4f} s",
        f"{told['median_seconds']:.4f} s",
        f"{min(seconds):.4f} to {max(seconds):.4f}",
        f"{told['gb_per_second']:.3f}",
        f"{statistics.median(told['cpu_seconds']):.3f} s",
        "" if daemon is None else f"{statistics.median(daemon):.2f} s",
        "" if peak is None else f"{max(peak) / 1e6:,.1f} MB",
        speedup,
    ]


def states(found):
    """What was measured: its key, and what it is called."""
    if found["cold"]:
        yield "cold", f"cold, by {found['cleared_by']}"
    yield "cached", "in the page cache"


def size_of(found):
    """How much was loaded."""
    return f"{found['tensors']:,} tensors, {found['bytes'] / 1e6:,.1f} MB"


def shown(text):
    """A text with everything that cannot be seen written out: names of files may hold anything."""
    return "".join(
        letter if letter.isprintable() else letter.encode("unicode_escape", "surrogatepass").decode()
        for letter in text
    )
