"""The next open shows the written bytes, however long the write took and whatever was read meanwhile.

The kernel stamps a file when a write begins, and a mapped page once for many stores. A read in between returns a
mixture under a timestamp that looks final.
"""

import ctypes
import mmap
import os
import random
import struct
import subprocess
import sys
import time

import pytest
import torch

from mounts import until

# More and longer writes find rarer faults.
WRITES = int(os.environ.get("CKPTFS_TEST_WRITES", 24))
LONGEST_WRITE_BYTES = int(os.environ.get("CKPTFS_TEST_LONGEST_WRITE", 24 << 20))
READERS = 3
STEP_BYTES = 1 << 20

# Fills a range of a file in one of several ways, reports it, and keeps the file open until its input ends.
WRITER = """
import mmap, os, sys
how, path, start, length, fill = sys.argv[1], sys.argv[2], *map(int, sys.argv[3:])
flags = os.O_RDWR | (os.O_DIRECT if how == "direct" else 0)
file = os.open(path, flags)
new = mmap.mmap(-1, length)
new.write(bytes([fill]) * length)
if how == "mapped":
    stores = mmap.mmap(file, 0)
    stores[start:start + length] = new[:]
    stores.flush()
elif how == "stores":
    stores = mmap.mmap(file, 0)
    stores[start:start + length] = new[:]
elif how == "truncated":
    old = os.pread(file, start, 0)
    size = os.fstat(file).st_size
    os.ftruncate(file, 0)
    os.pwrite(file, old, 0)
    os.pwrite(file, new, start)
    os.ftruncate(file, size)
else:
    done = os.pwrite(file, new, start)
    assert done == length
print("ended", flush=True)
sys.stdin.read()
"""
# Reads at random offsets until it is killed, by read calls and by a mapping, as loaders do. Each look is a process of
# its own, because a truncated mapping kills its process.
READER = """
import mmap, os, random, signal, sys
path, step, rng = sys.argv[1], int(sys.argv[2]), random.Random(sys.argv[3])
def look():
    with open(path, "rb", buffering=0) as file:
        size = os.fstat(file.fileno()).st_size
        for _ in range(8):
            os.pread(file.fileno(), step, rng.randrange(size))
        with mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ) as mapped:
            at = rng.randrange(size) // step * step
            for page in range(at, min(at + step, size), mmap.PAGESIZE):
                mapped[page]
while True:
    rng.random()
    child = os.fork()
    if child == 0:
        try:
            look()
        finally:
            os._exit(0)  # The file may be no checkpoint at this moment, or another one than before.
    os.waitpid(child, 0)
"""
WAYS = ("one", "direct", "mapped", "stores", "truncated")


def write_shard(path, name, size):
    header = b'{"%s":{"dtype":"U8","shape":[%d],"data_offsets":[0,%d]}}' % (name.encode(), size, size)
    header += b" " * (-(len(header) + 8) % 4096)
    with open(path, "wb") as file:
        file.write(struct.pack("<Q", len(header)) + header)
        for _ in range(0, size, STEP_BYTES):
            file.write(bytes([1]) * STEP_BYTES)
    return 8 + len(header)


def count_stale_pages(shown, source, start):
    """The number of pages of a tensor that differ from its source."""
    pages = 0
    with open(shown, "rb", buffering=0) as new, open(source, "rb", buffering=0) as old:
        data = 8 + struct.unpack("<Q", new.read(8))[0]
        for at in range(0, LONGEST_WRITE_BYTES, STEP_BYTES):
            one, other = os.pread(new.fileno(), STEP_BYTES, data + at), os.pread(old.fileno(), STEP_BYTES, start + at)
            if one != other:
                pages += sum(one[n : n + 4096] != other[n : n + 4096] for n in range(0, STEP_BYTES, 4096))
    return pages


def stale_pages_after_writes(shown, source, start):
    """Writes to the source repeatedly. Returns the number of stale pages that the mount shows, for each write that has
    any."""
    rng = random.Random(5)
    stale = {}
    for n in range(WRITES):
        length = int(4096 * 2 ** (rng.random() * (LONGEST_WRITE_BYTES // 4096).bit_length()))
        length = max(4096, min(LONGEST_WRITE_BYTES, length) // 4096 * 4096)
        at = start + rng.randrange(0, LONGEST_WRITE_BYTES - length + 1, 4096)
        how = WAYS[n % len(WAYS)]
        command = [sys.executable, "-c", WRITER, how, source, at, length, 2 + n % 250]
        writer = subprocess.Popen(
            list(map(str, command)), stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        try:
            assert writer.stdout.readline() == "ended\n", how
            if rng.random() < 0.5:
                writer.communicate()
            # After a truncation the mount may take the file for no checkpoint until it is read again.
            until("the name is there again", shown.exists)
            # Readers that opened it before go on during the comparison.
            for _ in range(2):
                if pages := count_stale_pages(shown, source, start):
                    stale[n, how, length] = pages
        finally:
            writer.communicate()
        assert writer.returncode == 0
    return stale


@pytest.mark.parametrize("options", [(), ("--memory", "64M", "--readahead", "0")], ids=["", "little-memory"])
def test_an_open_after_a_write_shows_all_of_it(mounts, tmp_path, options):
    models = tmp_path / "models"
    models.mkdir()
    source = models / "model-00001-of-00002.safetensors"
    start = write_shard(source, "a", LONGEST_WRITE_BYTES)
    write_shard(models / "model-00002-of-00002.safetensors", "b", STEP_BYTES)
    mount = mounts(models, *options)
    shown = mount / "model.safetensors"
    reader = [sys.executable, "-c", READER, str(shown), str(STEP_BYTES)]
    readers = [subprocess.Popen([*reader, str(n)]) for n in range(READERS)]
    try:
        stale = stale_pages_after_writes(shown, source, start)
    finally:
        for process in readers:
            process.kill()
            process.wait()
    assert stale == {}


class Stores:
    """A mapping for stores, of a file that no descriptor holds open for writing any more."""

    def __init__(self, path):
        self.libc = ctypes.CDLL(None, use_errno=True)
        self.libc.mmap.restype = ctypes.c_void_p
        self.libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long]
        self.size = path.stat().st_size
        file = os.open(path, os.O_RDWR)
        self.at = self.libc.mmap(None, self.size, mmap.PROT_READ | mmap.PROT_WRITE, mmap.MAP_SHARED, file, 0)
        os.close(file)
        assert self.at != ctypes.c_void_p(-1).value
        # Pages that are mapped for reading first may take stores afterwards without a fault.
        ctypes.string_at(self.at, self.size)

    def fill(self, start, value, length):
        ctypes.memset(self.at + start, value, length)

    def end(self):
        self.libc.munmap(ctypes.c_void_p(self.at), ctypes.c_size_t(self.size))


@pytest.fixture(params=["tmpfs", "overlay"])
def elsewhere(request, tmp_path):
    """A directory on a filesystem that does not reveal all stores; gone when the test is."""
    where = tmp_path / "elsewhere"
    where.mkdir()
    if request.param == "tmpfs":
        command = ["-t", "tmpfs", "tmpfs"]
    else:
        lower, upper, work = (tmp_path / name for name in ("lower", "upper", "work"))
        for folder in (lower, upper, work):
            folder.mkdir()
        command = ["-t", "overlay", "overlay", "-o", f"lowerdir={lower},upperdir={upper},workdir={work}"]
    subprocess.run(["mount", *command, where], check=True)
    yield where
    subprocess.run(["umount", "-l", where], check=True)


def test_stores_that_leave_no_timestamp_are_shown(mounts, elsewhere):
    # Transposed, so that its bytes go through the page cache of the source.
    side = 512
    file = elsewhere / "pytorch_model.bin"
    torch.save({"weight": torch.full((side, side), 1.0).t()}, file)
    start = file.read_bytes().index(torch.full((1024,), 1.0).numpy().tobytes())
    mount = mounts(elsewhere)
    stores = Stores(file)
    for value in range(2, 7):
        if value > 4:
            # From here on, each writer begins and ends between two opens.
            stores = Stores(file)
        stores.fill(start, value, 4 * side * side)
        if value >= 4:
            stores.end()
        # A timestamp, if there is one, is older than a step of the clock.
        time.sleep(0.3)
        shown = (mount / "model.safetensors").read_bytes()
        assert shown.count(bytes([value])) >= 4 * side * side
    mount.unmount()
