"""What stands in for the calls of safetensors.

In: an original. Out: a call that takes what it takes and does it our way. Whatever ours refuses or fails at,
the original is called for: once, counted and logged; and what it raises is what is raised.
"""

import contextlib
import functools
import threading

from ckptfs import _report
from ckptfs._settings import logger, setting

# Whether this thread is in a call that was left to an original, which calls others.
_here = threading.local()


def _is_wanted():
    return not getattr(_here, "is_left", False) and not setting("disable")


def _left(original, why):
    """Takes note of what the original does in our place."""
    _report.left_to_original()
    logger().warning("left to %s: %s: %s", original, type(why).__name__, why)


@contextlib.contextmanager
def _leaving():
    """What the original calls is not tried by us again."""
    before, _here.is_left = getattr(_here, "is_left", False), True
    try:
        yield
    finally:
        _here.is_left = before


def safe_open_of(original):
    """What stands in for the class."""

    class Kind(type):
        def __instancecheck__(cls, handle):
            return isinstance(handle, (_Handle, original))

    class safe_open(metaclass=Kind):
        def __new__(cls, filename, framework, device="cpu", **how):
            again = functools.partial(original, filename, framework, device=device, **how)
            try:
                if _is_wanted():
                    from ckptfs import safe_open

                    return _Handle(safe_open(filename, framework, device, **how), again)
            except Exception as fault:
                _left("safetensors.safe_open", fault)
            return again()

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
            _left("safetensors.torch.load_file", fault)
        with _leaving():
            return original(filename, device=device, **how)

    return load_file


class _Handle:
    """A handle of ours. A call that fails is made once more, to a handle of the original's."""

    def __init__(self, ours, again):
        self._ours, self._again = ours, again
        self._theirs, self._lock = None, threading.Lock()

    def _original(self):
        with self._lock:
            if self._theirs is None:
                self._theirs = self._again()
            return self._theirs

    def _call(self, name, *args, **how):
        try:
            return getattr(self._ours, name)(*args, **how)
        except Exception as fault:
            if self._again is None:
                raise
            _left(f"safetensors.safe_open().{name}", fault)
        return getattr(self._original(), name)(*args, **how)

    def __getattr__(self, name):
        if name.startswith("__"):
            raise AttributeError(name)
        kind = type(self._ours)
        if not hasattr(kind, name):
            return getattr(self._original(), name)
        return functools.partial(self._call, name)

    def get_slice(self, name):
        return _Slice(self, name, self._call("get_slice", name))

    def close(self):
        # What is closed is closed; the original would open it again.
        self._again = None
        self._ours.close()
        with self._lock:
            theirs, self._theirs = self._theirs, None
        if theirs is not None:
            theirs.__exit__(None, None, None)

    def __enter__(self):
        return self

    def __exit__(self, kind, value, trace):
        self.close()

    def __repr__(self):
        return repr(self._ours)


class _Slice:
    """A slice of ours, or of the original's, likewise."""

    def __init__(self, handle, name, held):
        self._handle, self._name, self._held = handle, name, held

    def get_shape(self):
        return self._held.get_shape()

    def get_dtype(self):
        return self._held.get_dtype()

    def __getitem__(self, index):
        try:
            return self._held[index]
        except Exception as fault:
            if self._handle._again is None:
                raise
            _left("a slice of safetensors.safe_open()", fault)
        return self._handle._original().get_slice(self._name)[index]

    def __repr__(self):
        return repr(self._held)
