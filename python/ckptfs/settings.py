"""Options: the arguments of a call, above what `configure` set, above the environment.

In: values as people write them. Out: the same as loads take them.
"""

import functools
import os
from typing import Any, NamedTuple

from ckptfs import _ckptfs
from ckptfs.errors import SafetensorError, error, in_words, missing_file, wrong_type

MMAP, PREAD = "mmap", "pread"

_LEVELS = ("debug", "info", "warning", "error")

# The largest values that the Rust part takes; larger ones mean the same.
_MAX_THREADS, _MAX_MEMORY_BYTES = 4096, (1 << 63) - 1

# Pinned memory that loads to devices may use by default.
_PINNED_BYTES = 512 << 20

# The least memory that reading needs.
_MIN_READING_BYTES = 4 << 20

_configured = {}


class LoadOptions(NamedTuple):
    """The options of one load, checked and complete.

    No dataclass: importing those takes longer than the whole package."""

    # `Torch`, `Numpy` or `DLPack`: what makes tensors of memory.
    framework: Any = None
    backend: str = PREAD
    # `None` is the host; otherwise a device of the framework, or a `DeviceMap`.
    device: Any = None
    # What floating-point tensors are cast to; `None` leaves them as they are stored.
    dtype: Any = None
    names: Any = None
    into: Any = None
    root: str | None = None
    allow_partial: bool = False
    follow_symlinks: bool = False
    # The number of ranks of a training run, for folders that do not record it.
    ranks: int | None = None
    # The base of the first delta. `None` is the folder of version 0.
    delta_base: str | None = None
    # A recipe: whether it is a path, and the path or its JSON.
    views: tuple | None = None
    threads: int | None = None
    # Bytes that a load may hold beside its result.
    memory: int | None = None
    leave_cache: bool = False
    # Whether tensors of stores are kept in the cache on disk, and read from it.
    cache: bool = True
    progress: bool = False
    report: Any = None

    @classmethod
    def resolve(cls, framework=None, *, backend=None, device=None, dtype=None, num_threads=None, memory=None, **others):
        """Checks the arguments of a call, and takes those that are missing from the settings."""
        for name, value in others.items():
            others[name] = _CHECKS[name](value, name)
        threads, memory = limits(num_threads, memory)
        if framework is not None:
            backend = resolve_backend(backend, framework.BACKEND)
            device = framework.parse_device(device)
            dtype = None if dtype is None else framework.parse_dtype(dtype)
        return cls(framework=framework, backend=backend, device=device, dtype=dtype, threads=threads,
                   memory=memory, **others)  # fmt: skip

    @property
    def reading_memory(self):
        """The part of the memory that reading may hold; the Rust part takes it with other options of these."""
        return self.memory if self.dtype is None else reading_memory(self.memory)


def check_switch(value, name):
    """The value of an option that is on or off."""
    if not isinstance(value, bool):
        raise wrong_type(name, "True or False", value)
    return value


def check_text(value, name):
    """The value of an option that is text, or `None`."""
    if value is not None and not isinstance(value, str):
        raise wrong_type(name, "text or None", value)
    return value


def _check_callback(value, name):
    if value is not None and not callable(value):
        raise wrong_type(name, "a function or None", value)
    return value


def parse_names(value, name="names"):
    """The names to load: `None`, one text or a list of texts, even where they can be iterated only once."""
    if value is None or isinstance(value, str):
        return value
    names = list(value) if hasattr(value, "__iter__") else [None]
    if not all(isinstance(one, str) for one in names):
        raise wrong_type(name, "the name of a tensor, a glob, or a list of names", value)
    return names


def _check_targets(value, name):
    if value is not None and (not hasattr(value, "items") or not all(isinstance(one, str) for one in value)):
        raise wrong_type(name, "a dictionary of tensors by their names", value)
    return value


def _check_ranks(value, name):
    if value is not None and (isinstance(value, bool) or not isinstance(value, int) or not 0 < value < 1 << 32):
        raise wrong_type(name, "a number of ranks or None", value)
    return value


def _check_path(value, name):
    return None if value is None else parse_path(value)


def _check_views(value, name):
    if value is None:
        return None
    if isinstance(value, dict):
        return False, views_json(value, name)
    if not isinstance(value, (str, os.PathLike)):
        raise wrong_type(name, "the path of a recipe, or a dictionary", value)
    return True, parse_path(value)


def views_json(value, name="views"):
    """A recipe in JSON. Rules may have types of torch."""
    import json

    def text(one):
        if type(one).__module__ == "torch":
            return str(one).removeprefix("torch.")
        raise wrong_type(name, "a dictionary of text, numbers and lists", one)

    return json.dumps(value, default=text)


_CHECKS = {"allow_partial": check_switch, "follow_symlinks": check_switch, "leave_cache": check_switch,
           "cache": check_switch, "progress": check_switch, "root": check_text, "report": _check_callback, "names": parse_names,
           "into": _check_targets, "ranks": _check_ranks, "delta_base": _check_path, "views": _check_views}  # fmt: skip


def reading_memory(memory):
    """The part of a load's memory that reading may hold where the rest is for casting."""
    return None if memory is None else max(memory // 2, min(memory, _MIN_READING_BYTES))


def parse_path(path):
    """A path from a caller as text; refuses a NUL in it, and an empty one."""
    path = os.fsdecode(path)
    if not path:
        raise missing_file(path, "No such file or directory: the path is empty")
    if "\0" in path:
        raise error(f"{path!r}: no path can have a NUL in it", "leave it out", ValueError)
    return path


def configure(*, backend=..., threads=..., memory=..., pinned=..., gpudirect=..., log=...,
              disable=..., allow_http=..., anonymous=..., instance_metadata=..., stall_timeout=...,
              outage_timeout=..., poll_interval=..., connections=..., cache_dir=..., cache_size=...,
              cache_min_free=..., no_cache=..., offline=...):
    """Sets options for all later loads; an argument of a call takes precedence. What is not given stays as it is;
    `None` leaves it to the environment again.

    | `configure(...)` | environment        | argument of a call | by default                                    |
    |------------------|--------------------|--------------------|-----------------------------------------------|
    | `backend`        | `CKPTFS_BACKEND`   | `backend=`         | "mmap"; for numpy "pread"                     |
    | `threads`        | `CKPTFS_THREADS`   | `num_threads=`     | 16                                            |
    | `memory`         | `CKPTFS_MEMORY`    | `memory=`          | no bound; bytes, or text like "64M"           |
    | `pinned`         | `CKPTFS_PINNED`    |                    | 512M, of which 64M stay for the next load     |
    | `gpudirect`      | `CKPTFS_GPUDIRECT` |                    | where the kernel's part, nvidia-fs, is loaded |
    | `log`            | `CKPTFS_LOG`       |                    | warnings alone, as `logging` has it           |
    | `disable`        | `CKPTFS_DISABLE`   |                    | no: what is installed takes over              |

    `pinned` bounds the memory of the host through which loads to CUDA devices pass bytes. Devices read it
    directly, and the system cannot reclaim it meanwhile. With `gpudirect`, storage writes to CUDA devices directly
    (GPUDirect Storage) wherever NVIDIA's library says that it can; without it, nowhere. Reports say where it did not.
    `log` is "debug", "info", "warning" or "error", and has the logger `ckptfs` write to standard error.
    With `disable`, every call that `ckptfs.install` replaced is left to the original package.

    Object stores, for loads and mounts (docs/remote.md):

    | `configure(...)`    | environment                | by default                                            |
    |---------------------|----------------------------|-------------------------------------------------------|
    | `allow_http`        | `CKPTFS_ALLOW_HTTP`        | no: addresses without encryption are refused          |
    | `anonymous`         | `CKPTFS_ANONYMOUS`         | no; sends no credentials, for public buckets          |
    | `instance_metadata` | `CKPTFS_INSTANCE_METADATA` | no: the cloud's metadata server is not asked          |
    | `stall_timeout`     | `CKPTFS_STALL_TIMEOUT`     | 20; replaces a connection that is silent so long      |
    | `outage_timeout`    | `CKPTFS_OUTAGE_TIMEOUT`    | 60; fails a read whose server is silent so long       |
    | `poll_interval`     | `CKPTFS_POLL_INTERVAL`     | 5; seconds until a directory is listed again          |
    | `connections`       | `CKPTFS_CONNECTIONS`       | adapts; limits concurrent requests of a store         |
    | `cache_dir`         | `CKPTFS_CACHE_DIR`         | ~/.cache/ckptfs/blocks; the folder of fetched bytes   |
    | `cache_size`        | `CKPTFS_CACHE_SIZE`        | a fifth of the disk; bytes, or text like "200G"       |
    | `cache_min_free`    | `CKPTFS_CACHE_MIN_FREE`    | 5; the percentage of the disk that stays free         |
    | `no_cache`          | `CKPTFS_NO_CACHE`          | no; neither reads nor fills the cache                 |
    | `offline`           | `CKPTFS_OFFLINE`           | no; sends no request, and reads only the cache        |

        ckptfs.configure(backend="pread", memory="256M")
        ckptfs.configure(anonymous=True)
    """
    arguments = {"backend": backend, "threads": threads, "memory": memory, "pinned": pinned,
             "gpudirect": gpudirect, "log": log, "disable": disable, "allow_http": allow_http,
             "anonymous": anonymous, "instance_metadata": instance_metadata, "stall_timeout": stall_timeout,
             "outage_timeout": outage_timeout, "poll_interval": poll_interval, "connections": connections, "cache_dir": cache_dir,
             "cache_size": cache_size, "cache_min_free": cache_min_free, "no_cache": no_cache, "offline": offline}  # fmt: skip
    arguments = {name: value for name, value in arguments.items() if value is not ...}
    # Everything is parsed before anything is set.
    _configured.update({name: value if value is None else _PARSERS[name](value, f"configure({name}=...)")
                        for name, value in arguments.items()})  # fmt: skip
    if "log" in arguments:
        logger.cache_clear()
    if STORE_SETTINGS & arguments.keys():
        # The environment decides settings that are `None`, when a store is opened.
        _ckptfs.set_remote_options({name: _configured.get(name) for name in STORE_SETTINGS})


def setting(name):
    """What `configure` set, else what the environment says, else `None`."""
    value = _configured.get(name)
    if value is None:
        variable = _VARIABLES[name]
        text = _ckptfs.environment_variable(variable)
        value = _PARSERS[name](text, variable) if text else None
    return value


def resolve_backend(value, default):
    """The backend of a call: its argument, the setting or the framework's default."""
    if value is None:
        return setting("backend") or default
    return _parse_backend(value, "backend")


def limits(num_threads, memory):
    """The threads and the memory of a call or of the settings, as the Rust part takes them."""
    threads = setting("threads") if num_threads is None else _parse_count(num_threads, "num_threads")
    memory = setting("memory") if memory is None else parse_size(memory, "memory")
    threads = None if threads is None else min(threads, _MAX_THREADS)
    return threads, None if memory is None else min(memory, _MAX_MEMORY_BYTES)


def device_settings():
    """The settings of loads to devices, as the Rust part takes them: pinned bytes, and whether to use GPUDirect."""
    return min(setting("pinned") or _PINNED_BYTES, _MAX_MEMORY_BYTES), setting("gpudirect")


def store_environment(arguments):
    """The variables that give a command the settings of stores: arguments of a call take precedence over `configure`."""
    values = {name: _configured.get(name) if value is None else _PARSERS[name](value, name)
              for name, value in arguments.items()}  # fmt: skip
    texts = {True: "1", False: "0"}
    return {_VARIABLES[name]: texts[value] if isinstance(value, bool) else str(value)
            for name, value in values.items() if value is not None}  # fmt: skip


@functools.cache
def logger():
    """The logger `ckptfs`, with a handler for standard error where a setting says so."""
    import logging

    logger, level, wrong = logging.getLogger("ckptfs"), None, None
    try:
        level = setting("log")
    except SafetensorError as fault:
        # A wrong level in the environment fails no load.
        wrong = fault
    for handler in [handler for handler in logger.handlers if handler.name == "ckptfs"]:
        logger.removeHandler(handler)
    logger.setLevel(level.upper() if level else logging.NOTSET)
    if level:
        handler = logging.StreamHandler()
        handler.name = "ckptfs"
        handler.setFormatter(logging.Formatter("ckptfs: %(levelname)s: %(message)s"))
        logger.addHandler(handler)
    if wrong:
        logger.warning("%s", in_words(wrong))
    return logger


def _parse_backend(value, where):
    if value not in (MMAP, PREAD):
        raise error(f'{where} {value!r} is invalid (expected one of: "mmap", "pread")')
    return value


def _parse_count(value, where):
    # Variables of the environment are text.
    if isinstance(value, str) and value.isdecimal() and where.startswith("CKPTFS_"):
        value = int(value)
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise error(f"{where} must be a positive integer, got {value!r}")
    return value


def parse_size(value, where):
    """Bytes of a number, or of text such as "64M" and "5GB"."""
    if not isinstance(value, str):
        return _parse_count(value, where)
    try:
        found = _ckptfs.parse_size(value)
    except ValueError as fault:
        raise error(f"{where} {value!r} is no size: {fault}") from None
    return _parse_count(found, where)


def _parse_level(value, where):
    if not isinstance(value, str) or value.lower() not in _LEVELS:
        raise error(f"{where} {value!r} is no level", f"give one of {', '.join(_LEVELS)}")
    return value.lower()


def _parse_switch(value, where):
    if isinstance(value, bool):
        return value
    known = {"1": True, "true": True, "yes": True, "on": True,
             "0": False, "false": False, "no": False, "off": False}  # fmt: skip
    if not isinstance(value, str) or value.lower() not in known:
        raise error(f"{where} {value!r} is neither yes nor no", "give 1 or 0")
    return known[value.lower()]


def _parse_seconds(value, where):
    return _parse_bounded(value, where, _ckptfs.MAX_SECONDS, "seconds")


def _parse_connections(value, where):
    return _parse_bounded(value, where, _ckptfs.MAX_CONNECTIONS, "connections")


def _parse_percent(value, where):
    # Zero leaves nothing free, and is no positive count.
    return 0 if value == 0 and not isinstance(value, bool) else _parse_bounded(value, where, _ckptfs.MAX_PERCENT, "percent")


def _parse_bounded(value, where, maximum, unit):
    count = _parse_count(value, where)
    if count > maximum:
        raise error(f"{where} {value!r} is too many {unit}", f"give at most {maximum}")
    return count


_STORE_PARSERS = {"allow_http": _parse_switch, "anonymous": _parse_switch, "instance_metadata": _parse_switch,
                "stall_timeout": _parse_seconds, "outage_timeout": _parse_seconds, "poll_interval": _parse_seconds,
                "connections": _parse_connections, "cache_dir": lambda value, _: parse_path(value),
                "cache_size": parse_size, "cache_min_free": _parse_percent, "no_cache": _parse_switch,
                "offline": _parse_switch}  # fmt: skip
STORE_SETTINGS = _STORE_PARSERS.keys()
_PARSERS = {"backend": _parse_backend, "threads": _parse_count, "memory": parse_size, "pinned": parse_size,
          "gpudirect": _parse_switch, "log": _parse_level, "disable": _parse_switch, **_STORE_PARSERS}  # fmt: skip
_VARIABLES = {name: f"CKPTFS_{name.upper()}" for name in _PARSERS}
