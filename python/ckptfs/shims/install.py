"""Our reads in the place of safetensors', in a program that knows nothing of us.

In: the modules of a program, those that it has and those that it will import. Out: `safe_open` and
`load_file` of safetensors, wherever they were imported to, are ours until `uninstall`, and so is the step of
transformers that takes a tensor to its device. What ours cannot do the original does: it is called instead,
once, counted and logged.
"""

import contextlib
import importlib.abc
import inspect
import os
import re
import sys
import threading

from ckptfs.settings import logger
from ckptfs.shims.calls import load_file_of, materialize_of, safe_open_of

# The versions whose calls these are.
_KNOWN = ((0, 4), (0, 9))

_lock = threading.RLock()

# Originals and what stands in for them.
_pairs = []

# Versions of which that was said.
_unknown = set()

# Who wants it so: `install`, and each block of `installed`.
_wanted = set()


def install():
    """From now on `safetensors.safe_open` and `safetensors.torch.load_file` read with ckptfs, also where
    transformers, diffusers, accelerate, peft or any other module has imported them by now, or will.
    Installing what is installed changes nothing.

    Tensors that transformers takes to a CUDA device (`device_map="cuda"`) are read there straight.
    Files of a ckptfs mount are then read from where their bytes lie, and directories of shards, `.bin` and
    `.pt` can be given to those calls as well. Whatever ours refuses or fails at is left to the original:
    `ckptfs.stats()["originals"]` counts that, and the logger `ckptfs` says why: with a warning the first
    time for each reason (of at most 64 reasons), at level debug from then on. A missing file is always logged at
    level debug. With `CKPTFS_DISABLE=1` or
    `ckptfs.configure(disable=True)` every call is left to it.

        import ckptfs
        ckptfs.install()
        model = AutoModel.from_pretrained("models/llama")

    Only names in modules are replaced: a program that keeps such a call elsewhere (in a dictionary of its
    own, say) goes on with the one it has. `python -m ckptfs run script.py` installs before the script begins.
    """
    _install_for("install")


def uninstall():
    """Takes away what `install` did, everywhere. Handles that are open stay as they are."""
    with _lock:
        _wanted.clear()
        _take_away()


@contextlib.contextmanager
def installed():
    """`install` for a while: until the last such block of all threads ends. Within a program that has it
    installed this changes nothing.

        with ckptfs.installed():
            pipe = DiffusionPipeline.from_pretrained("models/sdxl")
    """
    block = object()
    try:
        _install_for(block)
        yield
    finally:
        with _lock:
            _wanted.discard(block)
            if not _wanted:
                _take_away()


def _install_for(who):
    with _lock:
        _wanted.add(who)
        if _finder not in sys.meta_path:
            sys.meta_path.insert(0, _finder)
        for name in _CALLS:
            if name in sys.modules:
                _replace(sys.modules[name])


def _take_away():
    if _finder in sys.meta_path:
        sys.meta_path.remove(_finder)
    for original, ours in _pairs:
        _put(ours, original)
    _pairs.clear()


def _replace(module):
    """Puts ours where a module has the original."""
    name, ours, is_known = _CALLS[module.__name__]
    original = vars(module).get(name)
    if original is None or not is_known(original) or any(original in pair for pair in _pairs):
        return
    pair = (original, ours(original))
    _pairs.append(pair)
    _put(*pair)


def _is_of_known_version(_original):
    # Not imported, which would wait for a thread that imports it and waits for this one.
    version = getattr(sys.modules.get("safetensors"), "__version__", "")
    found = re.match(r"(\d+)\.(\d+)", version)
    if found and _KNOWN[0] <= tuple(map(int, found.groups())) <= _KNOWN[1]:
        return True
    if version not in _unknown:
        _unknown.add(version)
        logger().warning("safetensors %s is not known to this ckptfs: its calls are left as they are",
                         version or "of no version")  # fmt: skip
    return False


def _takes_a_slice_to_a_device(original):
    # It is transformers' own affair, which other versions have otherwise, or not at all.
    return list(inspect.signature(original).parameters) == ["tensor", "device", "dtype"]


def _put(what, instead):
    """Another value under every name of every module that has this one."""
    for module in list(sys.modules.values()):
        # By their dictionaries, because some modules import whatever they are asked for.
        names = getattr(module, "__dict__", None)
        if isinstance(names, dict):
            for name in [name for name, value in list(names.items()) if value is what]:
                names[name] = instead


# By the modules that define them, from which others import them.
_CALLS = {
    "safetensors": ("safe_open", safe_open_of, _is_of_known_version),
    "safetensors.torch": ("load_file", load_file_of, _is_of_known_version),
    "transformers.core_model_loading": ("_materialize_copy", materialize_of, _takes_a_slice_to_a_device),
}


class _Finder(importlib.abc.MetaPathFinder):
    """Sees to it that ours is there when such a module is first imported."""

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
