"""The one table of a run, in Markdown and in JSON."""

import json
import statistics

from ckptfs.bench.tables import markdown, spread

_HEAD = ["part", "what", "where", "seconds: median (least to most)", "GB/s", "of the ceiling",
         "host memory at the peak", "result"]  # fmt: skip


class CheckTable:
    """Rows, printed and written as they come, so that a run that is ended leaves those that it had."""

    def __init__(self, folder, facts):
        self._folder, self._facts = folder, facts
        folder.mkdir(parents=True, exist_ok=True)
        self.rows, self.notes, self.missing = [], [], []
        # GB/s by name.
        self.ceilings = {}

    def add(self, part, what, result, where="", seconds=(), size=None, speed=None, ceiling=None, peak=None, reason=""):
        """Adds a row. `seconds` of `size` bytes make the speed."""
        seconds = [*seconds]
        if seconds and size:
            speed = size / statistics.median(seconds) / 1e9
        row = {"part": part, "what": what, "where": where, "result": result, "why": reason, "seconds": seconds,
               "bytes": size, "gb_per_second": speed, "ceiling": ceiling,
               "of_ceiling": speed / ceiling if speed and ceiling else None, "peak": peak}  # fmt: skip
        self.rows.append(row)
        cells = [part, result, what, where, f"{speed:.2f} GB/s" if speed else "", f"({reason})" if reason else ""]
        print("  ".join(filter(None, cells)), flush=True)
        self._write()

    def note(self, words):
        """Adds a note for the table's readers."""
        self.notes.append(words)
        print(f"note: {words}", flush=True)

    def add_missing(self, words):
        """Adds what was not begun, because the time was over."""
        self.missing.append(words)

    @property
    def failures(self):
        return [row for row in self.rows if row["result"] == "FAILED"]

    def end(self):
        """Prints the table."""
        print("\n" + self._write(), flush=True)

    def _write(self):
        report = {"known": self._facts, "rows": self.rows, "notes": self.notes, "missing": self.missing}
        (self._folder / "gpu-check.json").write_text(json.dumps(report, indent=1) + "\n")
        text = "\n".join(self._markdown()) + "\n"
        (self._folder / "gpu-check.md").write_text(text)
        return text

    def _markdown(self):
        yield "\n".join(f"- {what}: {words}" for what, words in self._facts.items())
        yield ""
        yield from markdown(_HEAD, map(_cells, self.rows))
        for title, lines in (("Notes", self.notes), ("Missing, because the time was over", self.missing)):
            if lines:
                yield f"\n{title}:\n"
                yield from (f"- {line}" for line in lines)


def _cells(row):
    return [row["part"], row["what"], row["where"], _seconds(row["seconds"]), _number(row["gb_per_second"]),
            _number(row["of_ceiling"]), "" if row["peak"] is None else f"{row['peak'] / 1e6:,.0f} MB",
            row["result"] + (f": {row['why']}" if row["why"] else "")]  # fmt: skip


def _seconds(seconds):
    return spread(seconds, 3) if len(seconds) > 1 else "".join(f"{one:.3f}" for one in seconds)


def _number(value):
    return "" if value is None else f"{value:.2f}"
