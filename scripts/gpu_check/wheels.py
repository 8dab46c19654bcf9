"""The packages that are measured, each in a folder of its own."""

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
    """The folders of the packages that a pack has for this Python, and why the others are missing."""
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
    """Why packages are not among those that Python finds, which has at most one of two versions."""
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
