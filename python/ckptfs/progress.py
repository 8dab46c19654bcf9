"""A line on the terminal that tells how far something is. In: a share of the whole, and words. Out: the line,
or nothing where nobody can be shown it; nothing fails for that."""

import sys


class Bar:
    """Where standard error is no terminal it writes its last state alone. One that `vanishes` writes nothing
    there, and leaves nothing on a terminal."""

    def __init__(self, vanishes=False):
        self._said, self._widest, self._vanishes = "", 0, vanishes
        self._live = self._broken = False
        self._try(self._look)

    def show(self, share, words):
        self._try(self._show, share, words)

    def end(self):
        self._try(self._end)

    def _try(self, act, *given):
        if sys.stderr is None or self._broken:
            return
        try:
            act(*given)
        except Exception:
            self._broken = True

    def _look(self):
        self._live = sys.stderr.isatty()

    def _show(self, share, words):
        filled = "#" * round(share * 24)
        self._said = f"[{filled:.<24}] {share:4.0%}  {words}"
        self._widest = max(self._widest, len(self._said))
        if self._live:
            print(f"\r{self._said:<{self._widest}}", end="", file=sys.stderr, flush=True)

    def _end(self):
        if self._said and self._vanishes:
            if self._live:
                print(f"\r{'':<{self._widest}}\r", end="", file=sys.stderr, flush=True)
        elif self._said:
            print("" if self._live else self._said, file=sys.stderr, flush=True)
