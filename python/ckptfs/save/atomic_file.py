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


class AtomicFile:
    """A file to be. `write` it, `finish` it, and it can `take` a name; `drop` deletes it.

    With the `name` that it will take, what a killed process left of that one is removed first."""

    def __init__(self, folder, name=None):
        self._folder, self._hidden_path = folder or ".", None
        if name:
            _ckptfs.remove_stale_file(self._folder, name)
        number = _ckptfs.open_unnamed_file(self._folder)
        if number is None:
            number, self._hidden_path = _ckptfs.create_hidden_file(self._folder, name)
        self._file = open(number, "wb", buffering=0)

    def write(self, part):
        """Appends bytes."""
        write_whole(self._file, part)

    def finish(self, mode, sync=True):
        """Ends writing. With `sync` everything is on the disk from then on."""
        os.fchmod(self._file.fileno(), mode)
        if sync:
            os.fsync(self._file.fileno())

    def set_aside(self):
        """Closes it, under a hidden name until it takes its own."""
        if self._hidden_path is None:
            self._hidden_path = _ckptfs.link_hidden_file(self._file.fileno(), self._folder, None)
        self._file.close()

    def take(self, path):
        """Gives it a name in its directory."""
        if not self._link(path):
            if self._hidden_path is None:
                name = os.path.basename(path)
                self._hidden_path = _ckptfs.link_hidden_file(self._file.fileno(), self._folder, name)
            os.replace(self._hidden_path, path)
            self._hidden_path = None
        self._file.close()

    def _link(self, path):
        """Gives it the name in one step. Returns `False` where that is taken, or it has a hidden name."""
        if self._hidden_path is not None:
            return False
        number = self._file.fileno()
        with contextlib.suppress(FileExistsError):
            # Only a call that is given a directory follows links; of an absolute path it means nothing.
            os.link(f"/proc/self/fd/{number}", path, src_dir_fd=number, follow_symlinks=True)
            return True
        return False

    def drop(self):
        """Deletes it, unless it took a name."""
        # Before it is closed: without the lock the hidden name may be another's.
        if self._hidden_path is not None:
            path, self._hidden_path = self._hidden_path, None
            with contextlib.suppress(FileNotFoundError):
                os.unlink(path)
        if not self._file.closed:
            self._file.close()


@contextlib.contextmanager
def replacing(path, waits=True):
    """A file that takes a path when its block ends. What is there and is no regular file is written in place.

    Without `waits`, a pipe without a reader is an `OSError` (ENXIO)."""
    mode = _mode_of(path)
    if mode is None:
        with open(path, "wb", buffering=0, opener=None if waits else _open_without_waiting) as file:
            yield _PlainFile(file)
        return
    file = AtomicFile(*os.path.split(path))
    try:
        yield file
        file.finish(mode)
        file.take(path)
    finally:
        file.drop()
    sync_folder(os.path.dirname(path))


def _open_without_waiting(path, flags):
    number = os.open(path, flags | os.O_NONBLOCK)
    os.set_blocking(number, True)
    return number


def sync_folder(folder):
    """Writes the names in a directory to the disk, where the filesystem can."""
    number = os.open(folder or ".", os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        with contextlib.suppress(OSError):
            os.fsync(number)
    finally:
        os.close(number)


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


def write_whole(file, part):
    """Writes every byte, however few the system takes at a time."""
    part = memoryview(part)
    while part:
        part = part[file.write(part) :]


class _PlainFile:
    """A file that is written in place."""

    def __init__(self, file):
        self._file = file

    def write(self, part):
        write_whole(self._file, part)
