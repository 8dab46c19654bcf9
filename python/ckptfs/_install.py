"""Our reads in the place of safetensors', in a program that knows nothing of us.

In: the modules of a program, those that it has and those that it will import. Out: `safe_open` and
`load_file` of safetensors, wherever they were imported to, are ours until `uninstall`. What ours cannot do
the original does: it is called instead, once, counted and logged.
"""

import contextlib
import functools
import importlib.abc
import os
import re
import sys
import threading

from ckptfs import _report
from ckptfs._settings import logger, setting

# The versions whose calls these are.
_KNOWN = ((0, 4), (0, 9))

_lock = threading.RLock()

# Originals and what stands in for them.
_pairs = []

# Whether this thread is in a call that was left to an original, which calls others.
_here = threading.local()


def install():
    """From now on `safetensors.safe_open` and `safetensors.torch.load_file` read with ckptfs, also where
    transformers, diffusers, accelerate, peft or any other module has imported them by now, or will.
    Installing what is installed changes nothing.

    Files of a ckptfs mount are then read from where their bytes lie, and directories of shards, `.bin` and
    `.pt` can be given to those calls as well. Whatever ours refuses or fails at is left to the original:
    `ckptfs.stats()["originals"]` counts that, and the logger `ckptfs` says why. With `CKPTFS_DISABLE=1` or
    `ckptfs.configure(disable=True)` every call is left to it.

        import ckptfs
        ckptfs.install()
        model = AutoModel.from_pretrained("models/llama")

    Only names in modules are replaced: a program that keeps such a call elsewhere (in a dictionary of its
    own, say) goes on with the one it has. `python -m ckptfs run script.py` installs before the script begins.
    """
    with _lock:
        if _finder not in sys.meta_path:
            sys.meta_path.insert(0, _finder)
        for name in _CALLS:
            if name in sys.modules:
                _replace(sys.modules[name])


def uninstall():
    """Takes away what `install` did, everywhere. Handles that are open stay as they are."""
    with _lock:
        if _finder in sys.meta_path:
            sys.meta_path.remove(_finder)
        for original, ours in _pairs:
            _put(ours, original)
        _pairs.clear()


@contextlib.contextmanager
def installed():
    """`install` for a while. Within a program that has it installed this changes nothing.

        with ckptfs.installed():
            pipe = DiffusionPipeline.from_pretrained("models/sdxl")
    """
    with _lock:
        before = _finder in sys.meta_path
        install()
    try:
        yield
    finally:
        if not before:
            uninstall()


def _replace(module):
    """Puts ours where a module of safetensors has the original."""
    # Not imported, which would wait for a thread that imports it and waits for this one.
    version = getattr(sys.modules.get("safetensors"), "__version__", "")
    found = re.match(r"(\d+)\.(\d+)", version)
    if not found or not _KNOWN[0] <= tuple(map(int, found.groups())) <= _KNOWN[1]:
        logger().warning("safetensors %s is not known to this ckptfs: its calls are left as they are",
                         version or "of no version")  # fmt: skip
        return
    name, ours = _CALLS[module.__name__]
    original = vars(module).get(name)
    if original is None or any(original in pair for pair in _pairs):
        return
    pair = (original, ours(original))
    _pairs.append(pair)
    _put(*pair)


def _put(what, instead):
    """Another value under every name of every module that has this one."""
    for module in list(sys.modules.values()):
        # By their dictionaries, because some modules import whatever they are asked for.
        names = getattr(module, "__dict__", None)
        if isinstance(names, dict):
            for name in [name for name, value in list(names.items()) if value is what]:
                names[name] = instead


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


def _safe_open(original):
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


def _load_file(original):
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


# By the modules of safetensors that define them; the others import them from there.
_CALLS = {"safetensors": ("safe_open", _safe_open), "safetensors.torch": ("load_file", _load_file)}


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


class _Finder(importlib.abc.MetaPathFinder):
    """Sees to it that ours is there when a module of safetensors is first imported."""

    def find_spec(self, name, path=None, target=None):
        if name not in _CALLS:
            return None
        for finder in sys.meta_path:
            find = getattr(finder, "find_spec", None)
            spec = find(name, path, target) if finder is not self and find else None
            if spec is not None:
                if spec.loader is not None:
                    spec.loader = _Loader(spec.loader)
                return spec
        return None


class _Loader(importlib.abc.Loader):
    """A loader of Python's, and then ours."""

    def __init__(self, loader):
        self._loader = loader

    def create_module(self, spec):
        return self._loader.create_module(spec)

    def exec_module(self, module):
        module.__spec__.loader = module.__loader__ = self._loader
        self._loader.exec_module(module)
        with _lock:
            if _finder in sys.meta_path:
                _replace(module)


_finder = _Finder()


def _after_fork():
    global _lock
    _lock = threading.RLock()


os.register_at_fork(after_in_child=_after_fork)
