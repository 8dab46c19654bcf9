"""What loads do: a `Load` while it goes on, then its `Report`.

The report is kept for `last_report`, added to `stats`, and passed to the callback of the load.
"""

import collections
import os
import threading
import time

from ckptfs import _ckptfs
from ckptfs.progress import TransferProgress


class Report:
    """What a load did: how much, how fast, and how each byte was read.

    `tensors`, `bytes`, `seconds`: the totals. The seconds end when all was read; for a device, when all copies to it
    were issued.
    `cached`, `direct`, `buffered`: bytes copied out of the page cache, read past it, and read through it. Bytes
    between tensors count if they were read with them.
    `gpudirect`: bytes that storage wrote to a device by itself. `without_gpudirect`: why it did not write all.
    `remote`, `disk_cached`: bytes that stores sent, and those of stores that the cache on disk had.
    `gathered`, `memory`: bytes put together from pieces or cast on the host, and bytes that were in memory already.
    `cast`, `device_cast`: bytes that a recipe cast, in their new type, and the part of them that was cast on devices.
    How that part was read is counted in bytes before the cast.
    `mapped`, `received`: bytes that are used where they lie, unread, and bytes that other ranks read.
    `fallbacks`: what was done otherwise than requested, and for how many tensors.
    `notes`: what was chosen from a directory or a pickle, and what was left out.

        >>> ckptfs.torch.load_file("model.bin", backend="pread")
        >>> ckptfs.last_report().gb_per_second
        4.1
    """

    # Zeros are attributes of the class: small files are loaded by the thousand.
    tensors = bytes = mapped = cached = direct = gpudirect = buffered = remote = disk_cached = 0
    gathered = cast = device_cast = memory = received = 0
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
        """All of it, with types that JSON has."""
        return {**{name: getattr(self, name) for name in _NUMBERS}, "fallbacks": dict(self.fallbacks),
                "without_gpudirect": self.without_gpudirect, "notes": [*self.notes]}  # fmt: skip

    def __repr__(self):
        names = ("mapped", "cached", "direct", "gpudirect", "buffered", "remote", "disk_cached", "gathered", "cast",
                 "device_cast", "memory", "received")
        read = ", ".join(f"{name} {getattr(self, name):,}" for name in names if getattr(self, name))
        reasons = f"; {self.without_gpudirect}" if self.without_gpudirect else ""
        reasons += "".join(f"; {reason} ({count})" for reason, count in self.fallbacks.items())
        return (f"<{self.tensors:,} tensors, {self.bytes:,} bytes in {self.seconds:.3f} s "
                f"({self.gb_per_second:.2f} GB/s): {read or 'nothing read'}{reasons}>")

    def _add_fallback(self, reason, count=1):
        self.fallbacks[reason] = self.fallbacks.get(reason, 0) + count

    def _add(self, numbers):
        """Adds numbers by their names; leaves out notes, which belong to one load."""
        own = vars(self)
        for name, value in numbers.items():
            if not value or name == "notes":
                continue
            if name == "fallbacks":
                for reason, count in value.items():
                    self._add_fallback(reason, count)
            elif name == "without_gpudirect":
                # Only the first reason is kept.
                own.setdefault(name, value)
            else:
                own[name] = own.get(name, 0) + value


_NUMBERS = ("tensors", "bytes", "mapped", "cached", "direct", "gpudirect", "buffered", "remote", "disk_cached",
            "gathered", "cast", "device_cast", "memory", "received", "seconds")  # fmt: skip


class Load:
    """A load while it goes on: `with Load(...) as load:` fills `load.report`. A load that fails counts nowhere."""

    # Whether this load pins memory, and how many loads of this process do.
    _pins, _pinning = False, 0

    def __init__(self, progress=False, report=None, *, stop=None, threads=None):
        self.report, self._callback = Report(), report
        # Stops it from another thread; the number of threads that read, if not the checkpoint's.
        self.stop, self.threads = stop, threads
        self._bar, self._total_bytes = TransferProgress() if progress else None, 0

    def __enter__(self):
        self._start = time.perf_counter()
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
        """Whether there is a progress bar."""
        return self._bar is not None

    def mark_pinning(self):
        """Notes that it uses pinned memory, most of which the last such load frees at its end."""
        with _lock:
            Load._pinning += not self._pins
            self._pins = True

    def _end_pinning(self):
        with _lock:
            Load._pinning -= 1
            return Load._pinning == 0

    def add_loaded(self, tensors, size):
        """Counts tensors that are loaded, and their bytes."""
        self.report.tensors += tensors
        self.report.bytes += size
        if self._bar:
            self._bar.show(self.report.bytes, self._total_bytes)

    def __exit__(self, kind, value, trace):
        self.report.seconds = time.perf_counter() - self._start
        if self._bar:
            self._bar.end()
        if self._pins and self._end_pinning():
            _ckptfs.trim_pinned()
        if kind is None:
            _keep(self.report)
            if self._callback:
                self._callback(self.report)


_local = threading.local()
_lock = threading.Lock()
_totals = {"loads": 0, "originals": 0, "report": Report()}

# Reports that are not yet in the totals, and how many there may be.
_uncounted, _MAX_UNCOUNTED = collections.deque(), 64


def set_last_report(report):
    """Makes a report that of this thread's last load, whichever thread read it."""
    _local.last = report


def _keep(report):
    set_last_report(report)
    # One step of the interpreter, which needs no lock: small files are loaded by the thousand. It is a copy, because
    # the callback may change the report.
    _uncounted.append({**vars(report), "fallbacks": {**report.fallbacks}})
    if len(_uncounted) >= _MAX_UNCOUNTED:
        _count()


def _count():
    """Adds reports to the totals."""
    with _lock:
        while _uncounted:
            _totals["loads"] += 1
            _totals["report"]._add(_uncounted.popleft())


def count_original():
    """Counts a call that was left to the original."""
    with _lock:
        _totals["originals"] += 1


def _after_fork():
    global _lock
    _lock = threading.Lock()
    Load._pinning = 0


os.register_at_fork(after_in_child=_after_fork)


def last_report():
    """The `Report` of this thread's last load; `None` before the first."""
    return getattr(_local, "last", None)


def stats():
    """What all loads of this process did together: their number `loads`, and the sums of their reports.

    `originals` is the number of calls that `ckptfs.install` had replaced and that were left to the original.

        >>> ckptfs.stats()["bytes"]
        16060522496
    """
    _count()
    with _lock:
        counts = {name: count for name, count in _totals.items() if name != "report"}
        sums = _totals["report"].as_dict()
        del sums["notes"]
        return {**counts, **sums}
