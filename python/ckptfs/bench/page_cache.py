"""Evicts files from the system's page cache, brings them there, and tells how much of them it has."""

import ctypes
import mmap
import os

from ckptfs import _ckptfs
from ckptfs.errors import error

_DROP = "/proc/sys/vm/drop_caches"

# Files count as cold when at most this share of them is cached.
_MAX_COLD_SHARE = 0.01

# The length of a mapping that is inspected: one of a whole large file may need too much memory.
_MAPPING_BYTES = 1 << 30

_READ_BYTES = 8 << 20


def clear(paths, drops_all=False):
    """Evicts these files, and returns by which means. All else stays cached, unless with `drops_all`, which needs
    root."""
    for path in paths:
        kind = filesystem(path)
        if kind in ("tmpfs", "ramfs", "hugetlbfs"):
            raise error(f"{path}: lies in memory, so that it is never read from a disk", "copy it to a disk")
        if kind == "fuse.ckptfs":
            raise error(f"{path}: lies in a mount, whose source stays cached", "measure the source itself")
    for path in paths:
        with open(path, "rb") as file:
            # Dirty pages are not evicted.
            os.fdatasync(file.fileno())
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    means = drop_all() if drops_all else "posix_fadvise"
    share = cached(paths)
    if share is None:
        return f"{means}, as far as this user can tell"
    if share <= _MAX_COLD_SHARE:
        return means
    kept = max(paths, key=lambda path: cached([path]))
    remedy = "end the programs that have it mapped" + ("" if drops_all else ", or drop all caches, with --cold")
    raise error(f"{kept}: {cached([kept]):.0%} of it stays in the page cache, after {means}", remedy)


def obstacle():
    """Why this process cannot drop all caches; `None` if it can."""
    return None if os.access(_DROP, os.W_OK) else f"{_DROP} cannot be written"


def drop_all():
    """Drops everything that the system can read again, also names and places of files, which needs root. Returns the
    means."""
    with open(_DROP, "w") as file:
        file.write("3\n")
    return _DROP


def warm(paths):
    """Reads these files through the page cache."""
    memory = bytearray(_READ_BYTES)
    for path in paths:
        with open(path, "rb", buffering=0) as file:
            while file.readinto(memory):
                pass


def cached(paths):
    """The share of these files that the page cache has, from 0 to 1; `None` where this user may not know."""
    found = inspected = 0
    for path in paths:
        about = os.stat(path)
        if about.st_uid != os.geteuid() and not os.access(path, os.W_OK):
            return None
        with open(path, "rb") as file:
            for offset in range(0, about.st_size, _MAPPING_BYTES):
                pages = _resident(file, offset, min(about.st_size - offset, _MAPPING_BYTES))
                if pages is None:
                    return None
                inspected += len(pages)
                found += len(pages) - pages.count(0)
    return found / inspected if inspected else 0.0


def _resident(file, offset, size):
    """A byte for each page of a part of a file: whether it is cached."""
    # Reading would start readahead. No page of the mapping is touched, and it is writable only because its address is
    # needed.
    with mmap.mmap(file.fileno(), size, access=mmap.ACCESS_COPY, offset=offset) as mapped:
        pages = ctypes.create_string_buffer(-(-size // mmap.PAGESIZE))
        start = ctypes.c_char.from_buffer(mapped)
        failed = _libc.mincore(ctypes.byref(start), ctypes.c_size_t(size), pages)
        del start
        return None if failed else pages.raw


_libc = ctypes.CDLL(None)


def filesystem(path):
    """The type of a file's filesystem; `None` where the system does not say."""
    location = _ckptfs.locate(path)
    entry = location and _ckptfs.mount_table().get(location[1])
    return entry[1] if entry else None
