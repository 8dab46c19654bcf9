"""The machine: what numbers are worth depends on it.

In: a file. Out: what `--json` calls `machine`, and that in words.
"""

import os
import platform
from importlib import metadata
from pathlib import Path

from ckptfs.bench import page_cache
from ckptfs.bench.loaders import PEERS


def machine(path):
    """The processor, the memory, the system, the filesystem that this file lies on, and versions."""
    packages = ["ckptfs", *sorted({peer.package for peer in PEERS.values()})]
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


def in_words(told):
    """The same for people, as pairs of what and which."""
    yield "processor", f"{told['processor']}, {told['cores']} cores that may be used"
    yield "memory", f"{told['memory_bytes'] / 1e9:.1f} GB"
    yield "system", f"{told['system']}, Python {told['python']}"
    yield "filesystem", told["filesystem"] or "not known"
    if told["device"]:
        yield "device", told["device"]
    yield "libraries", ", ".join(f"{name} {version}" for name, version in told["libraries"].items())


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
