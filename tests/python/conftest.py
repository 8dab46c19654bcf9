"""What every test here gets: the program under test."""

import pytest

from program import Ckptfs, find_binary


@pytest.fixture(scope="session")
def ckptfs():
    """Runs the program: `ckptfs("inspect", path)`; see program.py."""
    return Ckptfs(find_binary())
