"""The one table of a run.

In: rows as they come. Out: a line printed for each at once; at the end Markdown, and the same as JSON.
"""

import json
import statistics

_HEAD = ["part", "what", "where", "seconds: median (least to most)", "GB/s", "of the ceiling",
         "host memory at the peak", "result"]  # fmt: skip


class Table:
    """Rows, written as they come: who ends this early has those that there are."""

    def __init__(self, folder, known):
        self._folder, self._known = folder, known
        folder.mkdir(parents=True, exist_ok=True)
        self.rows, self.notes, self.missing = [], [], []
        # What is bound by what: GB/s by name.
        self.ceilings = {}

    def add(self, part, what, result, where="", seconds=(), size=None, speed=None, ceiling=None, peak=None, why=""):
        """A row, which is said at once. `seconds` of `size` bytes make the speed."""
        seconds = [*seconds]
        if seconds and size:
            speed = size / statistics.median(seconds) / 1e9
        row = {"part": part, "what": what, "where": where, "result": result, "why": why, "seconds": seconds,
               "bytes": size, "gb_per_second": speed, "ceiling": ceiling,
               "of_ceiling": speed / ceiling if speed and ceiling else None, "peak": peak}  # fmt: skip
        self.rows.append(row)
        told = [part, result, what, where, f"{speed:.2f} GB/s" if speed else "", f"({why})" if why else ""]
        print("  ".join(filter(None, told)), flush=True)
        self._write()

    def note(self, words):
        """What whoever reads the table must know."""
        self.notes.append(words)
        print(f"note: {words}", flush=True)

    def lacks(self, words):
        """What was not begun, because the time was over."""
        self.missing.append(words)

    @property
    def failed(self):
        return [row for row in self.rows if row["result"] == "FAILED"]

    def end(self):
        """Prints all of it."""
        print("\n" + self._write(), flush=True)

    def _write(self):
        told = {"known": self._known, "rows": self.rows, "notes": self.notes, "missing": self.missing}
        (self._folder / "gpu-check.json").write_text(json.dumps(told, indent=1) + "\n")
        text = "\n".join(self._markdown()) + "\n"
        (self._folder / "gpu-check.md").write_text(text)
        return text

    def _markdown(self):
        yield "\n".join(f"- {what}: {words}" for what, words in self._known.items())
        yield ""
        yield f"| {' | '.join(_HEAD)} |"
        yield "|---" * len(_HEAD) + "|"
        for row in self.rows:
            cells = [row["part"], row["what"], row["where"], _seconds(row["seconds"]), _number(row["gb_per_second"]),
                     _number(row["of_ceiling"]), "" if row["peak"] is None else f"{row['peak'] / 1e6:,.0f} MB",
                     row["result"] + (f": {row['why']}" if row["why"] else "")]  # fmt: skip
            yield "| " + " | ".join(cell.replace("|", "/") for cell in cells) + " |"
        for title, lines in (("Notes", self.notes), ("Missing, because the time was over", self.missing)):
            if lines:
                yield f"\n{title}:\n"
                yield from (f"- {line}" for line in lines)


def _seconds(seconds):
    if len(seconds) < 2:
        return "".join(f"{one:.3f}" for one in seconds)
    return f"{statistics.median(seconds):.3f} ({min(seconds):.3f} to {max(seconds):.3f})"


def _number(value):
    return "" if value is None else f"{value:.2f}"
