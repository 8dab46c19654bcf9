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


def install_wheels(pack, folder):
    """The folders of the packages that a pack has for this Python, and why the others are missing."""
    folders, missing = {}, {}
    tag = f"cp{sys.version_info.major}{sys.version_info.minor}"
    for name, prefix in WHEELS.items():
        wheels = sorted(pack.glob(f"{prefix}*.whl"))
        markers = (f"-{tag}-", "-abi3-", "-py3-")
        candidates = [wheel for wheel in wheels if any(marker in wheel.name for marker in markers)]
        if not candidates:
            missing[name] = f"no wheel for {tag} in the pack" if wheels else "not in the pack"
            continue
        target = folder / name.replace(" ", "-")
        command = [sys.executable, "-m", "pip", "install", "--quiet", "--disable-pip-version-check",
                   "--no-index", "--no-deps", "--target", str(target), str(candidates[-1])]  # fmt: skip
        done = subprocess.run(command, capture_output=True, text=True)
        if done.returncode:
            missing[name] = f"pip: {(done.stderr.strip().splitlines() or ['failed'])[-1]}"
        else:
            folders[name] = target
    return folders, missing


def find_missing():
    """Why packages are not among those that Python finds, which has at most one of two versions."""
    missing = {}
    for name, prefix in WHEELS.items():
        package, _, version = prefix.partition("-")
        try:
            installed_version = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            missing[name] = "not installed"
        else:
            if not installed_version.startswith(version):
                missing[name] = f"{installed_version} is installed"
    return missing
