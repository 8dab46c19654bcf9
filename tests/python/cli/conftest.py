"""Keeps tests of `ckptfs bench` from dropping caches."""

import pytest

from ckptfs.bench import page_cache


@pytest.fixture(autouse=True)
def keep_caches(monkeypatch, tmp_path):
    """Keeps what other programs have cached."""
    monkeypatch.setattr(page_cache, "_DROP", str(tmp_path / "no/drop_caches"))
