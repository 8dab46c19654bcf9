"""Fixtures of all tests: the program under test, mounts and sources."""

import gc
import os
import signal
import subprocess
from pathlib import Path

import pytest

from mounts import PATIENCE, Mounts
from program import Ckptfs, find_binary
from samples import write_shards

# A shell makes its background processes ignore Ctrl-C, and they would pass that on.
signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_collection_finish():
    # Objects from imports and parameters live until the end. Frozen, they are skipped by the garbage collections that
    # libraries run at each load, which took seconds.
    gc.freeze()


def pytest_unconfigure():
    gc.unfreeze()


@pytest.fixture(scope="session", autouse=True)
def user_folders(tmp_path_factory):
    """Sets the folders for the logs of daemons and for caches, which are otherwise in the user's home."""
    for kind in ("state", "cache"):
        os.environ[f"XDG_{kind.upper()}_HOME"] = str(tmp_path_factory.mktemp(kind))


@pytest.fixture(scope="session")
def ckptfs():
    """Runs the program: `ckptfs("inspect", path)`; see program.py."""
    return Ckptfs(find_binary())


@pytest.fixture
def mounts(tmp_path):
    """Mounts a source: `mounts(source, "--threads", "1")`; see mounts.py."""
    mounts = Mounts(find_binary(), tmp_path)
    yield mounts
    mounts.end()


@pytest.fixture
def left(tmp_path, monkeypatch):
    """Mounts and new directories that a test left: `left()`; see `ckptfs.mount`. Mounts are gone when the test is."""
    temporary = tmp_path / "temporary"
    temporary.mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(temporary))
    monkeypatch.setenv("TMPDIR", str(temporary))

    def mountpoints():
        lines = Path("/proc/self/mountinfo").read_text().splitlines()
        return [point for line in lines if (point := line.split(" ")[4]).startswith(str(tmp_path))]

    yield lambda: mountpoints() + os.listdir(temporary)
    for point in reversed(mountpoints()):
        subprocess.run(["umount", "-l", point], check=True, timeout=PATIENCE)


@pytest.fixture
def source(tmp_path, left):
    """A directory with a sharded model to mount, and its tensors."""
    return tmp_path / "models", write_shards(tmp_path / "models/llama", 1, 3, 2, 100)


@pytest.fixture
def point(tmp_path):
    """An empty directory to mount it at."""
    (tmp_path / "mnt").mkdir()
    return tmp_path / "mnt"
