"""Tensors that are computed once, by one process, however many ask for them at the same time."""

import contextlib
import fcntl
import hashlib
import os
import threading

from ckptfs import _ckptfs
from ckptfs.errors import error, of_system, wrong_type
from ckptfs.settings import parse_path

# The longest name of a file on most filesystems.
_MAX_NAME_BYTES = 255

# The locks that this thread holds: it would wait for itself.
_local = threading.local()


def load_or_make(path, load, make, save):
    """What `load()` returns. Where it finds no file, the first caller does `save(make())` before, in a directory that
    is made if it is missing."""
    path = parse_path(path)
    with contextlib.suppress(FileNotFoundError):
        return load()
    if not callable(make):
        raise wrong_type("make", "a function that returns the tensors", make)
    # Before the work of making it.
    _ckptfs.check_output_path(path, any_suffix=False)
    with _locked(path):
        with contextlib.suppress(FileNotFoundError):
            return load()
        save(make())
    return load()


@contextlib.contextmanager
def _locked(path):
    """Holds the lock of a path on this machine. The system releases it if the process dies."""
    lock = _lock_path(path)
    held = _local.__dict__.setdefault("locks", set())
    if lock in held:
        raise error(f"{path}: make() asks for the file that it makes", "use another path in make(), or load it before")
    folder = os.path.dirname(path) or "."
    try:
        os.makedirs(folder, exist_ok=True)
        number = _open_locked(lock)
    except OSError as fault:
        raise of_system(fault, folder) from None
    held.add(lock)
    maker = os.getpid()
    try:
        yield
    finally:
        held.discard(lock)
        # Waiting processes see that it is gone, and make another. Only this process removes it, none that `make`
        # forked.
        if os.getpid() == maker:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(lock)
        os.close(number)


def _lock_path(path):
    folder, name = os.path.split(path)
    if len(os.fsencode(name)) > _MAX_NAME_BYTES - len("..lock"):
        name = hashlib.sha256(os.fsencode(name)).hexdigest()
    return os.path.join(os.path.realpath(folder), f".{name}.lock")


def _open_locked(lock):
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
