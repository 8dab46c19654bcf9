"""A file that has its name only when it is whole.

In: a directory, and bytes. Out: a file under its name, in the place of what was there, once all of it is on the disk.
Until then it has no name where the filesystem has such files, so that a killed process leaves nothing behind.
Elsewhere it has a hidden name, and the next process that saves the same removes what a killed one left.
That does not hold for a file that was set aside: a process writes more of them than it can have open.
"""

import contextlib
import os
import stat

from ckptfs import _ckptfs


class AtomicFile(_ckptfs.TempFile):
    """A file to be. `write` it, `finish` it, and it can `take` a name; `drop` deletes it."""

    def write(self, part):
        """Appends bytes."""
        _write_whole(self.fileno(), part)


@contextlib.contextmanager
def replacing(path, waits=True):
    """A file that takes a path when its block ends. What is there and is no regular file is written in place.

    Without `waits`, a pipe without a reader is an `OSError` (ENXIO)."""
    mode = _mode_of(path)
    if mode is None:
        with open(path, "wb", buffering=0, opener=None if waits else _open_without_waiting) as file:
            yield _PlainFile(file.fileno())
        return
    file = AtomicFile(*os.path.split(path))
    try:
        yield file
        file.finish(mode)
        file.take(path)
    finally:
        file.drop()
    _ckptfs.sync_directory(os.path.dirname(path))


def _open_without_waiting(path, flags):
    number = os.open(path, flags | os.O_NONBLOCK)
    os.set_blocking(number, True)
    return number


def new_file_mode():
    """The permissions of a new file of this process."""
    mask = os.umask(0o022)
    os.umask(mask)
    return 0o666 & ~mask


def _mode_of(path):
    """The permissions of the file to be; `None` where something else than a file has the path."""
    try:
        found = os.stat(path)
    except FileNotFoundError:
        return new_file_mode()
    return stat.S_IMODE(found.st_mode) if stat.S_ISREG(found.st_mode) else None


def _write_whole(number, part):
    """Writes every byte, however few the system takes at a time."""
    part = memoryview(part)
    while part:
        part = part[os.write(number, part) :]


class _PlainFile:
    """A file that is written in place."""

    def __init__(self, number):
        self._number = number

    def write(self, part):
        _write_whole(self._number, part)
