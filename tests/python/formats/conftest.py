"""Fixtures of checkpoints that take long to write."""

import subprocess

import pytest

import preloaded
from mounts import PATIENCE
from program import COMMON


@pytest.fixture(scope="session")
def saved_by_ranks(tmp_path_factory):
    """A folder with what four processes saved; see training.py."""
    folder = tmp_path_factory.mktemp("ranks")
    subprocess.run(preloaded.command(COMMON / "training.py", folder), check=True, timeout=PATIENCE)
    return folder
