"""What a mount reads ahead of its readers, and of whom it does not."""

import os

import pytest

from samples import write_shards

MIB, PAGE = 1 << 20, 4096
IMAGE = "llama/model.safetensors"


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    """A model of 128 MiB, in tensors of 16."""
    models = tmp_path_factory.mktemp("ahead") / "models"
    write_shards(models / "llama", 1, 2, 4, 2048)
    os.sync()
    return models


@pytest.fixture
def cold(mounts, models):
    """A mount of it, with nothing of it in memory."""
    for path in models.glob("llama/*"):
        with open(path, "rb") as file:
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    return mounts(models)


def fetched(mount):
    return mount.stats()["prefetch"]["fetched"]


@pytest.mark.parametrize("apart", [MIB // 4, MIB, 3 * MIB])
def test_nothing_where_a_little_is_read_here_and_there(cold, apart):
    with open(cold / IMAGE, "rb", buffering=0) as file:
        for at in range(0, 128 * MIB, apart):
            assert len(os.pread(file.fileno(), PAGE, at)) == PAGE
    assert fetched(cold) == 0


def test_most_of_what_is_read_from_its_beginning_to_its_end(cold):
    assert len((cold / IMAGE).read_bytes()) > 128 * MIB
    assert fetched(cold) > 64
