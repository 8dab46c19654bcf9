"""Ceilings, leaks and tuning.

In: a `Job`. Out: rows of the table.
"""

import shutil

from bench import fixtures
import models
from benchmarks import Entry, Ways, in_turn
from subprocesses import Child, one

# Seconds for one measurement, which may read a file of several GB a dozen times.
_LIMIT = 300

# Pinned memory, and threads.
PINNED = ["64M", "128M", "256M", "512M", "1G"]
THREADS = [4, 8, 16, 32]


def ceilings(job):
    most, _ = models.room(job.disk, job.free)
    size = min(most, int(min(job.sizes) * models.GB), 2 * models.GB)
    folder = job.disk / "ceiling"
    disk = shm = None
    try:
        [disk] = models.write(folder, [size])
        fixtures.warm([disk])
        if job.shm and shutil.disk_usage(job.shm).free > 2 * size:
            [shm] = models.copy([disk], job.shm / "ceiling")
        for what in "copies", "reads", "registered", "cold":
            if job.device == "cpu" and what in ("copies", "registered"):
                job.table.add("ceilings", what, "skipped", why="there is no device to copy to")
            elif not job.is_over(f"ceilings: {what}"):
                measured(job, what, disk, shm)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
        if shm:
            shutil.rmtree(job.shm / "ceiling", ignore_errors=True)


def measured(job, what, disk, shm):
    asked = {"what": what, "device": job.device, "disk": disk, "shm": shm, "quick": job.quick}
    with Child("hardware_limits.py", job.packages("ckptfs")) as child:
        for told in child.ask(asked, _LIMIT):
            if "fault" in told:
                job.table.add("ceilings", what, "fails", why=told["fault"])
            elif "name" in told and told["speed"] is None:
                job.table.add("ceilings", told["name"], "fails", why=told["how"])
            elif "name" in told:
                name, speed = told["name"], told["speed"]
                job.table.add("ceilings", name, "ok", where=told["how"], speed=speed)
                job.table.ceilings[name] = max(speed, job.table.ceilings.get(name, 0))


def leaks(job):
    if job.is_over("leaks"):
        return
    times = 10 if job.quick else 50
    folder = job.disk / "leaks"
    files = models.write(folder, models.sizes_of("large", min(256 << 20, int(job.sizes[0] * models.GB))))
    try:
        told = one("leaks.py", {"device": job.device, "folder": str(folder), "times": times}, _LIMIT,
                   job.packages("ckptfs", "safetensors 0.8"))  # fmt: skip
    finally:
        shutil.rmtree(folder)
    if "fault" in told:
        job.table.add("leaks", f"{times} loads", "FAILED", why=told["fault"])
        return
    for name, (before, after, bound) in told["held"].items():
        result = "ok" if after - before <= bound else "FAILED"
        why = f"{before:,} before, {after:,} after; may grow by {bound:,}"
        job.table.add("leaks", name, result, where=f"{times} loads of {len(files)} files", why=why)


def tuning(job):
    """Ours alone, over what can be set."""
    most, _ = models.room(job.disk, job.free)
    sizes = models.sizes_of("large", min(most, int(job.sizes[0] * models.GB)))
    folder, size = job.disk / "model", sum(sizes)
    entries = [Entry(f"num_threads={threads}", "ckptfs", {}, {"num_threads": threads}) for threads in THREADS]
    if has_pinned():
        entries += [Entry(f"pinned={size}", "ckptfs", {"CKPTFS_PINNED": size}) for size in PINNED]
    else:
        job.table.add("tuning", "pinned", "not there", why="this ckptfs knows no CKPTFS_PINNED")
    try:
        files = models.write(folder, sizes)
        fixtures.warm(files)
        with Ways(job) as ways:
            for state in "page cache", "disk, cold":
                if not job.is_over(f"tuning: {state}"):
                    in_turn(job, ways, entries, "tuning", f"{size / models.GB:.2f} GB", state, files, size)
    finally:
        shutil.rmtree(folder)


def has_pinned():
    from ckptfs import settings

    return "pinned" in settings._VARIABLES
