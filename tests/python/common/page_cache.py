"""Counts and evicts the pages of files in the page cache."""

import os
import subprocess

from mounts import until


def cached_bytes(paths):
    output = subprocess.run(
        ["fincore", "--bytes", "--noheadings", "--raw", "--output", "RES", *map(str, paths)],
        check=True, capture_output=True, text=True,
    )  # fmt: skip
    return sum(map(int, output.stdout.split()))


def evict(paths):
    for path in paths:
        with open(path, "rb") as file:
            os.fsync(file.fileno())
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    until("its pages are gone", lambda: cached_bytes(paths) == 0)
