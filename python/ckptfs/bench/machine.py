"""The machine that measures: what numbers are worth depends on it."""

import os
import platform
from importlib import metadata
from pathlib import Path

from ckptfs.bench import page_cache
from ckptfs.bench.loaders import PEERS


def describe(path, others=()):
    """The processor, the memory, the system, the filesystem of a path, and the versions of what is measured and of
    other packages."""
    packages = ["ckptfs", *sorted({peer.package for peer in PEERS.values()} | {*others})]
    return {
        "processor": _line("/proc/cpuinfo", "model name") or platform.machine(),
        "cores": len(os.sched_getaffinity(0)),
        "memory_bytes": os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"),
        "system": f"{platform.system()} {platform.release()}",
        "filesystem": page_cache.filesystem(path),
        "python": platform.python_version(),
        "libraries": {name: found for name in packages if (found := _version(name))},
        "device": None,
    }


def in_words(machine):
    """A description as pairs of a name and a value, for people."""
    yield "processor", f"{machine['processor']}, {machine['cores']} cores that may be used"
    yield "memory", f"{machine['memory_bytes'] / 1e9:.1f} GB"
    yield "system", f"{machine['system']}, Python {machine['python']}"
    yield "filesystem", machine["filesystem"] or "not known"
    if machine["device"]:
        yield "device", machine["device"]
    yield "libraries", ", ".join(f"{name} {version}" for name, version in machine["libraries"].items())


def _line(path, name):
    for line in Path(path).read_text().splitlines():
        if line.startswith(name):
            return line.partition(":")[2].strip()
    return None


def _version(package):
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None
