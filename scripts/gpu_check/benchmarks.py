"""Loads with ckptfs and with others, in turn, on the same files.

In: a `Job`, with the ceilings measured. Out: a row of the table for each way of loading, each model and each place
of its files.
"""

import shutil
from typing import NamedTuple

from bench import fixtures
import models
from subprocesses import Child, in_words
from loaders import LOADERS

# Seconds that any load may take, and bytes in a second that the slowest is given.
_LIMIT, _SLOWEST = 90, 50 * 10**6

# Words of CUDA and of torch where a process cannot use a device that it has from before it began.
_NO_FORK = ("initialization error", "forked subprocess")

_TINY = 100_000


class Entry(NamedTuple):
    """A row to be: its name, the way of loading, settings of the environment, and arguments of the call."""

    name: str
    way: str | None
    env: dict = {}
    how: dict = {}


class Ways:
    """Ways of loading, each with a process that has imported what it needs."""

    def __init__(self, job):
        self._job, self._children, self._plain = job, {}, set()

    def load(self, entry, files, size, **more):
        """What one load told, or `{"failed": why}`."""
        asked = {"way": entry.way, "how": entry.how, "device": self._job.device, "files": files, **more}
        told = self._load(entry, asked, size)
        if any(words in told.get("failed", "") for words in _NO_FORK):
            # It had to do with the device before: then every load has a process that begins from nothing.
            self._end(entry.name)
            self._plain.add(entry.name)
            told = self._load(entry, asked, size)
        return told

    def _load(self, entry, asked, size):
        child = self._children.get(entry.name)
        if child is None or child.is_over:
            packages = LOADERS[entry.way][1] if entry.way else ["ckptfs"]
            child = Child("worker.py", self._job.packages(*packages), entry.env)
            self._children[entry.name] = child
        plain = entry.name in self._plain
        told = child.one({**asked, "forks": not plain}, _LIMIT + size / _SLOWEST)
        if plain or "fault" in told:
            self._end(entry.name)
        return {"failed": told["fault"]} if "fault" in told else told

    def _end(self, name):
        child = self._children.pop(name, None)
        if child is not None:
            child.close()

    def __enter__(self):
        return self

    def __exit__(self, *_):
        for name in [*self._children]:
            self._end(name)


BY_HAND = Entry("read plainly", None)


def there(job):
    """The ways of loading that are there."""
    for way, (_, packages) in LOADERS.items():
        why = job.lacks(*packages)
        if why:
            job.table.add("bench", way, "not there", why=why)
        else:
            yield Entry(way, way)


def bench(job):
    entries = [*there(job)]
    with Ways(job) as ways:
        for title, sizes in planned(job):
            if job.is_over(f"bench: {title}"):
                continue
            folder = job.disk / "model"
            try:
                files = models.write(folder, sizes)
                one_model(job, ways, entries, title, files, sum(sizes))
            finally:
                shutil.rmtree(folder)


def planned(job):
    """Names and sizes of tensors of the models to load, none larger than there is room for."""
    most, bound = models.room(job.disk, job.free)
    wanted = [("large", int(size * models.GB)) for size in job.sizes]
    wanted.append(("small", int(job.sizes[0] * models.GB)))
    done = set()
    for kind, size in wanted:
        if size > most:
            job.table.note(f"{size / models.GB:.2f} GB are too much for {bound}: {most / models.GB:.2f} GB instead")
            size = most
        if (kind, size) not in done:
            done.add((kind, size))
            sizes = models.sizes_of(kind, size)
            yield f"{len(sizes):,} tensors, {sum(sizes) / models.GB:.2f} GB", sizes
    # Where models are small, so are they few.
    sizes = models.sizes_of("tiny", min(_TINY, most // 8192, int(job.sizes[0] * _TINY)) or 1)
    yield f"{len(sizes):,} tiny tensors, {sum(sizes) / models.GB:.2f} GB", sizes


def one_model(job, ways, entries, title, files, size):
    fixtures.warm(files)
    good = same(job, ways, entries, title, files, size)
    for state in "page cache", "disk, cold", "tmpfs":
        if job.is_over(f"bench: {title}, {state}"):
            continue
        if state != "tmpfs":
            in_turn(job, ways, good, "bench", title, state, files, size)
            continue
        why = "there is no /dev/shm" if job.shm is None else None
        if job.shm and min(shutil.disk_usage(job.shm).free, models.memory() // 2) < size * 11 // 10:
            why = f"no room in {job.shm}"
        if why:
            job.table.note(f"{title}: nothing was loaded from tmpfs: {why}")
            continue
        copied = models.copy(files, job.shm / "model")
        try:
            in_turn(job, ways, good, "bench", title, state, copied, size)
        finally:
            shutil.rmtree(job.shm / "model")


def same(job, ways, entries, title, files, size):
    """Those that give what the files say, which is compared once."""
    expected = ways.load(BY_HAND, files, size, tell=True)
    if "failed" in expected:
        job.table.add("bench", BY_HAND.name, "FAILED", where=title, why=expected["failed"])
        return []
    good = []
    for entry in entries:
        told = ways.load(entry, files, size, tell=True)
        why = told.get("failed")
        if why is None and told["digest"] != expected["digest"]:
            why = "gives other tensors than the files say"
        if why is None:
            good.append(entry)
            if "report" in told:
                job.table.note(f"{title}: {told['report']}")
        else:
            job.table.add("bench", entry.name, bad(entry), where=title, why=why)
    return good


def bad(entry):
    """Of ours it is a fault; what others cannot do is told."""
    return "FAILED" if entry.way == "ckptfs" else "fails"


def in_turn(job, ways, entries, part, title, state, files, size):
    """Several rounds, each begun by another."""
    took, peaks, failed, how = {entry.name: [] for entry in entries}, {}, {}, None
    for run in range(job.runs):
        if run and job.is_over(f"{part}: {title}, {state}: rounds {run + 1} to {job.runs}"):
            break
        turn = run % max(1, len(entries))
        for entry in entries[turn:] + entries[:turn]:
            if entry.name in failed:
                continue
            if state == "disk, cold":
                try:
                    how = clear(files)
                except Exception as fault:
                    job.table.note(f"{title}: nothing was loaded cold: {in_words(fault)}")
                    return
            told = ways.load(entry, files, size)
            if "failed" in told:
                failed[entry.name] = told["failed"]
            else:
                took[entry.name].append(told["seconds"])
                peaks[entry.name] = max(filter(None, [peaks.get(entry.name), told["peak"]]), default=None)
    where = f"{title}, {state}" + (f" ({how})" if how else "")
    for entry in entries:
        if entry.name in failed:
            job.table.add(part, entry.name, bad(entry), where=where, why=failed[entry.name])
        else:
            job.table.add(part, entry.name, "ok", where=where, seconds=took[entry.name], size=size,
                          ceiling=ceiling(job, state), peak=peaks[entry.name])  # fmt: skip


def clear(files):
    from ckptfs.bench import page_cache

    return page_cache.clear(files)


def ceiling(job, state):
    """What bytes from there can come to at the most: the slowest of the ways that they must take."""
    source = {"page cache": "page cache to", "tmpfs": "tmpfs to", "disk, cold": "disk"}[state]
    found = [max((speed for name, speed in job.table.ceilings.items() if name.startswith(start)), default=None)
             for start in (source, "copy, pinned")]  # fmt: skip
    return min(filter(None, found), default=None)
