"""Tensors that are computed once: by one process, however many want them at the same time.

In: a path, and what computes. Out: what the file holds, which is there whole or not at all.
"""

import contextlib
import fcntl
import os


def loaded_or_made(path, load, make, save):
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
    folder, name = os.path.split(os.fsdecode(path))
    lock = os.path.join(folder, f".{name}.lock")
    number = _locked(lock)
    try:
        yield
    finally:
        # Those who wait for it see that it is gone, and make another.
        with contextlib.suppress(FileNotFoundError):
            os.unlink(lock)
        os.close(number)


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
