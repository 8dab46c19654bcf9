"""Tensors that are computed once: by one process, however many want them at the same time.

In: a path, and what computes. Out: what the file holds, which is there whole or not at all.
"""

import contextlib
import fcntl
import hashlib
import os
import threading

from ckptfs.errors import error, of_system

# No name of a file may have more bytes, in most filesystems.
_LONGEST = 255

# The locks that this thread has: it would wait for itself.
_here = threading.local()


def load_or_make(path, load, make, save):
    """What `load()` gives; where that finds no file, after `save(make())` by whoever came first."""
    with contextlib.suppress(FileNotFoundError):
        return load()
    with _alone(path):
        with contextlib.suppress(FileNotFoundError):
            return load()
        save(make())
    return load()


@contextlib.contextmanager
def _alone(path):
    """Nobody else has the same path here meanwhile, on this machine. Who dies lets go of it."""
    lock = _lock_of(os.fsdecode(path))
    mine = _here.__dict__.setdefault("locks", set())
    if lock in mine:
        raise error(f"{os.fsdecode(path)}: what makes it asks for it", "give it another path, or load it before")
    try:
        number = _locked(lock)
    except OSError as fault:
        raise of_system(fault, os.path.dirname(lock)) from None
    mine.add(lock)
    maker = os.getpid()
    try:
        yield
    finally:
        mine.discard(lock)
        # Those who wait for it see that it is gone, and make another. What `make` forked has no say in that.
        if os.getpid() == maker:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(lock)
        os.close(number)


def _lock_of(path):
    folder, name = os.path.split(path)
    if len(os.fsencode(name)) > _LONGEST - len("..lock"):
        name = hashlib.sha256(os.fsencode(name)).hexdigest()
    return os.path.join(os.path.realpath(folder), f".{name}.lock")


def _locked(lock):
    while True:
        number = os.open(lock, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(number, fcntl.LOCK_EX)
            with contextlib.suppress(FileNotFoundError):
                if os.path.samestat(os.stat(lock), os.fstat(number)):
                    return number
        except BaseException:
            os.close(number)
            raise
        os.close(number)
