"""Readahead of a mount: for which readers, and how far."""

import mmap
import os
import time

import pytest

from samples import write_shards

MIB, PAGE = 1 << 20, 4096
VIRTUAL_FILE = "llama/model.safetensors"


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    """A model of 128 MiB, in tensors of 16 MiB."""
    models = tmp_path_factory.mktemp("ahead") / "models"
    write_shards(models / "llama", 1, 2, 4, 2048)
    os.sync()
    return models


def forgotten(models):
    for path in models.glob("llama/*"):
        with open(path, "rb") as file:
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    return models


@pytest.fixture
def cold(mounts, models):
    """Mounts it with an empty page cache."""
    return mounts(forgotten(models))


def fetched(mount):
    return mount.stats()["prefetch"]["fetched"]


@pytest.mark.parametrize("apart", [MIB // 4, MIB, 3 * MIB])
def test_scattered_reads_are_not_read_ahead(cold, apart):
    with open(cold / VIRTUAL_FILE, "rb", buffering=0) as file:
        for at in range(0, 128 * MIB, apart):
            assert len(os.pread(file.fileno(), PAGE, at)) == PAGE
    assert all_fetched(cold) == 0


def all_fetched(mount):
    """Blocks fetched ahead, after the last of them came."""
    same, before = 0, None
    while same < 15:
        time.sleep(0.002)
        now = fetched(mount)
        same, before = (same + 1 if now == before else 0), now
    return now


def read_slowly(mount, most, length, flags=0):
    """Reads this much from the beginning, `length` bytes at a time, slowly: pending prefetches have come whenever the
    next part is read."""
    into = mmap.mmap(-1, length)
    file = os.open(mount / VIRTUAL_FILE, os.O_RDONLY | flags)
    for at in range(0, most, length):
        assert os.preadv(file, [into], at) == length
        all_fetched(mount)
    os.close(file)


def test_a_sequential_reader_finds_most_of_it_prefetched(cold):
    read_slowly(cold, 64 * MIB, MIB)
    stats = cold.stats()
    # Of the requests, not of the bytes: on a busy machine the kernel cuts a read into more of them.
    assert stats["prefetch"]["used"] > 32 and stats["cache"]["hits"] > 2 * stats["cache"]["misses"]


def test_small_requests_that_follow_one_another_share_blocks(mounts, models):
    mount = mounts(forgotten(models), "--readahead", "1M")
    # Past the page cache of the mount, so that the kernel asks for no more than this.
    read_slowly(mount, 32 * MIB, MIB // 8, os.O_DIRECT)
    stats = mount.stats()
    assert stats["reads"] == 256 and stats["cache"]["hits"] > 240 and all_fetched(mount) < 96
