"""A store with checkpoints of every kind."""

import warnings

import pytest

import store_kinds
import stores
from cloud import Cloud
from store_models import write_models
from stores import Moto

if stores.MOTO is None:
    warnings.warn(stores.MISSING, stacklevel=1)
    collect_ignore_glob = ["test_*.py"]

for kind in store_kinds.KINDS:
    if not store_kinds.is_installed(kind):
        warnings.warn(f"NOT TESTED: the store {kind}; `. scripts/setup.sh` installs it", stacklevel=1)


@pytest.fixture(scope="session")
def server():
    store = Moto()
    yield store
    store.end()


@pytest.fixture(scope="module")
def store_cloud(server):
    """A cloud in front of the store. It checks credentials."""
    cloud = Cloud(server)
    yield cloud
    cloud.end()


@pytest.fixture
def cloud(store_cloud, server, tmp_path, monkeypatch):
    """The cloud, and an environment whose only credentials are those that the test sets."""
    store_cloud.reset()
    server.fault()
    for name, value in store_cloud.environment.items():
        monkeypatch.setenv(name, value)
    hidden = "AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_PROFILE", "AWS_WEB_IDENTITY_TOKEN_FILE"
    container = "CREDENTIALS_RELATIVE_URI", "CREDENTIALS_FULL_URI", "AUTHORIZATION_TOKEN", "AUTHORIZATION_TOKEN_FILE"
    for name in [*hidden, *(f"AWS_CONTAINER_{name}" for name in container)]:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("CKPTFS_NO_CACHE", "1")
    yield store_cloud


@pytest.fixture
def store(server, monkeypatch):
    """The store without faults, and an environment in which it is found."""
    server.fault()
    for name, value in server.environment.items():
        monkeypatch.setenv(name, value)
    # What is read must come from the server. Tests of the cache have one of their own.
    monkeypatch.setenv("CKPTFS_NO_CACHE", "1")
    yield server
    server.fault()


@pytest.fixture
def cache(store, monkeypatch, tmp_path):
    """The folder of an empty cache."""
    monkeypatch.delenv("CKPTFS_NO_CACHE")
    monkeypatch.setenv("CKPTFS_CACHE_DIR", str(tmp_path / "blocks"))
    monkeypatch.setenv("CKPTFS_CACHE_MIN_FREE", "0")
    return tmp_path / "blocks"


@pytest.fixture(scope="session")
def models(server, tmp_path_factory):
    """The folder on disk, its URL, and the names in it."""
    folder = tmp_path_factory.mktemp("models")
    kinds = write_models(folder)
    return folder, server.upload(folder, "models"), kinds
