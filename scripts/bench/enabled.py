"""Unchanged programs in an environment that `ckptfs enable` prepared, with the model in the page cache.

Loads from a mount stand beside the same loads from the directory itself in an environment without ckptfs. So do loads
from the directory in the enabled environment, which are the original's, and the start of an interpreter.

Loads are measured twice: while a process *holds* the free memory (see `memory_ballast`), and with it left *alone*.
CKPTFS_BENCH_MODELS names a folder that keeps the models from one run to the next.
"""

import os
import subprocess
import sys
import sysconfig
import time
import venv
from contextlib import nullcontext
from functools import partial
from pathlib import Path

from bench import workloads
from bench.fixtures import alternate
from bench.machine import load, machine
from bench.models import in_process, llama, unet
from bench.results import Results

# How often an interpreter is started.
STARTS_COUNT = 200

# While there is a mount, an import of safetensors imports the loader, too.
IMPORT_PROGRAM = "import safetensors.torch"
IMPORTS_COUNT = 20


class Environment:
    """A virtual environment that sees the packages of this interpreter."""

    def __init__(self, folder):
        venv.create(folder, symlinks=True)
        self.python = folder / "bin/python"
        [site] = folder.glob("lib/*/site-packages")
        (site / "beside.pth").write_text(sysconfig.get_path("purelib") + "\n")

    def enable(self):
        subprocess.run([self.python, "-P", "-m", "ckptfs", "enable", "-q"], check=True, stdout=subprocess.DEVNULL)
        return self


def make_models(folder):
    """The models, unless the folder has them from before."""
    for maker, name in ((llama, "model"), (llama, "tiny"), (unet, "unet"), (unet, "tiny-unet")):
        if not (folder / name / "complete").exists():
            in_process(maker, folder=folder / name, size=0 if "tiny" in name else 1)
            (folder / name / "complete").touch()


def measure_loads(measuring, folder, plain, enabled):
    """Rows with their runs: the directory itself, in an environment without ckptfs, beside the mount or the directory
    in the enabled one. A row "again" is of a second process that loads the same file."""
    model, tiny = folder / "model", folder / "tiny"
    network, tiny_network = folder / "unet", folder / "tiny-unet"
    from_pretrained, from_diffusers = (
        load(f"{workloads.__name__}:{name}") for name in ("from_pretrained", "unet_from_pretrained")
    )
    load_file = load("safetensors")
    cases = {
        "transformers' `from_pretrained`": (from_pretrained, model, tiny, measuring.point, 1),
        "`load_file` and touch": (load_file, model, tiny, measuring.virtual_file, 1),
        "`load_file` and touch, again": (load_file, model, tiny, measuring.virtual_file, 2),
        "diffusers' `from_pretrained`": (from_diffusers, network, tiny_network, measuring.point, 1),
        "the directory itself, `load_file` and touch": (load_file, model, tiny, None, 1),
    }
    for title, (request, source, warm_up, mounted_path, count) in cases.items():

        def time_side(python, mounted_path=None, request=request, source=source, warm_up=warm_up, count=count):
            # Mounted before the program starts, as a user's mount is.
            with measuring.mounted(source) if mounted_path else nullcontext():
                for prepare in [partial(measuring.warm, source), measuring.ballast.take][:count]:
                    timing, result = measuring.run(
                        request, mounted_path or source, warm_up, prepare=prepare, python=python
                    )
            return timing["seconds"], result

        sides = {"plain": partial(time_side, plain.python), "enabled": partial(time_side, enabled.python, mounted_path)}
        yield title, measuring.compare(sides)


def measure_starts(plain, enabled, program, count):
    """Seconds that an interpreter takes to start, run a program and end."""
    sides = {"plain": plain.python, "enabled": enabled.python}

    def measure_side(name):
        start = time.perf_counter()
        subprocess.run([sides[name], "-c", program], check=True)
        return time.perf_counter() - start

    return alternate(list(sides), measure_side, count)


def main(*names):
    results = Results("enabled", names)
    for name in names or ("held", "alone", "start"):
        with machine(has_ballast=name == "held") as measuring:
            folder = Path(os.environ.get("CKPTFS_BENCH_MODELS", measuring.folder))
            plain = Environment(measuring.folder / "plain")
            enabled = Environment(measuring.folder / "enabled").enable()
            if name == "start":
                row = f"Python {sys.version.split()[0]}, `-c pass`, {STARTS_COUNT} starts"
                results.add("enabled-start", [row], measure_starts(plain, enabled, "pass", STARTS_COUNT))
                continue
            make_models(folder)
            if name == "alone":
                with measuring.mounted(folder / "tiny"):
                    runs = measure_starts(plain, enabled, IMPORT_PROGRAM, IMPORTS_COUNT)
                results.add("enabled-start", [f"`{IMPORT_PROGRAM}` while there is a mount, {IMPORTS_COUNT} starts"], runs)
            for title, runs in measure_loads(measuring, folder, plain, enabled):
                results.add("enabled", [title, name], runs)
