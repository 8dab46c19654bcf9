"""Open checkpoints: for one load, or as long as they are referenced, in this process and its forked children.

In: a path and how to read it. Out: the `Opened` of the Rust part.
"""

import itertools
import os
import threading
import weakref

from ckptfs import _ckptfs
from ckptfs._errors import error, path_of

_all = weakref.WeakSet()


def options(root=None, allow_partial=False, follow_symlinks=False, num_threads=None, memory=None,
            leave_cache=False):
    """How a checkpoint is opened and read, as the Rust part takes it."""
    return {
        "root": root, "allow_partial": allow_partial, "follow_symlinks": follow_symlinks,
        "threads": num_threads, "memory": memory, "leave_cache": leave_cache,
    }  # fmt: skip


# So many are opened together, where each is one file: a set may have as many as a process can open.
_TOGETHER = 64
_ONE_FILE = (".safetensors", ".sft", ".pt", ".pth", ".bin", ".ckpt")


def open_one(filename, how):
    """What is at a path, for a load that begins now; of `x.safetensors` that is not there, `x.pt`, and that it
    is that."""
    filename = path_of(filename)
    try:
        found = _ckptfs.Opened(filename, how)
    except FileNotFoundError as fault:
        found = fault
    return _instead(filename, found, how)


def open_each(filenames, how, most):
    """The same of many, one after the other. No more than `most` files are opened ahead."""
    filenames = map(path_of, filenames)
    for is_file, some in itertools.groupby(filenames, lambda name: name.endswith(_ONE_FILE)):
        some = list(some)
        # Each is open with its directory.
        count = max(1, min(_TOGETHER, most // 2)) if is_file else 1
        for start in range(0, len(some), count):
            batch = some[start : start + count]
            for filename, found in zip(batch, _ckptfs.open_each(batch, how), strict=True):
                yield _instead(filename, found, how)


def _instead(filename, found, how):
    missing = isinstance(found, FileNotFoundError)
    if isinstance(found, Exception) and not missing:
        raise found
    # A name that is not there is found as what a mount would show, where that is no other's.
    if not missing and found.format == "safetensors":
        return found, None
    stem, extension = os.path.splitext(filename)
    instead = f"{stem}.pt"
    if extension == ".safetensors" and not os.path.lexists(filename) and os.path.isfile(instead):
        why = f"{filename} is not there: {instead} was loaded"
        return _ckptfs.Opened(instead, how) if missing else found, why
    if missing:
        raise found
    return found, None


class Source:
    """`with source.use() as opened:`, from any thread. Its files stay open while it is referenced."""

    def __init__(self, path, how):
        # It may be opened again after the directory was changed. Not by `abspath`, which follows words:
        # what comes after `link/..` lies elsewhere.
        path = path_of(path)
        self.path, self.how = path, how
        if not os.path.isabs(self.path):
            self.path = os.path.join(os.getcwd(), self.path)
        self._opened = _ckptfs.Opened(path, how)
        self._lock, self._users, self._broken = threading.Lock(), 0, False
        _all.add(self)

    def use(self):
        """The open checkpoint, for a `with` statement."""
        return _Use(self)

    def _again(self):
        """The same checkpoint opened once more, if it is still the same."""
        opened = _ckptfs.Opened(self.path, self.how)
        if opened.identity != self._opened.identity:
            raise error(f"{self.path}: changed on disk since it was opened", "open it again")
        return opened

    def _after_fork(self):
        # A lock that another thread held when this process began is held for ever here.
        self._lock = threading.Lock()
        self._broken, self._users = self._broken or self._users > 0, 0


class _Use:
    """A class, not a generator: files that are small are opened by the thousand."""

    def __init__(self, source):
        self._source = source

    def __enter__(self):
        source = self._source
        with source._lock:
            if source._broken:
                source._opened, source._broken = source._again(), False
            source._users += 1
            return source._opened

    def __exit__(self, kind, value, trace):
        with self._source._lock:
            self._source._users -= 1


def _after_fork():
    for source in list(_all):
        source._after_fork()


os.register_at_fork(after_in_child=_after_fork)
