"""Fixtures of checkpoints that take long to write."""

import pytest

from training import run_ranks, write_by_ranks


@pytest.fixture(scope="session")
def saved_by_ranks(tmp_path_factory):
    """A folder with what four processes saved; see training.py."""
    folder = tmp_path_factory.mktemp("ranks")
    run_ranks(4, write_by_ranks, folder)
    return folder
