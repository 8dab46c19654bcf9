"""A mount leaves of its sources in the page cache what was there before: whatever it reads through that would be in
memory twice, there and as the image.
"""

import mmap
import os
import random
import subprocess
from concurrent.futures import ThreadPoolExecutor
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
def mixed(tmp_path):
    """A checkpoint of 64 MiB with one such tensor between others."""
    path = tmp_path / "models/loose/mixed.pt"
    path.parent.mkdir(parents=True)
    a, b, c = (numbers(n, 2048, 2560) for n in range(3))
    torch.save({"a": a, "turned": b.t(), "c": c}, path)
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


def read(path, range_of):
    """A range of a file, without readahead, so that it is these pages alone."""
    with open(path, "rb", buffering=0) as file:
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_RANDOM)
        assert len(os.pread(file.fileno(), len(range_of), range_of.start)) == len(range_of)


def kept(attempt):
    """A system may let go of pages by itself, now and then: what is not kept every time is let go of by us."""
    for _ in range(3):
        if attempt():
            return
    raise AssertionError("what was there before is let go of")


def reads_once(mounts, point, image, sources, keeps_image=True):
    """Reads an image of which only a part of the first source is in memory."""

    def attempt():
        evict(sources)
        read(sources[0], range(BEFORE))
        mount = mounts(point)
        assert len((mount / image).read_bytes()) > 64 * MIB
        until("no more of it is there", lambda: of_page_cache(sources) <= BEFORE + EDGES)
        of_image = of_page_cache([mount / image]) if keeps_image else 32 * MIB
        mount.unmount()
        return of_page_cache(sources) >= BEFORE and of_image >= 32 * MIB

    kept(attempt)


def test_what_is_read_past_the_page_cache(mounts, shards):
    reads_once(mounts, shards, "llama/model.safetensors", sources(shards))


def test_what_is_gathered(mounts, strided):
    reads_once(mounts, strided, "loose/turned.safetensors", sources(strided))


def test_what_another_filesystem_has_that_is_not_of_this_machine(mounts, shards):
    # Like all that programs serve, a mount of ours is such a one for another mount.
    between = mounts(shards, "--keep", "*", "--no-passthrough")
    # Such a filesystem does not reveal writers: a file that young is read anew at each open.
    sources_there = sources(between.point)
    reads_once(mounts, between.point, "llama/model.safetensors", sources_there, keeps_image=False)


def reads_at_random(image, threads, count, length):
    """Reads ranges that begin at any page; the descriptor that has it open."""
    image = os.open(image, os.O_RDONLY | os.O_DIRECT)
    pages = (os.fstat(image).st_size - length) // mmap.PAGESIZE
    chosen = random.Random(7)

    def one(at):
        assert os.preadv(image, [mmap.mmap(-1, length)], at) == length

    with ThreadPoolExecutor(threads) as pool:
        list(pool.map(one, [chosen.randrange(pages) * mmap.PAGESIZE for _ in range(count)]))
    return image


def test_what_there_is_no_memory_for_is_let_go_of_at_once(mounts, shards):
    evict(sources(shards))
    mount = mounts(shards, "--memory", "16M")
    image = reads_at_random(mount / "llama/model.safetensors", 32, 1024, MIB)
    until("hardly any of it is there", lambda: of_page_cache(sources(shards)) <= 4 * MIB)
    os.close(image)


@pytest.mark.parametrize("length", [mmap.PAGESIZE, 16 * mmap.PAGESIZE, MIB])
def test_a_little_of_another_filesystem_is_let_go_of_at_once(mounts, shards, length):
    between = mounts(shards, "--keep", "*", "--no-passthrough")
    evict(sources(between.point))
    image = reads_at_random(mounts(between.point) / "llama/model.safetensors", 1, 64, length)
    # And nothing is read ahead of it that would stay.
    until("hardly any of it is there", lambda: of_page_cache(sources(between.point)) <= 2 * MIB)
    os.close(image)


def test_of_some_that_is_gathered_and_some_that_is_not_nothing_is_left(mounts, mixed):
    between = mounts(mixed, "--keep", "*", "--no-passthrough")
    evict(sources(between.point))
    mount = mounts(between.point, "--memory", "64M")
    os.close(reads_at_random(mount / "loose/mixed.safetensors", 8, 40, MIB))
    until("the image is closed", lambda: mount.stats()["virtual_files"]["open"] == 0)
    until("nothing of it is there", lambda: of_page_cache(sources(between.point)) <= EDGES)


def test_what_others_have_read_since_the_image_was_opened_stays(mounts, shards):
    between = mounts(shards, "--keep", "*", "--no-passthrough")
    path = sources(between.point)[0]

    def attempt():
        evict(sources(between.point))
        mount = mounts(between.point)
        with open(mount / "llama/model.safetensors", "rb", buffering=0) as image:
            image.read(MIB)
            read(path, range(16 * MIB, 24 * MIB))
            image.read()
            there = of_page_cache([path])
        until("the image is closed", lambda: mount.stats()["virtual_files"]["open"] == 0)
        mount.unmount()
        return min(there, of_page_cache([path])) >= 8 * MIB

    kept(attempt)


def test_what_lies_in_an_overlay_stays(mounts, strided, overlay):
    (source,) = sources(strided)
    mount = mounts(overlay(strided))
    source.read_bytes()
    before = of_page_cache([source])
    assert before >= 64 * MIB
    with open(mount / "loose/turned.safetensors", "rb") as file:
        assert len(file.read()) > 64 * MIB
    until("the image is closed", lambda: mount.stats()["virtual_files"]["open"] == 0)
    assert of_page_cache([source]) >= before // 2
