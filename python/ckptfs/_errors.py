"""What goes wrong, as exceptions: the one place where it is decided which.

`SafetensorError` is ours. Where the program has imported safetensors, what is raised is one of theirs
too, so that a handler written for that package catches it; nobody's package is imported for that.
"""

import functools
import sys


class SafetensorError(Exception):
    """A checkpoint that cannot be read, or tensors that cannot be had from it."""

    __module__ = "ckptfs"


def error(message, remedy=None):
    """A refusal in words, with what the user can do about it."""
    theirs = getattr(sys.modules.get("safetensors"), "SafetensorError", SafetensorError)
    raised = (SafetensorError if issubclass(theirs, SafetensorError) else _both(theirs))(message)
    if remedy:
        raised.add_note(f"what to do: {remedy}")
    return raised


@functools.cache
def _both(theirs):
    inside = {"__module__": "ckptfs", "__doc__": SafetensorError.__doc__, "__reduce__": _reduced}
    return type("SafetensorError", (SafetensorError, theirs), inside)


def _reduced(raised):
    # In another process safetensors may not be there.
    return error, raised.args


def of(kind, message, remedy, path):
    """The exception for what the Rust part tells."""
    if kind == "missing":
        return FileNotFoundError(f"No such file or directory: {path}")
    if kind == "memory":
        return MemoryError(message)
    if kind == "unknown":
        message = f"File does not contain tensor: {message}"
    return error(message, remedy)


def closed():
    """What a handle says after it was closed."""
    return error("File is closed")
