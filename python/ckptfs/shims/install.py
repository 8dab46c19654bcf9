"""`install`: our reads in the place of safetensors', in a program that does not use ckptfs.

`safe_open` and `load_file` of safetensors are ours until `uninstall`, in every module that has or will import them. So
is the step of transformers that takes a tensor to its device. What ours cannot do is left to the original.
"""

import contextlib
import os
import re
import sys
import threading

from ckptfs.shims.calls import (
    import_loader_where_mounted,
    load_file_of,
    materialize_of,
    safe_open_of,
    take_every_file,
)

# The first and the last version whose calls are known.
_KNOWN_VERSIONS = ((0, 4), (0, 9))

_lock = threading.RLock()

# Originals and their shims.
_pairs = []

# Unknown versions that were logged.
_unknown = set()

# What keeps the shims in place: `install`, each block of `installed`, and the environment.
_users = set()

# The user that stays: `ckptfs enable` prepared this environment.
_ENVIRONMENT = "environment"


def install():
    """From now on `safetensors.safe_open` and `safetensors.torch.load_file` read with ckptfs. That holds wherever
    transformers, diffusers, accelerate, peft or any other module has imported them, or will. Installing once more
    changes nothing.

    Tensors that transformers takes to a CUDA device (`device_map="cuda"`) are loaded there directly. Files of a ckptfs
    mount are read from where their bytes lie. Those calls also take directories of shards, `.bin` and `.pt`.

    What ckptfs refuses or fails at is left to the original. `ckptfs.stats()["originals"]` counts that, and the logger
    `ckptfs` says why. It warns the first time for each reason (of at most 64), and logs at level debug from then on. A
    missing file is always logged at level debug. With `CKPTFS_DISABLE=1` or `ckptfs.configure(disable=True)` every call
    is left to the original.

        import ckptfs
        ckptfs.install()
        model = AutoModel.from_pretrained("models/llama")

    Only names in modules are replaced. A program that keeps such a call elsewhere, say in a dictionary, goes on with
    the one it has. `python -m ckptfs run script.py` installs before the script begins.
    """
    _install_for("install")


def uninstall():
    """Undoes `install` everywhere. Open handles stay as they are. In an environment that `ckptfs enable` prepared,
    files of mounts are still read from their sources."""
    with _lock:
        _users.intersection_update({_ENVIRONMENT})
        _follow_users()


@contextlib.contextmanager
def installed():
    """Installs until the last such block of all threads ends. In a program that called `install` this changes
    nothing.

        with ckptfs.installed():
            pipe = DiffusionPipeline.from_pretrained("models/sdxl")
    """
    block = object()
    try:
        _install_for(block)
        yield
    finally:
        with _lock:
            _users.discard(block)
            _follow_users()


def install_for_environment():
    """Installs for files of mounts alone, until the interpreter ends."""
    _install_for(_ENVIRONMENT)


def _install_for(user):
    with _lock:
        _users.add(user)
        _follow_users()
        if _finder not in sys.meta_path:
            sys.meta_path.insert(0, _finder)
        for name in _CALLS:
            if name in sys.modules:
                _replace(sys.modules[name])


def _follow_users():
    """Takes the files that the users want, and removes the shims after the last of them."""
    take_every_file(bool(_users - {_ENVIRONMENT}))
    if not _users:
        _remove_shims()


def _remove_shims():
    if _finder in sys.meta_path:
        sys.meta_path.remove(_finder)
    for original, shim in _pairs:
        _put(shim, original)
    _pairs.clear()


def _replace(module):
    """Puts the shim wherever modules have the original of this one."""
    name, shim_of, is_known = _CALLS[module.__name__]
    original = vars(module).get(name)
    if original is None or any(original is shim for _, shim in _pairs):
        return
    # A module that is loaded again has the same original once more.
    pair = next((pair for pair in _pairs if pair[0] is original), None)
    if pair is None:
        if not is_known(original):
            return
        pair = (original, shim_of(original))
        _pairs.append(pair)
    _put(*pair)


def _has_known_version(_original):
    # It is not imported here: that would wait for a thread which imports it, and which waits for this one.
    version = getattr(sys.modules.get("safetensors"), "__version__", "")
    found = re.match(r"(\d+)\.(\d+)", version)
    if found and _KNOWN_VERSIONS[0] <= tuple(map(int, found.groups())) <= _KNOWN_VERSIONS[1]:
        return True
    if version not in _unknown and _users - {_ENVIRONMENT}:
        from ckptfs.settings import logger

        _unknown.add(version)
        logger().warning("safetensors %s is not known to this ckptfs: its calls are left as they are",
                         version or "of no version")  # fmt: skip
    return False


def _has_known_signature(original):
    # A private function of transformers, which other versions have in another form, or not at all.
    import inspect

    return list(inspect.signature(original).parameters) == ["tensor", "device", "dtype"]


# Reads the dictionary of a module past its class: any attribute of a lazy module, even `__dict__`, loads the module.
_names_of = type(sys).__dict__["__dict__"].__get__


def _put(value, replacement):
    """Replaces a value under every name of every module that has it."""
    for module in list(sys.modules.values()):
        names = _names_of(module) if issubclass(type(module), type(sys)) else None
        if isinstance(names, dict):
            for name in [name for name, held in list(names.items()) if held is value]:
                names[name] = replacement


# By the module that defines a call: its name, its shim, and whether that is made for this original.
_CALLS = {
    "safetensors": ("safe_open", safe_open_of, _has_known_version),
    "safetensors.torch": ("load_file", load_file_of, _has_known_version),
    "transformers.core_model_loading": ("_materialize_copy", materialize_of, _has_known_signature),
}


class _Searches(threading.local):
    """The modules that this thread looks for."""

    def __init__(self):
        self.names = set()


_searches = _Searches()


class _Finder:
    """Installs the shim when such a module is imported."""

    def find_spec(self, name, path=None, target=None):
        # Other finders may call all finders, and so does that of the environment.
        if name not in _CALLS or name in _searches.names:
            return None
        _searches.names.add(name)
        try:
            for finder in list(sys.meta_path):
                find = getattr(finder, "find_spec", None)
                spec = find(name, path, target) if finder is not self and find else None
                if spec is not None:
                    if hasattr(spec.loader, "exec_module"):
                        spec.loader = _Loader(spec.loader)
                    return spec
            return None
        finally:
            _searches.names.discard(name)


class _Loader:
    """A loader of Python, which installs the shim afterwards."""

    def __init__(self, loader):
        self._loader = loader

    def __getattr__(self, name):
        # Resources and sources, for programs that only look for a module.
        return getattr(self._loader, name)

    def create_module(self, spec):
        return self._loader.create_module(spec)

    def exec_module(self, module):
        module.__spec__.loader = module.__loader__ = self._loader
        self._loader.exec_module(module)
        # A shim that cannot be made fails no import.
        with _lock, contextlib.suppress(Exception):
            if _finder in sys.meta_path:
                _replace(module)
        if module.__name__ == "safetensors.torch":
            import_loader_where_mounted()


_finder = _Finder()
find_spec = _finder.find_spec


def _after_fork():
    global _lock
    _lock = threading.RLock()


os.register_at_fork(after_in_child=_after_fork)
