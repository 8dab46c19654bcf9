"""A progress bar on the terminal. Nothing fails because it cannot be shown."""

import collections
import shutil
import sys
import time

from ckptfs import _ckptfs

# Characters of a whole bar, and of the shortest one, where the text needs the line.
_BAR_CHARS, _MIN_BAR_CHARS = 24, 4

# The current rate is that of so many seconds: parts of stores arrive unevenly.
_RATE_WINDOW_SECONDS = 5


class ProgressBar:
    """Where standard error is no terminal, only the last state is written. A bar that `vanishes` writes nothing
    there, and leaves nothing on a terminal."""

    def __init__(self, vanishes=False):
        self._line, self._widest, self._vanishes = "", 0, vanishes
        self._live = self._broken = False
        self._try(self._look)

    def show(self, share, text):
        self._try(self._show, share, text)

    def end(self):
        self._try(self._end)

    def _try(self, act, *arguments):
        if sys.stderr is None or self._broken:
            return
        try:
            act(*arguments)
        except Exception:
            self._broken = True

    def _look(self):
        self._live = sys.stderr.isatty()

    def _show(self, share, text):
        # The last column stays free: some terminals go on to the next line there.
        room = shutil.get_terminal_size().columns - 1
        rest = f"] {share:4.0%}  {text}"
        width = min(max(room - len(rest) - 1, _MIN_BAR_CHARS), _BAR_CHARS)
        line = f"[{'#' * round(share * width):.<{width}}{rest}"
        self._line = line if len(line) <= room else line[: room - 1] + "…"
        self._widest = max(self._widest, len(self._line))
        if self._live:
            print(f"\r{self._line:<{self._widest}}", end="", file=sys.stderr, flush=True)

    def _end(self):
        if self._line and self._vanishes:
            if self._live:
                print(f"\r{'':<{self._widest}}\r", end="", file=sys.stderr, flush=True)
        elif self._line:
            print("" if self._live else self._line, file=sys.stderr, flush=True)


class TransferProgress:
    """Progress bar of a load or a fetch: bytes, the current rate, and this process's requests to stores since its start."""

    def __init__(self):
        self._bar, self._start, self._counters = ProgressBar(), time.perf_counter(), _ckptfs.request_counters()
        # Times, and the bytes that were done then.
        self._samples = collections.deque([(self._start, 0)])

    def show(self, done, total):
        counters = zip(_ckptfs.request_counters(), self._counters, strict=True)
        requests, received, cached, retries = (now - at_start for now, at_start in counters)
        text = f"{done / 1e9:.2f} of {total / 1e9:.2f} GB  {self._rate(done, total) / 1e9:.2f} GB/s"
        if requests:
            text += f"  {requests} request{'s' * (requests != 1)}"
        if retries:
            text += f", {retries} retries"
        if cached:
            text += f"  {cached / (cached + received):.0%} cached"
        self._bar.show(done / total if total else 1.0, text)

    def _rate(self, done, total):
        """Bytes per second over the last seconds, and at the end over all of them."""
        now = time.perf_counter()
        self._samples.append((now, done))
        while len(self._samples) > 2 and self._samples[1][0] < now - _RATE_WINDOW_SECONDS:
            self._samples.popleft()
        since, before = self._samples[0] if done < total else (self._start, 0)
        return (done - before) / (now - since) if now > since else 0.0

    def end(self):
        self._bar.end()
