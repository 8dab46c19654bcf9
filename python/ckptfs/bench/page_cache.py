"""Files as a machine has them that never read them, and as one that has just done so.

In: paths. Out: how their pages were had out of the page cache, or why they cannot be.
"""

import ctypes
import mmap
import os

from ckptfs import mountinfo
from ckptfs._errors import error

_DROP = "/proc/sys/vm/drop_caches"

# The share of files that may still be cached where they count as cold.
_STILL = 0.01

# So much of a file is looked at at once: a mapping of all of a large one may be more than there is memory.
_AT_ONCE = 1 << 30


def clear(paths):
    """Has the system forget what it keeps of these files, and says by which means: all else stays cached
    unless only forgetting everything helps, which root may ask for."""
    for path in paths:
        kind = filesystem(path)
        if kind in ("tmpfs", "ramfs", "hugetlbfs"):
            raise error(f"{path}: lies in memory, so that it is never read from a disk", "copy it to a disk")
        if kind == "fuse.ckptfs":
            raise error(f"{path}: lies in a mount, whose source stays cached", "measure the source itself")
    for path in paths:
        with open(path, "rb") as file:
            # What is not on the disk yet is not forgotten.
            os.fdatasync(file.fileno())
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    share = cached(paths)
    if share is None:
        return "posix_fadvise, as far as this user is told"
    if share <= _STILL:
        return "posix_fadvise"
    why = f"after posix_fadvise {share:.0%} of it"
    try:
        drop_all()
    except OSError as fault:
        why += f", and {_DROP} says: {fault.strerror}"
    else:
        share = cached(paths)
        if share is None or share <= _STILL:
            return _DROP
        why = f"after {_DROP} {share:.0%} of it"
    message = f"{paths[0]}: stays in the page cache, {why}"
    raise error(message, "end the programs that have it mapped, or run this as root")


def drop_all():
    """Has the system forget everything that it can read again, names and places of files too, which only root
    may ask for. Gives what it was asked by."""
    with open(_DROP, "w") as file:
        file.write("3\n")
    return _DROP


def warm(paths):
    """Reads these files through the page cache."""
    memory = bytearray(8 << 20)
    for path in paths:
        with open(path, "rb", buffering=0) as file:
            while file.readinto(memory):
                pass


def cached(paths):
    """The share of these files that the page cache has, from 0 to 1; `None` where the system does not tell
    this user."""
    found = looked = 0
    for path in paths:
        about = os.stat(path)
        if about.st_uid != os.geteuid() and not os.access(path, os.W_OK):
            return None
        with open(path, "rb") as file:
            for offset in range(0, about.st_size, _AT_ONCE):
                pages = _resident(file, offset, min(about.st_size - offset, _AT_ONCE))
                if pages is None:
                    return None
                looked += len(pages)
                found += len(pages) - pages.count(0)
    return found / looked if looked else 0.0


def _resident(file, offset, size):
    """A byte for each page of a part of a file: whether it is cached."""
    # To look by reading would have the system read ahead. Nothing of the mapping is touched, and it is one
    # that could be written to only because its address is needed.
    with mmap.mmap(file.fileno(), size, access=mmap.ACCESS_COPY, offset=offset) as mapped:
        pages = ctypes.create_string_buffer(-(-size // mmap.PAGESIZE))
        start = ctypes.c_char.from_buffer(mapped)
        failed = _libc.mincore(ctypes.byref(start), ctypes.c_size_t(size), pages)
        del start
        return None if failed else pages.raw


_libc = ctypes.CDLL(None)


def filesystem(path):
    """The type of the filesystem that a file lies on; `None` where the system does not tell."""
    at = mountinfo.place(path)
    entry = at and mountinfo.table().get(at.mount)
    return entry.kind if entry else None
