"""Loads with ckptfs and with others, in turn, on the same files. Each loader, each model and each place of its files is
a row of the table."""

import os
import shutil
from typing import NamedTuple

from ckptfs.bench import page_cache
from ckptfs.bench.schedule import take_turns
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


class BenchEntry(NamedTuple):
    """A row to measure: its name, a loader of `ckptfs.bench` with options, packages, and environment variables."""

    name: str
    loader: str
    packages: tuple
    options: dict = {}
    environment: dict = {}


ENTRIES = [
    BenchEntry("ckptfs", "ckptfs", ("ckptfs",)),
    BenchEntry("safetensors 0.8 load_file", "safetensors", ("safetensors 0.8",)),
    BenchEntry("safetensors 0.9 load_file", "safetensors", ("safetensors 0.9",)),
    BenchEntry("safetensors 0.9 prefetch", "safetensors prefetch", ("safetensors 0.9",)),
    BenchEntry("fastsafetensors nogds", "fastsafetensors nogds", ("fastsafetensors",)),
    BenchEntry("fastsafetensors", "fastsafetensors", ("fastsafetensors",)),
    BenchEntry("runai-model-streamer", "runai", ("runai", "humanize")),
    BenchEntry("instanttensor", "instanttensor", ("instanttensor",)),
]

_REFERENCE = BenchEntry("read plainly", f"{models.__name__}:plain_reader", ())


class Workers:
    """A worker process for each entry, which has imported what it needs and used nothing of CUDA."""

    def __init__(self, job):
        self._job, self._workers, self._without_forks = job, {}, set()

    def load(self, entry, files, size, digests=False):
        """What one load took, or {"fault": reason}."""
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


def find_available(job):
    """The entries whose packages are there."""
    for entry in ENTRIES:
        if reason := job.explain_missing(*entry.packages):
            job.table.add("bench", entry.name, "not there", reason=reason)
        else:
            yield entry


def run_benchmarks(job):
    entries = [*find_available(job)]
    with Workers(job) as workers:
        for title, sizes in plan_models(job):
            if job.is_out_of_time(f"bench: {title}"):
                continue
            folder = job.disk / "model"
            try:
                files = models.write_shards(folder, sizes)
                measure_model(job, workers, entries, title, files, sum(sizes))
            finally:
                shutil.rmtree(folder)


def plan_models(job):
    """Names and sizes of tensors of the models to load, none larger than there is room for."""
    max_bytes, resource = models.find_room(job.disk, job.free_device_bytes)
    planned_models = [("large", int(size * models.GB)) for size in job.sizes]
    planned_models.append(("small", int(job.sizes[0] * models.GB)))
    planned = set()
    for kind, size in planned_models:
        if size > max_bytes:
            asked_gb, max_gb = size / models.GB, max_bytes / models.GB
            job.table.note(f"{asked_gb:.2f} GB are too much for {resource}: {max_gb:.2f} GB instead")
            size = max_bytes
        if (kind, size) not in planned:
            planned.add((kind, size))
            sizes = models.plan_sizes(kind, size)
            yield f"{len(sizes):,} tensors, {sum(sizes) / models.GB:.2f} GB", sizes
    # Where models are small, so are they few.
    sizes = models.plan_sizes("tiny", min(_TINY_COUNT, max_bytes // 8192, int(job.sizes[0] * _TINY_COUNT)) or 1)
    yield f"{len(sizes):,} tiny tensors, {sum(sizes) / models.GB:.2f} GB", sizes


def measure_model(job, workers, entries, title, files, size):
    """Compares the loaders once, and measures them with the files in each place."""
    page_cache.warm(files)
    verified_entries = verify_tensors(job, workers, entries, title, files, size)
    for state in "page cache", "disk, cold", "tmpfs":
        if job.is_out_of_time(f"bench: {title}, {state}"):
            continue
        if state != "tmpfs":
            measure_in_turn(job, workers, verified_entries, "bench", title, state, files, size)
            continue
        reason = "there is no /dev/shm" if job.shm is None else None
        if job.shm and min(shutil.disk_usage(job.shm).free, models.find_free_memory() // 2) < size * 11 // 10:
            reason = f"no room in {job.shm}"
        if reason:
            job.table.note(f"{title}: nothing was loaded from tmpfs: {reason}")
            continue
        tmpfs_files = models.copy(files, job.shm / "model")
        try:
            measure_in_turn(job, workers, verified_entries, "bench", title, state, tmpfs_files, size)
        finally:
            shutil.rmtree(job.shm / "model")


def verify_tensors(job, workers, entries, title, files, size):
    """The entries whose tensors are those of the files."""
    expected = workers.load(_REFERENCE, files, size, digests=True)
    if "fault" in expected:
        job.table.add("bench", _REFERENCE.name, "FAILED", where=title, reason=expected["fault"])
        return []
    verified_entries = []
    for entry in entries:
        result = workers.load(entry, files, size, digests=True)
        reason = result.get("fault")
        if reason is None and result["tensors"] != expected["tensors"]:
            reason = "gives other tensors than the files say"
        if reason is None:
            verified_entries.append(entry)
            if result["report"]:
                job.table.note(f"{title}: {result['report']}")
        else:
            job.table.add("bench", entry.name, failure_result(entry), where=title, reason=reason)
    return verified_entries


def failure_result(entry):
    """The result of a failed load in the table: with ckptfs a failed check."""
    return "FAILED" if entry.loader == "ckptfs" else "fails"


def measure_in_turn(job, workers, entries, part, title, state, files, size):
    """Measures the entries in turn, each round begun by another."""
    seconds_by_entry, peaks, faults, eviction_method, last_run = {}, {}, {}, None, 0
    for run, entry in take_turns(entries, job.runs):
        if run != last_run and job.is_out_of_time(f"{part}: {title}, {state}: rounds {run + 1} to {job.runs}"):
            break
        last_run = run
        if entry.name in faults:
            continue
        if state == "disk, cold":
            try:
                eviction_method = page_cache.clear(files)
            except Exception as fault:
                job.table.note(f"{title}: nothing was loaded cold: {fault_line(fault)}")
                return
        result = workers.load(entry, files, size)
        if "fault" in result:
            faults[entry.name] = result["fault"]
        else:
            seconds_by_entry.setdefault(entry.name, []).append(result["end"] - result["start"])
            peaks[entry.name] = max(filter(None, [peaks.get(entry.name), result["peak"]]), default=None)
    where = f"{title}, {state}" + (f" ({eviction_method})" if eviction_method else "")
    for entry in entries:
        if entry.name in faults:
            job.table.add(part, entry.name, failure_result(entry), where=where, reason=faults[entry.name])
        else:
            job.table.add(part, entry.name, "ok", where=where, seconds=seconds_by_entry.get(entry.name, []), size=size,
                          ceiling=find_ceiling(job, state), peak=peaks.get(entry.name))  # fmt: skip


def find_ceiling(job, state):
    """The highest speed of bytes from there: that of the slowest of the ways that they must take."""
    source = {"page cache": "page cache to", "tmpfs": "tmpfs to", "disk, cold": "disk"}[state]
    speeds = [max((speed for name, speed in job.table.ceilings.items() if name.startswith(prefix)), default=None)
             for prefix in (source, "copy, pinned")]  # fmt: skip
    return min(filter(None, speeds), default=None)


def run_tuning(job):
    """Measures ckptfs, with each setting."""
    max_bytes, _ = models.find_room(job.disk, job.free_device_bytes)
    sizes = models.plan_sizes("large", min(max_bytes, int(job.sizes[0] * models.GB)))
    folder, size = job.disk / "model", sum(sizes)
    ckptfs_entry = BenchEntry("ckptfs", "ckptfs", ("ckptfs",))
    entries = [ckptfs_entry._replace(name=f"num_threads={n}", options={"num_threads": n}) for n in _THREADS]
    if supports_pinned_setting():
        for limit in _PINNED:
            entries.append(ckptfs_entry._replace(name=f"pinned={limit}", environment={"CKPTFS_PINNED": limit}))
    else:
        job.table.add("tuning", "pinned", "not there", reason="this ckptfs knows no CKPTFS_PINNED")
    try:
        files = models.write_shards(folder, sizes)
        page_cache.warm(files)
        with Workers(job) as workers:
            for state in "page cache", "disk, cold":
                if not job.is_out_of_time(f"tuning: {state}"):
                    measure_in_turn(job, workers, entries, "tuning", f"{size / models.GB:.2f} GB", state, files, size)
    finally:
        shutil.rmtree(folder)


def supports_pinned_setting():
    from ckptfs import settings

    return "pinned" in settings._VARIABLES
