"""Shims for the calls of safetensors and transformers: an original in, a call that reads with ckptfs out.

Whatever ours refuses or fails at is left to the original, which is called once, counted and logged. What it raises is
what is raised. Thousands of files that are refused for one reason are one warning.

Where only `ckptfs enable` put them in place, they take only files of mounts. Where there is no mount, nothing else of
the package is imported.
"""

import contextlib
import functools
import os
import re
import threading

# The attribute of every file of a mount.
_MOUNT_ATTRIBUTE = "user.ckptfs.source"

# The limit that safetensors has.
_MAX_HEADER_BYTES = 100_000_000

# Reasons that were logged, without what differs from file to file; how many are kept, and how much of each.
_logged, _MAX_LOGGED, _MAX_REASON_LENGTH = set(), 64, 500


class _ThreadState(threading.local):
    """The number of calls that this thread is in and that were left to an original."""

    depth = 0


_state = _ThreadState()

_takes_every_file = True


def take_every_file(takes):
    """Takes every file from now on, or those of mounts alone."""
    global _takes_every_file
    _takes_every_file = takes


@functools.cache
def _package():
    """The parts of the package that decide, count and log."""
    from ckptfs import _ckptfs, settings
    from ckptfs.load import report

    return _ckptfs, settings, report


def import_loader_where_mounted():
    """Imports the loader for torch if there is a mount, so that the first load does not wait for it."""
    with contextlib.suppress(Exception):
        with open("/proc/self/mountinfo", "rb") as table:
            is_mounted = b" - fuse.ckptfs " in table.read()
        if is_mounted and not _takes_every_file and _is_active():
            from ckptfs.load import torch  # noqa: F401


def _is_active():
    # What an original calls is left to originals, too.
    return not _state.depth and not _package()[1].setting("disable")


def _takes(filename):
    """Whether a call with this file is to be ours."""
    if _takes_every_file:
        return _is_active()
    return not _state.depth and _may_be_of_a_mount(filename) and _is_active() and _package()[0].is_on_mount(filename)


def _may_be_of_a_mount(filename):
    """Whether a file has the attribute of a mount, and is in safetensors format. For a file on a disk this is one system
    call, which asks no other program."""
    try:
        attribute = os.getxattr(filename, _MOUNT_ATTRIBUTE)
        # No other text in the attribute can have these quotes.
        return b'"virtual_file":true' in attribute or _is_safetensors(filename)
    except (OSError, TypeError, ValueError):
        return False


def _is_safetensors(filename):
    """Whether a file begins as the original requires. A pickle or a directory that a mount shows as it is does not:
    programs rely on the error."""
    # A path, and no descriptor, which this would close.
    with open(os.fspath(filename), "rb", buffering=0) as file:
        start = file.read(9)
    return start[8:] == b"{" and int.from_bytes(start[:8], "little") <= _MAX_HEADER_BYTES


def _failures():
    """The exceptions that leave a call to the original. A panic of the Rust part is no `Exception`."""
    with contextlib.suppress(Exception):
        return Exception, _package()[0].PanicException
    return Exception


def _record_fallback(original, why, filename):
    """Counts and logs a call that is left to the original."""
    # Where the package is broken or half removed, the original is called all the same.
    with contextlib.suppress(Exception):
        _, settings, report = _package()
        report.count_original()
        _log_fallback(settings.logger(), original, why, filename)


def _log_fallback(logger, original, why, filename):
    """Logs why a call is left to the original. A missing file is no warning: programs look for files that need not
    exist, and the original raises the same error."""
    kind, is_missing = type(why).__name__, isinstance(why, (FileNotFoundError, NotADirectoryError))
    if not is_missing and _is_new(original, kind, why, filename):
        message = "left to %s: %s: %s; later ones for this reason are logged at level debug"
        logger.warning(message, original, kind, why)
    else:
        logger.debug("left to %s: %s: %s", original, kind, why)


def _is_new(original, kind, why, filename):
    """Whether the reason was not logged yet, for whatever file, tensor or number."""
    text = ""
    # An exception without text is a reason, too, and must fail no load.
    with contextlib.suppress(Exception):
        # The path may have blanks in it.
        text = str(why).replace(os.fsdecode(filename) or "/", "/")
    reason = original, kind, re.sub(r"\S*[/\d]\S*", "/", text[:_MAX_REASON_LENGTH])
    if reason in _logged or len(_logged) >= _MAX_LOGGED:
        return False
    _logged.add(reason)
    return True


class _OriginalCall:
    """A block in which an original runs. A class, not a generator: small files are loaded by the thousand."""

    def __enter__(self):
        _state.depth += 1

    def __exit__(self, kind, value, trace):
        _state.depth -= 1


_in_original = _OriginalCall()


def safe_open_of(original):
    """The shim of the class `safetensors.safe_open`."""

    class Kind(type):
        def __instancecheck__(cls, handle):
            return isinstance(handle, (_Handle, original))

    class safe_open(metaclass=Kind):
        def __new__(cls, filename, framework, device="cpu", **how):
            try:
                if _takes(filename):
                    from ckptfs import safe_open

                    open_original = functools.partial(original, filename, framework, device=device, **how)
                    return _Handle(safe_open(filename, framework, device, **how), filename, open_original)
            except _failures() as fault:
                _record_fallback("safetensors.safe_open", fault, filename)
            return original(filename, framework, device=device, **how)

    safe_open.__doc__, safe_open.__module__ = original.__doc__, original.__module__
    return safe_open


def load_file_of(original):
    """The shim of the function `safetensors.torch.load_file`."""

    @functools.wraps(original)
    def load_file(filename, device="cpu", **how):
        try:
            if _takes(filename):
                # `ckptfs.torch` also imports saving and distributed loads, which takes three times as long.
                from ckptfs.load.torch import load_file

                return load_file(filename, device, **how)
        except _failures() as fault:
            _record_fallback("safetensors.torch.load_file", fault, filename)
        with _in_original:
            return original(filename, device=device, **how)

    return load_file


def materialize_of(original):
    """The shim of transformers' step that reads a slice whole and takes it to a device."""

    @functools.wraps(original)
    def _materialize_copy(tensor, device=None, dtype=None):
        if type(tensor) is _Slice and device is not None and _is_active():
            loaded = tensor.load_to(device)
            if loaded is not None:
                return loaded if dtype is None else loaded.to(dtype)
        return original(tensor, device, dtype)

    return _materialize_copy


def _closed():
    from ckptfs.errors import closed

    return closed()


class _Handle:
    """A handle of ours. A call that fails is repeated on a handle of the original, which `open_original` opens."""

    def __init__(self, ours, filename, open_original):
        self._ours, self._kind, self._open_original = ours, type(ours), open_original
        self._filename = filename
        self._theirs, self._lock = None, threading.Lock()

    def _original(self):
        with self._lock:
            if self._theirs is None:
                self._theirs = self._open_original()
            return self._theirs

    def _call(self, name, *args, **how):
        ours = self._ours
        if ours is None:
            raise _closed()
        try:
            return getattr(ours, name)(*args, **how)
        except _failures() as fault:
            open_original = self._open_original
            if open_original is None:
                raise
            _record_fallback(f"safetensors.safe_open().{name}", fault, self._filename)
        return getattr(self._original(), name)(*args, **how)

    def __getattr__(self, name):
        if name.startswith("__"):
            raise AttributeError(name)
        if not hasattr(self._kind, name):
            if self._ours is None:
                raise _closed()
            return getattr(self._original(), name)
        return functools.partial(self._call, name)

    def __dir__(self):
        return sorted({*super().__dir__(), *dir(self._kind)})

    def get_slice(self, name):
        return _Slice(self, name, self._call("get_slice", name))

    def close(self):
        # No original is opened after this. Slices can still be read.
        ours, self._open_original, self._ours = self._ours, None, None
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
    """A slice of ours or of the original. An index that fails is repeated on the original."""

    def __init__(self, handle, name, piece):
        self._handle, self._name, self._slice = handle, name, piece

    def get_shape(self):
        return self._slice.get_shape()

    def get_dtype(self):
        return self._slice.get_dtype()

    def load_to(self, device):
        """The whole tensor on a device, where the Rust part loads there itself; else `None`."""
        load_to = getattr(self._slice, "_load_to", None)
        try:
            return load_to and load_to(device)
        except _failures() as fault:
            _record_fallback("transformers' way to a device", fault, self._handle._filename)
        return None

    def __getitem__(self, index):
        try:
            return self._slice[index]
        except _failures() as fault:
            open_original = self._handle._open_original
            if open_original is None:
                raise
            _record_fallback("a slice of safetensors.safe_open()", fault, self._handle._filename)
        return self._handle._original().get_slice(self._name)[index]

    def __repr__(self):
        return repr(self._slice)
