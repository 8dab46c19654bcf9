"""Folders of checkpoints."""

import subprocess

import pytest

import preloaded
from dcp_tables import save_by_rows
from mounts import PATIENCE
from program import COMMON


@pytest.fixture(scope="session")
def saved_by_ranks(tmp_path_factory):
    """A folder with what four processes saved; see training.py."""
    folder = tmp_path_factory.mktemp("ranks")
    subprocess.run(preloaded.command(COMMON / "training.py", folder), check=True, timeout=PATIENCE)
    return folder


@pytest.fixture
def saved_by_rows(tmp_path):
    """A folder of two files, in which `a` is cut by rows over both."""
    path = tmp_path / "step-1"
    save_by_rows(path)
    return path
