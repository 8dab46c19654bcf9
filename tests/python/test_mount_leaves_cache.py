"""A mount leaves of its sources in the page cache what was there before: whatever it reads through that would be in
memory twice, there and as the image.
"""

import os
import subprocess
from pathlib import Path

import pytest
import torch

from mounts import until
from samples import numbers, write_shards

MIB = 1 << 20

# Of the first file so much is in the page cache before.
BEFORE = 4 * MIB

# Pages at the edges of what is read, and those that tell what a file is.
EDGES = MIB


def of_page_cache(paths):
    told = subprocess.run(
        ["fincore", "--bytes", "--noheadings", "--raw", "--output", "RES", *map(str, paths)],
        check=True, capture_output=True, text=True,
    )  # fmt: skip
    return sum(map(int, told.stdout.split()))


def evict(paths):
    for path in paths:
        with open(path, "rb") as file:
            os.fsync(file.fileno())
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    until("its pages are gone", lambda: of_page_cache(paths) == 0)


@pytest.fixture
def shards(tmp_path):
    """A model of 64 MiB, and its files."""
    write_shards(tmp_path / "models/llama", 1, 2, 8, 1024)
    return tmp_path / "models"


@pytest.fixture
def strided(tmp_path):
    """A checkpoint of 64 MiB whose tensor does not lie in the order in which it is shown."""
    path = tmp_path / "models/loose/turned.pt"
    path.parent.mkdir(parents=True)
    torch.save({"turned": numbers(1, 4096, 4096).t()}, path)
    return tmp_path / "models"


@pytest.fixture
def overlay(tmp_path):
    """Shows a folder as the upper one of a container does; gone when the test is."""
    where = tmp_path / "overlay"
    where.mkdir()

    def over(folder):
        for name in ("upper", "work"):
            (tmp_path / name).mkdir()
        how = f"lowerdir={folder},upperdir={tmp_path / 'upper'},workdir={tmp_path / 'work'}"
        subprocess.run(["mount", "-t", "overlay", "overlay", "-o", how, where], check=True)
        return where

    yield over
    subprocess.run(["umount", "-l", where], check=True)


def sources(folder):
    return sorted(path for path in Path(folder).glob("*/*") if path.suffix in (".safetensors", ".pt"))


def reads_once(mount, image, sources):
    """Reads an image of which only a part of the first source is in memory."""
    evict(sources)
    with open(sources[0], "rb", buffering=0) as file:
        # Without readahead, so that it is these pages alone.
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_RANDOM)
        assert len(file.read(BEFORE)) == BEFORE
    assert of_page_cache(sources) >= BEFORE
    assert len((mount / image).read_bytes()) > 64 * MIB
    until("no more of it is there", lambda: of_page_cache(sources) <= BEFORE + EDGES)
    # A system may let go of some by itself.
    assert of_page_cache(sources) >= BEFORE // 2
    assert of_page_cache([mount / image]) >= 32 * MIB


def test_what_is_read_past_the_page_cache(mounts, shards):
    reads_once(mounts(shards), "llama/model.safetensors", sources(shards))


def test_what_is_gathered(mounts, strided):
    reads_once(mounts(strided), "loose/turned.safetensors", sources(strided))


def test_what_another_filesystem_has_that_is_not_of_this_machine(mounts, shards):
    # Like all that programs serve, a mount of ours is such a one for another mount.
    between = mounts(shards, "--keep", "*", "--no-passthrough")
    reads_once(mounts(between.point), "llama/model.safetensors", sources(between.point))


def test_what_lies_in_an_overlay_stays(mounts, strided, overlay):
    (source,) = sources(strided)
    mount = mounts(overlay(strided))
    source.read_bytes()
    before = of_page_cache([source])
    assert before >= 64 * MIB
    with open(mount / "loose/turned.safetensors", "rb") as file:
        assert len(file.read()) > 64 * MIB
    until("the image is closed", lambda: mount.stats()["images"]["open"] == 0)
    assert of_page_cache([source]) >= before // 2
