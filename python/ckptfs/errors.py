"""What goes wrong, as exceptions: the one place where it is decided which.

`SafetensorError` is ours. Where the program has imported safetensors, what is raised is one of theirs
too, so that a handler written for that package catches it; nobody's package is imported for that.
"""

import errno
import functools
import os
import re
import sys


class SafetensorError(Exception):
    """A checkpoint that cannot be read, or tensors that cannot be had from it."""

    __module__ = "ckptfs"


def error(message, remedy=None, also=None):
    """A refusal in words, with what the user can do about it. `also`: an exception of Python that it is
    one of too, where programs wait for that."""
    return _with_remedy(_made(also, (message,)), remedy)


def _with_remedy(raised, remedy):
    if remedy:
        raised.add_note(f"what to do: {remedy}")
    return raised


def in_words(raised):
    """A refusal and what to do about it, on one line."""
    return "; ".join([str(raised), *getattr(raised, "__notes__", [])])


def of_system(fault, path):
    """What the system refused, told of the path that the user knows; still the same `OSError`."""
    return _made(type(fault), (fault.errno, fault.strerror, path))


def _made(also, told):
    theirs = getattr(sys.modules.get("safetensors"), "SafetensorError", SafetensorError)
    return _kind(theirs, also)(*told)


@functools.cache
def _kind(theirs, also):
    # Theirs may be ours.
    more = tuple(kind for kind in (theirs, also) if kind and not issubclass(SafetensorError, kind))
    if not more:
        return SafetensorError
    inside = {
        "__module__": "ckptfs", "__doc__": SafetensorError.__doc__, "__reduce__": _reduced, "_also": also,
    }  # fmt: skip
    return type("SafetensorError", (SafetensorError, *more), inside)


def _reduced(raised):
    # In another process safetensors may not be there.
    told = raised.args
    if isinstance(raised, OSError):
        told = (raised.errno, raised.strerror, raised.filename)
    return _made, (raised._also, told)


# An option of the command, with what stands for its value.
_OPTION = re.compile(r"(?<![\w-])--([a-z]+(?:-[a-z]+)*)( [A-Z]+\b| <[A-Z]+>|=<[A-Z]+>)?")


def in_python(words):
    """The same words where the command's options have the names of arguments."""

    def named(option):
        return option[1].replace("-", "_") + ("=" if option[2] else "=True")

    return words and _OPTION.sub(named, words)


def from_loader(kind, message, remedy, path, number):
    """The exception for an error of the Rust part, which calls this. `number` is the `errno` of a system call."""
    remedy = in_python(remedy)
    if kind in ("missing", "dangling"):
        # The message is that of safetensors. Given a file name, the exception would have Python's instead.
        missing = FileNotFoundError(f"No such file or directory: {path if kind == 'missing' else message}")
        missing.errno = errno.ENOENT
        return _with_remedy(missing, remedy)
    if kind == "system":
        refused = of_system(OSError(number, os.strerror(number)), os.fspath(path))
        return _with_remedy(refused, remedy)
    if kind == "memory":
        return MemoryError(message)
    if kind == "unknown":
        message = f"File does not contain tensor: {message}"
    return error(message, remedy)


def refuse_target(name, reason, remedy="give a contiguous tensor in memory of the tensor's own type and shape"):
    """The refusal of a tensor to load into."""
    return error(f"{name}: cannot be loaded into what was given: {reason}", remedy)


def closed():
    """What a handle says after it was closed."""
    return error("File is closed")
