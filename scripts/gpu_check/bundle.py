"""Makes the pack that `scripts/gpu-check` needs on a machine that has a GPU, and no Rust and no network.

A pack is a folder with the wheel of ckptfs and the wheels of the libraries that it is measured against. It also has the
Rust test that needs a device. With the files of the repository it must be small enough to travel.
"""

import argparse
import json
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from gpu_check import REPOSITORY

# The repository and the pack together.
MAX_PACK_BYTES = 64 << 20

# Pythons that the other machine may have.
PYTHONS = ["3.12", "3.11", "3.13"]

# The libraries that ckptfs is measured against, and `humanize`, which runai's needs and few machines have. Of a list
# the first that the registry has is taken.
PEERS = [
    ["safetensors==0.8.*"],
    ["safetensors==0.9.*", "safetensors>=0.9.0rc0,<0.10"],
    ["fastsafetensors==0.5.0"],
    ["runai-model-streamer==0.17.0"],
    ["humanize"],
    ["instanttensor==0.2.2"],
]

# Wheels for any glibc that a machine with a GPU may have: pip takes the best of what is there.
PLATFORMS = ["any", "manylinux2014_x86_64", *(f"manylinux_2_{minor}_x86_64" for minor in range(17, 36))]

TEST = "loads_to_a_gpu"


def main():
    parser = argparse.ArgumentParser(prog="scripts/gpu-check --pack", description=__doc__.splitlines()[0])
    parser.add_argument("dir", nargs="?", type=Path, default=REPOSITORY / "gpu-check-pack", metavar="DIR")
    folder = parser.parse_args().dir
    if folder.exists():
        # Nothing of an earlier pack may stay. A folder that is no pack is left alone.
        if any(path.is_dir() or path.suffix != ".whl" and path.name != TEST for path in folder.iterdir()):
            sys.exit(f"gpu-check: {folder}: holds other things than a pack; name another folder")
        shutil.rmtree(folder)
    folder.mkdir(parents=True)
    build_wheel(folder)
    build_rust_test(folder)
    download_peer_wheels(folder)
    print_contents(folder)


def build_wheel(folder):
    say("building the wheel of ckptfs")
    run_pip("wheel", "--no-deps", "--wheel-dir", folder, REPOSITORY)


def build_rust_test(folder):
    say(f"building the test {TEST}")
    command = ["cargo", "test", "--locked", "--features", "cuda", "--test", TEST, "--no-run",
               "--message-format=json"]  # fmt: skip
    done = subprocess.run(command, cwd=REPOSITORY, check=True, stdout=subprocess.PIPE, text=True)
    for message in map(json.loads, done.stdout.splitlines()):
        if message.get("executable") and message["target"]["name"] == TEST:
            subprocess.run(["strip", "-o", folder / TEST, message["executable"]], check=True)
            return
    sys.exit(f"gpu-check: cargo built no {TEST}")


def download_peer_wheels(folder):
    for python in PYTHONS:
        for versions in PEERS:
            if not any(download_wheel(version, python, folder) for version in versions):
                say(f"{versions[0]}: the registry has no wheel for Python {python}")


def download_wheel(version, python, folder):
    with tempfile.TemporaryDirectory() as download_folder:
        platforms = [word for platform in PLATFORMS for word in ("--platform", platform)]
        # pip takes a candidate only where --pre says so.
        pre = ["--pre"] if "rc" in version else []
        done = run_pip("download", "--no-deps", "--only-binary", ":all:", "--python-version", python,
                       *platforms, *pre, "--dest", download_folder, version, check=False)  # fmt: skip
        for wheel in Path(download_folder).iterdir():
            shutil.copyfile(wheel, folder / wheel.name)
    return done.returncode == 0


def print_contents(folder):
    """Prints each file with its size and what it needs; fails if it is too much."""
    pack_bytes = 0
    for path in sorted(folder.iterdir()):
        pack_bytes += path.stat().st_size
        print(f"{path.stat().st_size:>12,}  {path.name}{describe_glibc(path)}")
    command = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    tracked = subprocess.run(command, cwd=REPOSITORY, check=True, stdout=subprocess.PIPE, text=True).stdout
    files = [REPOSITORY / name for name in tracked.split("\0") if name]
    repository_bytes = sum(path.lstat().st_size for path in files if path.exists() or path.is_symlink())
    print(f"{pack_bytes:>12,}  the pack, in {folder}\n{repository_bytes:>12,}  the repository's files")
    if pack_bytes + repository_bytes > MAX_PACK_BYTES:
        total = pack_bytes + repository_bytes
        sys.exit(f"gpu-check: {total:,} bytes are more than the {MAX_PACK_BYTES:,} that may travel")


def describe_glibc(path):
    """The glibc that a file built here needs, in words."""
    if not (path.name == TEST or path.name.startswith("ckptfs-")):
        return ""
    with tempfile.TemporaryDirectory() as unpack_folder:
        binaries = [path]
        if path.suffix == ".whl":
            shutil.unpack_archive(path, unpack_folder, "zip")
            binaries = Path(unpack_folder).rglob("*.so")
        minors = {int(minor) for file in binaries for minor in re.findall(rb"GLIBC_2\.(\d+)", file.read_bytes())}
    return f"  (needs glibc 2.{max(minors)})" if minors else ""


def run_pip(*words, check=True):
    command = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--quiet", *map(str, words)]
    return subprocess.run(command, check=check, stderr=None if check else subprocess.DEVNULL)


def say(words):
    print(f"== {words}", flush=True)


if __name__ == "__main__":
    main()
