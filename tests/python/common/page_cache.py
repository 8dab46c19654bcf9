"""What of files the page cache has."""

import os
import subprocess

from mounts import until


def of_page_cache(paths):
    told = subprocess.run(
        ["fincore", "--bytes", "--noheadings", "--raw", "--output", "RES", *map(str, paths)],
        check=True, capture_output=True, text=True,
    )  # fmt: skip
    return sum(map(int, told.stdout.split()))


def evict(paths):
    for path in paths:
        with open(path, "rb") as file:
            os.fsync(file.fileno())
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    until("its pages are gone", lambda: of_page_cache(paths) == 0)
