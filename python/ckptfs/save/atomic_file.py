"""A file that has its name only when it is whole.

In: a directory, and bytes. Out: a file under its name, in the place of what was there, once all of it is on
the disk. Until then it has no name where the filesystem can do without one, so that a process that is killed
leaves nothing behind. Else it has a hidden one, and what a process that was killed leaves of that is removed
by the next who saves the same; but not of one that was set aside, for who writes more of them than a process
can have open.
"""

import contextlib
import errno
import os
import stat

from ckptfs.save import temp_name

# How a filesystem says that it has no files without names.
_NAMED_ONLY = (errno.EOPNOTSUPP, errno.EISDIR, errno.EINVAL, errno.ENOENT)


class NewFile:
    """A file to be. `write` it, `finish` it, and it can `take` a name; `drop` lets go of it. With the `name`
    that it will take, what a process that was killed left of that one is removed first."""

    def __init__(self, folder, name=None):
        self._folder, self._name = folder or ".", None
        wanted = name and temp_name.name_for(self._folder, name)
        if wanted:
            temp_name.sweep(wanted)
        try:
            if not os.path.isdir("/proc/self/fd"):
                raise OSError(errno.EOPNOTSUPP, "no way to give a name")
            number = os.open(self._folder, os.O_TMPFILE | os.O_WRONLY | os.O_CLOEXEC, 0o600)
            temp_name.hold(number)
        except OSError as fault:
            if fault.errno not in _NAMED_ONLY:
                raise
            number = self._hide(wanted, temp_name.claimed, temp_name.made)
        self._file = open(number, "wb", buffering=0)

    def write(self, part):
        """Writes all of it."""
        write_whole(self._file, part)

    def finish(self, mode, sync=True):
        """Nothing follows; with `sync` it is on the disk from here on."""
        os.fchmod(self._file.fileno(), mode)
        if sync:
            os.fsync(self._file.fileno())

    def set_aside(self):
        """Closes it, under a hidden name of its own, until it takes its own."""
        if self._name is None:
            self._hide(None, self._linked, self._linked)
        self._file.close()

    def take(self, path):
        """Gives it a name of its directory."""
        if not self._named(path):
            if self._name is None:
                wanted = temp_name.name_for(self._folder, os.path.basename(path))
                self._hide(wanted, self._linked, self._linked)
            os.replace(self._name, path)
            self._name = None
        self._file.close()

    def _named(self, path):
        """Whether it has the name now: in one step, where it has none yet and nothing else has that one."""
        if self._name is None:
            with contextlib.suppress(FileExistsError):
                return self._linked(path)
        return False

    def _hide(self, wanted, claim, make):
        """What `claim` makes of the hidden name that is wanted; or, where somebody who lives has that, `make` of
        a name of its own. It has that name from then on."""
        made, name = None, wanted
        while name and made is None:
            try:
                made = claim(name)
                # Nothing: somebody who lives has it.
                name = name if made is not None else None
            except FileExistsError:
                name = name if temp_name.sweep(name) else None
        while made is None:
            name = temp_name.name_of_its_own(self._folder)
            with contextlib.suppress(FileExistsError):
                made = make(name)
        self._name = name
        return made

    def _linked(self, name):
        number = self._file.fileno()
        # Only a call that is given a directory follows links; of an absolute path it means nothing.
        os.link(f"/proc/self/fd/{number}", name, src_dir_fd=number, follow_symlinks=True)
        return True

    def drop(self):
        """As if it had never been."""
        # While it is held: without that the name might be another's by now.
        if self._name is not None:
            name, self._name = self._name, None
            with contextlib.suppress(FileNotFoundError):
                os.unlink(name)
        if not self._file.closed:
            self._file.close()


@contextlib.contextmanager
def replacing(path, waits=True):
    """A file that takes a path when its block ends. What is there and is no regular file is written as it
    is. Without `waits`, a pipe without a reader is an `OSError` (ENXIO)."""
    mode = _mode_of(path)
    if mode is None:
        with open(path, "wb", buffering=0, opener=None if waits else _open_without_waiting) as file:
            yield _AsItIs(file)
        return
    file = NewFile(*os.path.split(path))
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
    """The names in a directory are on the disk too, where the filesystem knows how."""
    number = os.open(folder or ".", os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        with contextlib.suppress(OSError):
            os.fsync(number)
    finally:
        os.close(number)


def usual_mode():
    """The permissions of a new file of this process."""
    mask = os.umask(0o022)
    os.umask(mask)
    return 0o666 & ~mask


def _mode_of(path):
    """The permissions of the file to be, or nothing if the name is another thing's."""
    try:
        found = os.stat(path)
    except FileNotFoundError:
        return usual_mode()
    return stat.S_IMODE(found.st_mode) if stat.S_ISREG(found.st_mode) else None


def write_whole(file, part):
    """Every byte, however few the system takes at a time."""
    part = memoryview(part)
    while part:
        part = part[file.write(part) :]


class _AsItIs:
    def __init__(self, file):
        self._file = file

    def write(self, part):
        write_whole(self._file, part)
