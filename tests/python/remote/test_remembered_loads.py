"""A mount of a store prefetches a cold load in the order of the one before, without an option."""

import pytest

from ordered_reads import read_in_order, shuffled
from samples import write_shards
from stores import ServedFolder

# 128 MiB in tensors of 4 MiB.
SHARDS, TENSORS, SIDE = 2, 16, 1024


@pytest.fixture(scope="module")
def folder_store(tmp_path_factory):
    store = ServedFolder(tmp_path_factory.mktemp("folder"))
    write_shards(store.folder / "bucket/llama", 1, SHARDS, TENSORS, SIDE)
    yield store
    store.end()


@pytest.fixture
def load(mounts, folder_store, monkeypatch):
    """Loads all tensors in one random order through a mount of its own. Returns their bytes, and how many blocks were
    replayed."""
    for name, value in folder_store.environment.items():
        monkeypatch.setenv(name, value)
    # Its bytes would come from there the second time.
    monkeypatch.setenv("CKPTFS_NO_CACHE", "1")

    def load(*options):
        mount = mounts("s3://bucket/llama", *options)
        tensors = read_in_order(mount / "model.safetensors", shuffled())
        replayed = mount.stats()["prefetch"]["replayed"]
        mount.unmount()
        return tensors, replayed

    return load


def test_a_load_from_a_store_is_prefetched_in_the_order_of_the_one_before(load):
    first, replayed = load()
    assert replayed == 0
    again, replayed = load()
    assert again == first and replayed > SHARDS * TENSORS * 2


def test_none_is_remembered_on_demand(load, tmp_path):
    load("--remember", "none")
    assert not (tmp_path / "cache/ckptfs/orders").exists()
