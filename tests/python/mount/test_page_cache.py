"""A mount leaves the page cache of its sources as it found it. Bytes that it reads through there would be in memory
twice: there and in the virtual file."""

import mmap
import os
import random
import subprocess
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

from mounts import until
from page_cache import cached_bytes, evict
from samples import numbers, write_shards

MIB = 1 << 20

# Bytes of the first file that are in the page cache before.
CACHED_BYTES = 4 * MIB

# Pages at the edges of reads, and those that tell a file's format.
EDGE_BYTES = MIB


@pytest.fixture
def shards(tmp_path):
    """A model of 64 MiB, and its files."""
    write_shards(tmp_path / "models/llama", 1, 2, 8, 1024)
    return tmp_path / "models"


@pytest.fixture
def strided(tmp_path):
    """A checkpoint of 64 MiB whose tensor is strided."""
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
    """Shows a folder through an overlay, as containers do; gone when the test is."""
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
    """Reads a range without readahead, so that exactly these pages are cached."""
    with open(path, "rb", buffering=0) as file:
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_RANDOM)
        assert len(os.pread(file.fileno(), len(range_of), range_of.start)) == len(range_of)


def kept(attempt):
    """The system may evict pages by itself now and then: pages that are missing every time were evicted by the mount.
    """
    for _ in range(3):
        if attempt():
            return
    raise AssertionError("what was there before is let go of")


def reads_once(mounts, point, virtual_file, sources, keeps_virtual_file=True):
    """Reads a virtual file while only a part of the first source is in memory."""

    def attempt():
        evict(sources)
        read(sources[0], range(CACHED_BYTES))
        mount = mounts(point)
        assert len((mount / virtual_file).read_bytes()) > 64 * MIB
        until("no more of it is there", lambda: cached_bytes(sources) <= CACHED_BYTES + EDGE_BYTES)
        virtual_file_bytes = cached_bytes([mount / virtual_file]) if keeps_virtual_file else 32 * MIB
        mount.unmount()
        return cached_bytes(sources) >= CACHED_BYTES and virtual_file_bytes >= 32 * MIB

    kept(attempt)


def test_direct_reads_leave_the_page_cache_as_it_was(mounts, shards):
    reads_once(mounts, shards, "llama/model.safetensors", sources(shards))


def test_gathered_tensors_leave_the_page_cache_as_it_was(mounts, strided):
    reads_once(mounts, strided, "loose/turned.safetensors", sources(strided))


def test_remote_files_leave_the_page_cache_as_it_was(mounts, shards):
    # A mount of ours, like every FUSE filesystem, is such a one for another mount.
    between = mounts(shards, "--keep", "*", "--no-passthrough")
    # Such a filesystem does not reveal writers: a file that young is read anew at each open.
    sources_there = sources(between.point)
    reads_once(mounts, between.point, "llama/model.safetensors", sources_there, keeps_virtual_file=False)


def reads_at_random(virtual_file, threads, count, length):
    """Reads ranges that begin at any page; gives the open descriptor."""
    virtual_file = os.open(virtual_file, os.O_RDONLY | os.O_DIRECT)
    pages = (os.fstat(virtual_file).st_size - length) // mmap.PAGESIZE
    chosen = random.Random(7)

    def one(at):
        assert os.preadv(virtual_file, [mmap.mmap(-1, length)], at) == length

    with ThreadPoolExecutor(threads) as pool:
        list(pool.map(one, [chosen.randrange(pages) * mmap.PAGESIZE for _ in range(count)]))
    return virtual_file


def test_reads_without_buffers_are_evicted_at_once(mounts, shards):
    evict(sources(shards))
    mount = mounts(shards, "--memory", "16M")
    virtual_file = reads_at_random(mount / "llama/model.safetensors", 32, 1024, MIB)
    until("hardly any of it is there", lambda: cached_bytes(sources(shards)) <= 4 * MIB)
    os.close(virtual_file)


@pytest.mark.parametrize("length", [mmap.PAGESIZE, 16 * mmap.PAGESIZE, MIB])
def test_small_remote_reads_are_evicted_at_once(mounts, shards, length):
    between = mounts(shards, "--keep", "*", "--no-passthrough")
    evict(sources(between.point))
    virtual_file = reads_at_random(mounts(between.point) / "llama/model.safetensors", 1, 64, length)
    # And no readahead of it stays.
    until("hardly any of it is there", lambda: cached_bytes(sources(between.point)) <= 2 * MIB)
    os.close(virtual_file)


def test_a_mix_of_gathered_and_plain_tensors_leaves_nothing(mounts, mixed):
    between = mounts(mixed, "--keep", "*", "--no-passthrough")
    evict(sources(between.point))
    mount = mounts(between.point, "--memory", "64M")
    os.close(reads_at_random(mount / "loose/mixed.safetensors", 8, 40, MIB))
    until("the virtual_file is closed", lambda: mount.stats()["virtual_files"]["open"] == 0)
    until("nothing of it is there", lambda: cached_bytes(sources(between.point)) <= EDGE_BYTES)


def test_later_reads_of_others_stay_cached(mounts, shards):
    between = mounts(shards, "--keep", "*", "--no-passthrough")
    path = sources(between.point)[0]

    def attempt():
        evict(sources(between.point))
        mount = mounts(between.point)
        with open(mount / "llama/model.safetensors", "rb", buffering=0) as virtual_file:
            virtual_file.read(MIB)
            read(path, range(16 * MIB, 24 * MIB))
            virtual_file.read()
            there = cached_bytes([path])
        until("the virtual_file is closed", lambda: mount.stats()["virtual_files"]["open"] == 0)
        mount.unmount()
        return min(there, cached_bytes([path])) >= 8 * MIB

    kept(attempt)


def test_files_of_an_overlay_stay_cached(mounts, strided, overlay):
    (source,) = sources(strided)
    mount = mounts(overlay(strided))
    source.read_bytes()
    before = cached_bytes([source])
    assert before >= 64 * MIB
    with open(mount / "loose/turned.safetensors", "rb") as file:
        assert len(file.read()) > 64 * MIB
    until("the virtual_file is closed", lambda: mount.stats()["virtual_files"]["open"] == 0)
    assert cached_bytes([source]) >= before // 2
