"""Fixtures of the tests of loads."""

import pytest


@pytest.fixture(params=["mmap", "pread"])
def backend(request):
    """How tensors are loaded: mapped, or owned."""
    return request.param
