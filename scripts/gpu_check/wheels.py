"""The packages that are measured, each in a folder of its own.

In: a pack. Out: the folders; and what of it this Python cannot use, in words.
"""

import importlib.metadata
import subprocess
import sys

# Names, and the start of the files of their wheels.
WHEELS = {
    "ckptfs": "ckptfs-", "safetensors 0.8": "safetensors-0.8", "safetensors 0.9": "safetensors-0.9",
    "fastsafetensors": "fastsafetensors-", "runai": "runai_model_streamer-", "humanize": "humanize-",
    "instanttensor": "instanttensor-",
}  # fmt: skip


def unpacked(pack, folder):
    """A folder for each of those that are there, and why the others are not."""
    folders, lacking = {}, {}
    tag = f"cp{sys.version_info.major}{sys.version_info.minor}"
    for name, start in WHEELS.items():
        wheels = sorted(pack.glob(f"{start}*.whl"))
        fitting = [wheel for wheel in wheels if any(of in wheel.name for of in (f"-{tag}-", "-abi3-", "-py3-"))]
        if not fitting:
            lacking[name] = f"no wheel for {tag} in the pack" if wheels else "not in the pack"
            continue
        target = folder / name.replace(" ", "-")
        command = [sys.executable, "-m", "pip", "install", "--quiet", "--disable-pip-version-check",
                   "--no-index", "--no-deps", "--target", str(target), str(fitting[-1])]  # fmt: skip
        done = subprocess.run(command, capture_output=True, text=True)
        if done.returncode:
            lacking[name] = f"pip: {(done.stderr.strip().splitlines() or ['failed'])[-1]}"
        else:
            folders[name] = target
    return folders, lacking


def not_installed():
    """Why packages are not among those that Python finds; of two versions one is."""
    lacking = {}
    for name, start in WHEELS.items():
        package, _, version = start.partition("-")
        try:
            found = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            lacking[name] = "not installed"
        else:
            if not found.startswith(version):
                lacking[name] = f"{found} is installed"
    return lacking
