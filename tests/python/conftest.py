"""What every test here gets: the program under test."""

import pytest

from mounts import Mounts
from program import Ckptfs, find_binary


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
