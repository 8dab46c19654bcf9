"""A progress bar on the terminal. Nothing fails because it cannot be shown."""

import shutil
import sys


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
        filled = "#" * round(share * 24)
        line = f"[{filled:.<24}] {share:4.0%}  {text}"
        # The last column stays free: some terminals go on to the next line there.
        room = shutil.get_terminal_size().columns - 1
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
