"""A handle on an open checkpoint, for any thread and for forked children."""

import os
import threading
import weakref

from ckptfs import _ckptfs
from ckptfs.errors import error
from ckptfs.settings import parse_path

_handles = weakref.WeakSet()


class Handle:
    """`with handle.use() as checkpoint:`, from any thread. The files stay open while the handle is referenced."""

    def __init__(self, path, options):
        # It may be opened again after the current directory was changed. `abspath` would follow `..` by name, and
        # what comes after `link/..` lies elsewhere.
        path = parse_path(path)
        self.path, self.options = path, options
        if not os.path.isabs(self.path) and not _ckptfs.is_source_url(self.path):
            self.path = os.path.join(os.getcwd(), self.path)
        self._checkpoint = _ckptfs.Checkpoint(path, options)
        self._lock, self._users, self._is_stale = threading.Lock(), 0, False
        _handles.add(self)

    def use(self):
        """The open checkpoint, for a `with` statement."""
        return _Use(self)

    def _reopen(self):
        """Opens the same checkpoint once more; refuses another."""
        checkpoint = _ckptfs.Checkpoint(self.path, self.options)
        if checkpoint.identity != self._checkpoint.identity:
            raise error(f"{self.path}: changed on disk since it was opened", "open it again")
        return checkpoint

    def _after_fork(self):
        # A lock that another thread held when this process began is held for ever here.
        self._lock = threading.Lock()
        self._is_stale, self._users = self._is_stale or self._users > 0, 0


class _Use:
    """A class, not a generator: small files are opened by the thousand."""

    def __init__(self, handle):
        self._handle = handle

    def __enter__(self):
        handle = self._handle
        with handle._lock:
            if handle._is_stale:
                handle._checkpoint, handle._is_stale = handle._reopen(), False
            handle._users += 1
            return handle._checkpoint

    def __exit__(self, kind, value, trace):
        with self._handle._lock:
            self._handle._users -= 1


def _after_fork():
    for handle in list(_handles):
        handle._after_fork()


os.register_at_fork(after_in_child=_after_fork)
