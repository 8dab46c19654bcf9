"""What loads did: of the last one, of all together, and while it goes on.

In: what each part of a load tells of itself. Out: a `Report`, which is kept for `last_report`, added to
`stats` and given to who asked for it.
"""

import collections
import os
import threading
import time

from ckptfs import _ckptfs
from ckptfs.progress import Bar


class Report:
    """What a load did: how much, how fast, and how each byte was had.

    `tensors`, `bytes`, `seconds`; of the bytes, those `cached` (copied out of the page cache), `direct`
    (read past it), `gpudirect` (written to a device by storage itself), `buffered` (read through it),
    `gathered` (put together from pieces), from `memory`, `mapped` (used where they lie, and not read at all) and
    `received` (read by other ranks): bytes between those that were asked for count where they were read with them.
    `seconds` end when all was read; of a device, when the copies were given to it. `fallbacks`: what was not done
    as it was asked for, with the number of tensors; `without_gpudirect`: why storage did not write all to the
    device by itself; and `notes`: what was chosen from a directory or a pickle, and what was left out.

        >>> ckptfs.torch.load_file("model.bin", backend="pread")
        >>> ckptfs.last_report().gb_per_second
        4.1
    """

    # Of the class until there is something to count: files that are small are loaded by the thousand.
    tensors = bytes = mapped = cached = direct = gpudirect = buffered = gathered = memory = received = 0
    seconds = 0.0
    without_gpudirect = None
    notes = ()

    def __init__(self):
        self.fallbacks = {}

    @property
    def gb_per_second(self):
        """Billions of bytes in a second."""
        return self.bytes / self.seconds / 1e9 if self.seconds else 0.0

    def as_dict(self):
        """All of it, as JSON can have it."""
        return {**{name: getattr(self, name) for name in _NUMBERS}, "fallbacks": dict(self.fallbacks),
                "without_gpudirect": self.without_gpudirect, "notes": [*self.notes]}  # fmt: skip

    def __repr__(self):
        how = ("mapped", "cached", "direct", "gpudirect", "buffered", "gathered", "memory", "received")
        how = ", ".join(f"{name} {getattr(self, name):,}" for name in how if getattr(self, name))
        why = f"; {self.without_gpudirect}" if self.without_gpudirect else ""
        why += "".join(f"; {why} ({count})" for why, count in self.fallbacks.items())
        return (f"<{self.tensors:,} tensors, {self.bytes:,} bytes in {self.seconds:.3f} s "
                f"({self.gb_per_second:.2f} GB/s): {how or 'nothing read'}{why}>")

    def _add_fallback(self, why, count=1):
        self.fallbacks[why] = self.fallbacks.get(why, 0) + count

    def _add(self, numbers):
        """Adds numbers by their names. Notes are each load's own."""
        mine = vars(self)
        for name, value in numbers.items():
            if not value or name == "notes":
                continue
            if name == "fallbacks":
                for why, count in value.items():
                    self._add_fallback(why, count)
            elif name == "without_gpudirect":
                # The first reason.
                mine.setdefault(name, value)
            else:
                mine[name] = mine.get(name, 0) + value


_NUMBERS = ("tensors", "bytes", "mapped", "cached", "direct", "gpudirect", "buffered", "gathered", "memory",
            "received", "seconds")  # fmt: skip


class Load:
    """A load that goes on: `with Load(...) as load:`, and `load.report` is filled. Only what came to its
    end counts."""

    # Whether memory was pinned for it, and how many loads of this process that holds for.
    _pins, _pinning = False, 0

    def __init__(self, progress=False, report=None, *, stop=None, threads=None):
        self.report, self._callback = Report(), report
        # What ends it from another thread, and the threads that read if others than the checkpoint's.
        self.stop, self.threads = stop, threads
        self._bar, self._total_bytes = Bar() if progress else None, 0

    def __enter__(self):
        self._begun = time.perf_counter()
        return self

    def begin(self, count, sizes, note=None):
        """Announces tensors by their number and sizes. `note` stands in the report: why they are another file's."""
        if note:
            self.report._add_fallback(note, count)
        if self._bar:
            self._total_bytes += sum(sizes)

    def add_notes(self, notes):
        """Adds notes to the report, each once: what was chosen, and what was left out."""
        if notes:
            self.report.notes = tuple(dict.fromkeys([*self.report.notes, *notes]))

    def has_progress(self):
        """Whether someone watches."""
        return self._bar is not None

    def mark_pinning(self):
        """It passes bytes through pinned memory, most of which the last such load gives back at its end."""
        with _lock:
            Load._pinning += not self._pins
            self._pins = True

    def _end_pinning(self):
        with _lock:
            Load._pinning -= 1
            return Load._pinning == 0

    def add_loaded(self, tensors, size):
        """So much more is there."""
        self.report.tensors += tensors
        self.report.bytes += size
        if self._bar:
            self._show(self.report.bytes, time.perf_counter() - self._begun)

    def _show(self, done, seconds):
        speed = done / seconds / 1e9 if seconds else 0.0
        words = f"{done / 1e9:.2f} of {self._total_bytes / 1e9:.2f} GB  {speed:.2f} GB/s"
        self._bar.show(done / self._total_bytes if self._total_bytes else 1.0, words)

    def __exit__(self, kind, value, trace):
        self.report.seconds = time.perf_counter() - self._begun
        if self._bar:
            self._bar.end()
        if self._pins and self._end_pinning():
            _ckptfs.trim_pinned()
        if kind is None:
            _keep(self.report)
            if self._callback:
                self._callback(self.report)


_here = threading.local()
_lock = threading.Lock()
_all = {"loads": 0, "originals": 0, "report": Report()}

# The numbers of reports that are not yet in the sum, and of how many they may be.
_fresh, _FRESH = collections.deque(), 64


def set_last_report(report):
    """What this thread loaded last was this, whoever read it."""
    _here.last = report


def _keep(report):
    set_last_report(report)
    # One step of the interpreter, which needs no lock: files that are small are loaded by the thousand. Its numbers
    # as they are now, before others have it.
    _fresh.append({**vars(report), "fallbacks": {**report.fallbacks}})
    if len(_fresh) >= _FRESH:
        _count()


def _count():
    """Adds up what is not yet in the sum."""
    with _lock:
        while _fresh:
            _all["loads"] += 1
            _all["report"]._add(_fresh.popleft())


def count_original():
    """One more call that ours could not do."""
    with _lock:
        _all["originals"] += 1


def _after_fork():
    global _lock
    _lock = threading.Lock()
    Load._pinning = 0


os.register_at_fork(after_in_child=_after_fork)


def last_report():
    """The `Report` of this thread's last load; `None` before the first."""
    return getattr(_here, "last", None)


def stats():
    """What all loads of this process did together: `loads`, the numbers of a `Report`, and `originals`: how
    often a call that `ckptfs.install` took over was left to the original after all.

        >>> ckptfs.stats()["bytes"]
        16060522496
    """
    _count()
    with _lock:
        counts = {name: count for name, count in _all.items() if name != "report"}
        sums = _all["report"].as_dict()
        del sums["notes"]
        return {**counts, **sums}
