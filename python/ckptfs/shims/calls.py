"""What stands in for the calls of safetensors.

In: an original. Out: a call that takes what it takes and does it our way. Whatever ours refuses or fails at,
the original is called for: once, counted and logged; and what it raises is what is raised. Thousands of files
that are refused for one reason are one warning.
"""

import contextlib
import functools
import os
import re
import threading

from ckptfs.errors import closed
from ckptfs.load.report import count_original
from ckptfs.settings import logger, setting

# Reasons that were told, without what differs from file to file; and how many of them, and how much of each,
# are kept.
_told, _MOST_TOLD, _LONGEST = set(), 64, 500


class _Here(threading.local):
    """Of this thread: how many calls it is in that were left to an original, which calls others."""

    left = 0


_here = _Here()


def _is_wanted():
    return not _here.left and not setting("disable")


def _left(original, why, filename):
    """Records what the original does in our place. A missing file is no warning: programs look for files that need
    not exist, and the original raises the same error."""
    count_original()
    kind, is_missing = type(why).__name__, isinstance(why, (FileNotFoundError, NotADirectoryError))
    if not is_missing and _is_news(original, kind, why, filename):
        said = "left to %s: %s: %s; later ones for this reason are logged at level debug"
        logger().warning(said, original, kind, why)
    else:
        logger().debug("left to %s: %s: %s", original, kind, why)


def _is_news(original, kind, why, filename):
    """Whether nobody was told this yet, be it of another file, tensor or number."""
    text = ""
    # What cannot be put into words is one reason too, and keeps nothing from being loaded.
    with contextlib.suppress(Exception):
        # The path that was given may have blanks in it.
        text = str(why).replace(os.fsdecode(filename) or "/", "/")
    reason = original, kind, re.sub(r"\S*[/\d]\S*", "/", text[:_LONGEST])
    if reason in _told or len(_told) >= _MOST_TOLD:
        return False
    _told.add(reason)
    return True


class _Leaving:
    """What the original calls is not tried by us again. A class, not a generator: small files are loaded by the
    thousand."""

    def __enter__(self):
        _here.left += 1

    def __exit__(self, kind, value, trace):
        _here.left -= 1


_leaving = _Leaving()


def safe_open_of(original):
    """What stands in for the class."""

    class Kind(type):
        def __instancecheck__(cls, handle):
            return isinstance(handle, (_Handle, original))

    class safe_open(metaclass=Kind):
        def __new__(cls, filename, framework, device="cpu", **how):
            try:
                if _is_wanted():
                    from ckptfs import safe_open

                    again = functools.partial(original, filename, framework, device=device, **how)
                    return _Handle(safe_open(filename, framework, device, **how), filename, again)
            except Exception as fault:
                _left("safetensors.safe_open", fault, filename)
            return original(filename, framework, device=device, **how)

    safe_open.__doc__, safe_open.__module__ = original.__doc__, original.__module__
    return safe_open


def load_file_of(original):
    """What stands in for the function."""

    @functools.wraps(original)
    def load_file(filename, device="cpu", **how):
        try:
            if _is_wanted():
                from ckptfs.torch import load_file

                return load_file(filename, device, **how)
        except Exception as fault:
            _left("safetensors.torch.load_file", fault, filename)
        else:
            # What the original calls is not wanted either.
            return original(filename, device=device, **how)
        with _leaving:
            return original(filename, device=device, **how)

    return load_file


def materialize_of(original):
    """What stands in for the step of transformers that reads a slice whole and takes it to a device."""

    @functools.wraps(original)
    def _materialize_copy(tensor, device=None, dtype=None):
        if type(tensor) is _Slice and device is not None and _is_wanted():
            made = tensor.taken_to(device)
            if made is not None:
                return made if dtype is None else made.to(dtype)
        return original(tensor, device, dtype)

    return _materialize_copy


class _Handle:
    """A handle of ours. A call that fails is made once more, to a handle of the original's."""

    def __init__(self, ours, filename, again):
        self._ours, self._kind, self._again = ours, type(ours), again
        self._filename = filename
        self._theirs, self._lock = None, threading.Lock()

    def _original(self):
        with self._lock:
            if self._theirs is None:
                self._theirs = self._again()
            return self._theirs

    def _call(self, name, *args, **how):
        ours = self._ours
        if ours is None:
            raise closed()
        try:
            return getattr(ours, name)(*args, **how)
        except Exception as fault:
            again = self._again
            if again is None:
                raise
            _left(f"safetensors.safe_open().{name}", fault, self._filename)
        return getattr(self._original(), name)(*args, **how)

    def __getattr__(self, name):
        if name.startswith("__"):
            raise AttributeError(name)
        if not hasattr(self._kind, name):
            if self._ours is None:
                raise closed()
            return getattr(self._original(), name)
        return functools.partial(self._call, name)

    def __dir__(self):
        return sorted({*super().__dir__(), *dir(self._kind)})

    def get_slice(self, name):
        return _Slice(self, name, self._call("get_slice", name))

    def close(self):
        # What is closed is closed; the original would open it again. Slices can still be read.
        ours, self._again, self._ours = self._ours, None, None
        if ours is not None:
            ours.close()
        with self._lock:
            theirs, self._theirs = self._theirs, None
        if theirs is not None:
            theirs.__exit__(None, None, None)

    def __enter__(self):
        return self

    def __exit__(self, kind, value, trace):
        self.close()

    def __repr__(self):
        return "<ckptfs.safe_open, closed>" if self._ours is None else repr(self._ours)


class _Slice:
    """A slice of ours, or of the original's, likewise."""

    def __init__(self, handle, name, held):
        self._handle, self._name, self._held = handle, name, held

    def get_shape(self):
        return self._held.get_shape()

    def get_dtype(self):
        return self._held.get_dtype()

    def taken_to(self, device):
        """The whole tensor on a device, where it can be loaded there straight; else nothing."""
        take = getattr(self._held, "_load_to", None)
        try:
            return take and take(device)
        except Exception as fault:
            _left("transformers' way to a device", fault, self._handle._filename)
        return None

    def __getitem__(self, index):
        try:
            return self._held[index]
        except Exception as fault:
            again = self._handle._again
            if again is None:
                raise
            _left("a slice of safetensors.safe_open()", fault, self._handle._filename)
        return self._handle._original().get_slice(self._name)[index]

    def __repr__(self):
        return repr(self._held)
