"""The hidden names that a file has until it takes its own, and what processes that were killed left there.

In: a directory, and the name that a file is to have. Out: the hidden name that goes with it, one that nobody
else has, and the removal of what the dead left. docs/semantics.md has the rule, which `ckptfs export` keeps
too: who has a file under the name that goes with another holds a lock on it, from before others can see it
there until it is gone from there.
"""

import contextlib
import fcntl
import os
import secrets
import stat

# Of FNV-1a, for 64 bits.
_BASIS, _PRIME, _BITS = 0xCBF29CE484222325, 0x100000001B3, (1 << 64) - 1


def name_for(folder, name):
    """The hidden name that goes with a name: the same for whoever saves it, and short however long it is."""
    value = _BASIS
    for byte in os.fsencode(name):
        value = (value ^ byte) * _PRIME & _BITS
    return os.path.join(folder, f".ckptfs-{value:016x}.part")


def name_of_its_own(folder):
    """A hidden name that nobody else has. Nobody knows of whom it is either, so that it stays if its process
    is killed."""
    return os.path.join(folder, f".ckptfs-{secrets.token_hex(12)}.part")


def hold(number):
    """Says with a lock that a file has a living owner. Gives whether nobody else says so."""
    try:
        fcntl.flock(number, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:
        # Where there are no locks nobody has one, and what is there is never taken for a dead one's.
        pass
    return True


def made(path):
    """Makes a file of this hidden name."""
    return os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)


def claimed(path):
    """The same, of a name that others look for: a file which is held. Nothing, if somebody takes it for a dead
    one's just then: it is theirs to remove."""
    number = made(path)
    # Whoever removes it has the lock first, and keeps it until it is gone.
    if hold(number) and _is(path, number):
        return number
    os.close(number)
    return None


def sweep(path):
    """Removes what has this hidden name, if its owner is dead. Gives whether the name is free."""
    try:
        # What is no file is not even opened.
        if not stat.S_ISREG(os.lstat(path).st_mode):
            return False
        number = _opened(path)
        try:
            # Two who found the same file: the second has the lock when the name is another file's, or nobody's.
            fcntl.flock(number, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if _is(path, number):
                os.unlink(path)
        finally:
            os.close(number)
    except FileNotFoundError:
        return True
    except OSError:
        return False
    return True


def _opened(path):
    how = os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
    # A network's filesystem may give the lock only to who may write.
    with contextlib.suppress(PermissionError):
        return os.open(path, os.O_RDWR | how)
    return os.open(path, os.O_RDONLY | how)


def _is(path, number):
    """Whether it is a regular file, and still that of this name."""
    held = os.fstat(number)
    with contextlib.suppress(FileNotFoundError):
        return stat.S_ISREG(held.st_mode) and os.path.samestat(os.lstat(path), held)
    return False
