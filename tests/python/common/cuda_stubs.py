"""Runs PyTorch on stubs of CUDA's driver and runtime (`stubs/cuda`, `stubs/cudart`), which are built when first
needed.

    report = run(function, *arguments, DEVICES=2)

The function is one of a module that can be imported here, and gets the arguments through JSON. An exception of it
fails the test. The report and the settings are the stub's: see `stubs/cuda/README.md`.

    python cuda_stubs.py MODULE FUNCTION ARGUMENTS
"""

import ctypes
import fcntl
import importlib
import json
import os
import subprocess
import sys
import tempfile
from functools import cache
from pathlib import Path

import preloaded
from program import REPOSITORY

SECONDS = 300

# PyTorch needs a driver stub as new as the runtime. In each `wait_stream` PyTorch destroys an event before the work
# recorded before it is done, so the stub must allow that.
SETTINGS = {"DRIVER_VERSION": 13020, "DESTROY": "allow"}


@cache
def folder(stub, library, *names):
    """The directory that has a stub under all names that programs look for. Builds it once for all tests and
    processes."""
    target = Path(os.environ.get("CARGO_TARGET_DIR", REPOSITORY / "target")) / "tmp" / f"stub-{stub}"
    found = target / "found"
    found.mkdir(parents=True, exist_ok=True)
    with open(target / "lock", "w") as only_one:
        fcntl.flock(only_one, fcntl.LOCK_EX)
        manifest = REPOSITORY / "stubs" / stub / "Cargo.toml"
        build = ["cargo", "build", "--quiet", "--locked", "--lib", "--manifest-path", manifest]
        done = subprocess.run([*build, "--target-dir", target], capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        assert (target / "debug" / library).is_file(), f"{target}: {library} is not built"
        for name in names:
            if not (found / name).is_symlink():
                (found / name).symlink_to(Path("../debug") / library)
    return found


def libraries():
    """The variables of a process that finds the stubs. PyTorch first looks beside itself for the runtime and for the
    library of GPUDirect Storage, so these are preloaded. A process that finds them already passes its own on."""
    if "libcudart" in os.environ.get("LD_PRELOAD", ""):
        return {name: os.environ[name] for name in ("LD_LIBRARY_PATH", "LD_PRELOAD")}
    driver = folder("cuda", "libcuda.so", "libcuda.so", "libcuda.so.1")
    runtime = folder("cudart", "libcudart.so", "libcudart.so.13")
    storage = folder("cufile", "libcufile.so", "libcufile.so.0")
    paths = [str(driver), *filter(None, os.environ.get("LD_LIBRARY_PATH", "").split(":"))]
    return {
        "LD_LIBRARY_PATH": ":".join(paths),
        "LD_PRELOAD": f"{runtime / 'libcudart.so.13'}:{storage / 'libcufile.so.0'}",
    }


def run(function, *arguments, **settings):
    """Runs a function of a module in a process of its own, and gives the stub's report."""
    words = __file__, function.__module__, function.__name__, json.dumps(arguments)
    settings = {f"STUB_CUDA_{name}": str(value) for name, value in (SETTINGS | settings).items()}
    with tempfile.TemporaryDirectory() as place:
        report = Path(place) / "report.json"
        found = libraries() | {"STUB_CUDA_REPORT": str(report), "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
        done = subprocess.run(
            preloaded.command(*words, **libraries()), env=os.environ | found | settings,
            stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=SECONDS,
        )  # fmt: skip
        assert done.returncode == 0, f"{done.returncode}\n{done.stdout}\n{done.stderr}"
        return json.loads(report.read_text())


def peek(tensor):
    """The bytes that a tensor has by now: queued work is not waited for. For code in the process with the stubs."""
    bytes = ctypes.create_string_buffer(tensor.nbytes)
    where, room = ctypes.c_uint64(tensor.data_ptr()), ctypes.c_size_t(tensor.nbytes)
    assert ctypes.CDLL("libcuda.so.1").stub_cuda_peek(bytes, where, room) == 0
    return bytes.raw


if __name__ == "__main__":
    module, name, arguments = sys.argv[1:]
    getattr(importlib.import_module(module), name)(*json.loads(arguments))
