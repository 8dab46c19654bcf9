"""Loads with ckptfs and with others, in turn, on the same files. Each loader, each model and each place of its files is
a row of the table."""

import os
import shutil
from typing import NamedTuple

from ckptfs.bench import page_cache
from ckptfs.bench.schedule import rotate
from ckptfs.bench.tables import fault_line

from gpu_check import models

# Seconds that any load may take, and bytes in a second that the slowest loads.
_LIMIT_SECONDS, _SLOWEST_BYTES = 90, 50 * 10**6

# Words of CUDA and of torch where a process cannot use a device that it has from before it began.
_NO_FORK = ("initialization error", "forked subprocess")

_TINY_COUNT = 100_000

# Pinned memory, and threads.
_PINNED = ["64M", "128M", "256M", "512M", "1G"]
_THREADS = [4, 8, 16, 32]


class Entry(NamedTuple):
    """A row to be: its name, a loader of `ckptfs.bench` with options, packages, and settings of the environment."""

    name: str
    loader: str
    packages: tuple
    options: dict = {}
    environment: dict = {}


ENTRIES = [
    Entry("ckptfs", "ckptfs", ("ckptfs",)),
    Entry("safetensors 0.8 load_file", "safetensors", ("safetensors 0.8",)),
    Entry("safetensors 0.9 load_file", "safetensors", ("safetensors 0.9",)),
    Entry("safetensors 0.9 prefetch", "safetensors prefetch", ("safetensors 0.9",)),
    Entry("fastsafetensors nogds", "fastsafetensors nogds", ("fastsafetensors",)),
    Entry("fastsafetensors", "fastsafetensors", ("fastsafetensors",)),
    Entry("runai-model-streamer", "runai", ("runai", "humanize")),
    Entry("instanttensor", "instanttensor", ("instanttensor",)),
]

_PLAIN = Entry("read plainly", f"{models.__name__}:plain_reader", ())


class Workers:
    """A worker process for each entry, which has imported what it needs and used nothing of CUDA."""

    def __init__(self, job):
        self._job, self._workers, self._without_forks = job, {}, set()

    def load(self, entry, files, size, digests=False):
        """What one load took, or {"fault": why}."""
        result = self._load(entry, files, size, digests)
        if any(words in result.get("fault", "") for words in _NO_FORK):
            # Its imports used the device: then every load has a process that begins from nothing.
            self._end(entry.name)
            self._without_forks.add(entry.name)
            result = self._load(entry, files, size, digests)
        return result

    def _load(self, entry, files, size, digests):
        worker = self._workers.get(entry.name)
        if worker is None or worker.is_over:
            worker = self._job.worker(*entry.packages, environment=entry.environment)
            self._workers[entry.name] = worker
        fork = entry.name not in self._without_forks
        request = {
            "loader": entry.loader, "options": entry.options, "device": self._job.device, "files": files,
            "path": os.path.dirname(files[0]), "fork": fork, "preload": fork, "digests": digests,
        }  # fmt: skip
        result = worker.measure(request, limit=_LIMIT_SECONDS + size / _SLOWEST_BYTES)
        if not fork:
            self._end(entry.name)
        return result

    def _end(self, name):
        if worker := self._workers.pop(name, None):
            worker.close()

    def __enter__(self):
        return self

    def __exit__(self, *_):
        for name in [*self._workers]:
            self._end(name)


def available(job):
    """The entries whose packages are there."""
    for entry in ENTRIES:
        if why := job.lacks(*entry.packages):
            job.table.add("bench", entry.name, "not there", why=why)
        else:
            yield entry


def bench(job):
    entries = [*available(job)]
    with Workers(job) as workers:
        for title, sizes in plan_models(job):
            if job.is_over(f"bench: {title}"):
                continue
            folder = job.disk / "model"
            try:
                files = models.write(folder, sizes)
                measure_model(job, workers, entries, title, files, sum(sizes))
            finally:
                shutil.rmtree(folder)


def plan_models(job):
    """Names and sizes of tensors of the models to load, none larger than there is room for."""
    most, bound = models.room(job.disk, job.free)
    kinds = [("large", int(size * models.GB)) for size in job.sizes]
    kinds.append(("small", int(job.sizes[0] * models.GB)))
    done = set()
    for kind, size in kinds:
        if size > most:
            job.table.note(f"{size / models.GB:.2f} GB are too much for {bound}: {most / models.GB:.2f} GB instead")
            size = most
        if (kind, size) not in done:
            done.add((kind, size))
            sizes = models.sizes_of(kind, size)
            yield f"{len(sizes):,} tensors, {sum(sizes) / models.GB:.2f} GB", sizes
    # Where models are small, so are they few.
    sizes = models.sizes_of("tiny", min(_TINY_COUNT, most // 8192, int(job.sizes[0] * _TINY_COUNT)) or 1)
    yield f"{len(sizes):,} tiny tensors, {sum(sizes) / models.GB:.2f} GB", sizes


def measure_model(job, workers, entries, title, files, size):
    """Compares the loaders once, and measures them with the files in each place."""
    page_cache.warm(files)
    good = verify(job, workers, entries, title, files, size)
    for state in "page cache", "disk, cold", "tmpfs":
        if job.is_over(f"bench: {title}, {state}"):
            continue
        if state != "tmpfs":
            measure_in_turn(job, workers, good, "bench", title, state, files, size)
            continue
        why = "there is no /dev/shm" if job.shm is None else None
        if job.shm and min(shutil.disk_usage(job.shm).free, models.memory() // 2) < size * 11 // 10:
            why = f"no room in {job.shm}"
        if why:
            job.table.note(f"{title}: nothing was loaded from tmpfs: {why}")
            continue
        copied = models.copy(files, job.shm / "model")
        try:
            measure_in_turn(job, workers, good, "bench", title, state, copied, size)
        finally:
            shutil.rmtree(job.shm / "model")


def verify(job, workers, entries, title, files, size):
    """The entries whose tensors are those of the files."""
    expected = workers.load(_PLAIN, files, size, digests=True)
    if "fault" in expected:
        job.table.add("bench", _PLAIN.name, "FAILED", where=title, why=expected["fault"])
        return []
    good = []
    for entry in entries:
        result = workers.load(entry, files, size, digests=True)
        why = result.get("fault")
        if why is None and result["tensors"] != expected["tensors"]:
            why = "gives other tensors than the files say"
        if why is None:
            good.append(entry)
            if result["report"]:
                job.table.note(f"{title}: {result['report']}")
        else:
            job.table.add("bench", entry.name, failure(entry), where=title, why=why)
    return good


def failure(entry):
    """What a failed load is in the table: of ours a failed check."""
    return "FAILED" if entry.loader == "ckptfs" else "fails"


def measure_in_turn(job, workers, entries, part, title, state, files, size):
    """Measures the entries in turn, each round begun by another."""
    took, peaks, failed, cleared_by, last = {}, {}, {}, None, 0
    for run, entry in rotate(entries, job.runs):
        if run != last and job.is_over(f"{part}: {title}, {state}: rounds {run + 1} to {job.runs}"):
            break
        last = run
        if entry.name in failed:
            continue
        if state == "disk, cold":
            try:
                cleared_by = page_cache.clear(files)
            except Exception as fault:
                job.table.note(f"{title}: nothing was loaded cold: {fault_line(fault)}")
                return
        result = workers.load(entry, files, size)
        if "fault" in result:
            failed[entry.name] = result["fault"]
        else:
            took.setdefault(entry.name, []).append(result["end"] - result["start"])
            peaks[entry.name] = max(filter(None, [peaks.get(entry.name), result["peak"]]), default=None)
    where = f"{title}, {state}" + (f" ({cleared_by})" if cleared_by else "")
    for entry in entries:
        if entry.name in failed:
            job.table.add(part, entry.name, failure(entry), where=where, why=failed[entry.name])
        else:
            job.table.add(part, entry.name, "ok", where=where, seconds=took.get(entry.name, []), size=size,
                          ceiling=ceiling(job, state), peak=peaks.get(entry.name))  # fmt: skip


def ceiling(job, state):
    """The highest speed of bytes from there: that of the slowest of the ways that they must take."""
    source = {"page cache": "page cache to", "tmpfs": "tmpfs to", "disk, cold": "disk"}[state]
    found = [max((speed for name, speed in job.table.ceilings.items() if name.startswith(start)), default=None)
             for start in (source, "copy, pinned")]  # fmt: skip
    return min(filter(None, found), default=None)


def tuning(job):
    """Measures ours alone, over what can be set."""
    most, _ = models.room(job.disk, job.free)
    sizes = models.sizes_of("large", min(most, int(job.sizes[0] * models.GB)))
    folder, size = job.disk / "model", sum(sizes)
    ours = Entry("ckptfs", "ckptfs", ("ckptfs",))
    entries = [ours._replace(name=f"num_threads={n}", options={"num_threads": n}) for n in _THREADS]
    if has_pinned():
        entries += [ours._replace(name=f"pinned={size}", environment={"CKPTFS_PINNED": size}) for size in _PINNED]
    else:
        job.table.add("tuning", "pinned", "not there", why="this ckptfs knows no CKPTFS_PINNED")
    try:
        files = models.write(folder, sizes)
        page_cache.warm(files)
        with Workers(job) as workers:
            for state in "page cache", "disk, cold":
                if not job.is_over(f"tuning: {state}"):
                    measure_in_turn(job, workers, entries, "tuning", f"{size / models.GB:.2f} GB", state, files, size)
    finally:
        shutil.rmtree(folder)


def has_pinned():
    from ckptfs import settings

    return "pinned" in settings._VARIABLES
