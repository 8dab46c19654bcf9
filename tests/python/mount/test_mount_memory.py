"""A daemon takes no more memory than its limit, whatever is read; with little memory it gets slower, not larger.

The limits are those of a control group of the system, of either version.
"""

import mmap
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from mounts import until
from program import COMMON
from samples import numbers, write_shards

GROUPS = Path("/sys/fs/cgroup")

# A model of twice the memory that its reader and its daemon have together.
LIMIT_BYTES = 192 << 20
SIDE, TENSORS, SHARDS = 2048, 6, 4

# Memory beside the caches, for threads, buffers and the program itself.
ALLOWANCE_BYTES = 64 << 20


class Group:
    """A control group with a limit of memory."""

    def __init__(self, limit):
        # A system has the memory controller in one hierarchy, of either version.
        version_2 = [GROUPS, GROUPS / "unified"]
        found = [at for at in version_2 if "memory" in read(at / "cgroup.controllers").split()]
        if found:
            subtree = found[0] / "cgroup.subtree_control"
            if "memory" not in read(subtree).split():
                subtree.write_text("+memory")
            self.path, file = found[0] / f"ckptfs-{os.getpid()}", "memory.max"
        else:
            assert (GROUPS / "memory").is_dir(), "these tests need control groups of memory"
            self.path = GROUPS / "memory" / f"ckptfs-{os.getpid()}"
            file = "memory.limit_in_bytes"
        self.path.mkdir()
        (self.path / file).write_text(str(limit))
        self.limit = int(read(self.path / file))

    def prefix(self):
        """The beginning of a command that runs in the group."""
        return ["sh", "-c", f'echo $$ > {self.path}/cgroup.procs && exec "$@"', "sh"]

    def members(self):
        return read(self.path / "cgroup.procs").split()

    def killed(self):
        """The number of processes killed for want of memory."""
        told = read(self.path / "memory.events") + read(self.path / "memory.oom_control")
        return sum(int(line.split()[1]) for line in told.splitlines() if "oom_kill " in line)

    def most(self):
        """The peak of memory in it."""
        return int(read(self.path / "memory.peak") or read(self.path / "memory.max_usage_in_bytes"))

    def remove(self):
        until("the group is empty", lambda: not self.members())
        self.path.rmdir()


def read(path):
    return path.read_text() if path.exists() else ""


@pytest.fixture
def group(mounts):
    group = Group(LIMIT_BYTES)
    yield group
    mounts.end()
    group.remove()


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    """Shards, and a file whose tensors have to be gathered."""
    source = tmp_path_factory.mktemp("memory") / "source"
    write_shards(source / "sharded", 1, SHARDS, TENSORS, SIDE)
    torch.save({"turned": numbers(5, 3000, 2000).t()}, source / "turned.pt")
    size = sum(path.stat().st_size for path in source.rglob("*") if path.is_file())
    assert size > 2 * LIMIT_BYTES
    os.sync()
    return source


def forget(source):
    """Evicts the source from the page cache, so that it is read from the disk."""
    for path in source.rglob("*"):
        if path.is_file():
            with path.open("rb") as file:
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


NAMES = ["sharded/model.safetensors", "turned.safetensors"]


READER = """
import mmap, os, sys
for path in sys.argv[1:]:
    with open(path, "rb") as file:
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_WILLNEED)
        seen = 0
        while chunk := file.read(1 << 20):
            seen += len(chunk)
        assert seen == os.stat(path).st_size
        with mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ) as mapped:
            sum(mapped[at] for at in range(0, len(mapped), 4096))
"""


def test_a_model_of_twice_the_memory_is_read_within_the_limit(mounts, group, source):
    assert group.limit == LIMIT_BYTES
    forget(source)
    mount = mounts(source, "--memory", "32M", prefix=group.prefix())
    assert str(mount.pid) in group.members(), "the daemon is limited too"
    command = [*group.prefix(), sys.executable, "-c", READER, *(mount / name for name in NAMES)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    assert group.killed() == 0
    assert group.most() > LIMIT_BYTES * 9 // 10, "the limit was never felt"
    assert "ERROR" not in mount.logged(), mount.logged()
    mount.unmount()


@pytest.mark.parametrize("memory, threads", [(16, 8), (64, 8), (16, 256)])
def test_the_budget_holds(mounts, source, memory, threads):
    """Several processes read at once, in ways that are hard to predict."""
    mount = mounts(source, "--memory", f"{memory}M", "--threads", str(threads), "--no-passthrough")
    before, _ = mount.resident()
    forget(source)
    paths = [mount / name for name in NAMES]
    running = [
        subprocess.Popen([sys.executable, "-c", READER, *paths]),
        subprocess.Popen(
            [sys.executable, COMMON / "page_toucher.py", paths[-1], "16", "1"], stdout=subprocess.DEVNULL
        ),
    ]
    most_held = most_resident = 0
    try:
        while any(process.poll() is None for process in running):
            stats = mount.stats()
            most_held = max(most_held, stats["memory"]["held"])
            most_resident = max(most_resident, mount.resident()[0])
    finally:
        for process in running:
            process.kill()
    assert [process.wait() for process in running] == [0, 0]
    print(f"held {most_held >> 20}, resident {before >> 20} to {most_resident >> 20} MiB")
    assert most_held <= memory << 20
    assert most_resident <= (memory << 20) + ALLOWANCE_BYTES
    mount.unmount()


def test_a_file_that_is_open_many_times_is_read_once(mounts, tmp_path):
    source, step, steps, readers = tmp_path / "source", 1 << 20, 24, 8
    source.mkdir()
    content = numbers(9, steps, step // 4).numpy().tobytes()
    with (source / "x.gguf").open("wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    mount = mounts(source, "--no-passthrough")
    files = [os.open(mount / "x.gguf", os.O_RDONLY | os.O_DIRECT) for _ in range(readers)]
    into = mmap.mmap(-1, step)
    for at in range(0, len(content), step):
        for file in files:
            assert os.preadv(file, [into], at) == step
            assert into[:] == content[at : at + step]
    cache = mount.stats()["cache"]
    assert cache["misses"] <= steps and cache["hits"] >= steps * (readers - 1), cache
    for file in files:
        os.close(file)
    mount.unmount()


def many_names(source, folders, names):
    for folder in range(folders):
        (source / f"{folder:03}").mkdir(parents=True)
        for name in range(names):
            (source / f"{folder:03}" / f"file-{name:06}.json").touch()


# Bytes that the daemon holds for each name that the kernel remembers, and for each name of an open listing.
PER_NAME, PER_LISTED_NAME = 256, 64


def test_a_name_that_the_kernel_remembers_takes_little(mounts, tmp_path):
    folders, names = 40, 1000
    many_names(tmp_path / "source", folders, names)
    mount = mounts(tmp_path / "source", "--memory", "16M")
    before, _ = mount.resident()
    found = subprocess.run(["find", mount.point, "-type", "f"], capture_output=True, check=True)
    assert found.stdout.count(b"\n") == folders * names
    grown = mount.resident()[0] - before
    print(f"{grown / folders / names:.0f} bytes a name")
    assert grown < folders * names * PER_NAME + (4 << 20)
    mount.unmount()


def test_directories_that_are_open_many_times_share_their_names(mounts, tmp_path):
    names, handles = 30_000, 40
    many_names(tmp_path / "source", 1, names)
    mount = mounts(tmp_path / "source", "--memory", "16M")
    folder = mount / "000"
    assert len(os.listdir(folder)) == names
    before, _ = mount.resident()
    readers = [os.scandir(folder) for _ in range(handles)]
    for reader in readers:
        next(reader)
    grown = mount.resident()[0] - before
    print(f"{grown >> 10} KiB for {handles} handles")
    assert grown < handles * names * PER_LISTED_NAME / 10
    # Even if names disappear in between, each of the others is listed once.
    (tmp_path / "source/000/file-020000.json").unlink()
    for reader in readers:
        rest = sum(1 for _ in reader)
        assert rest in (names - 1, names - 2)
        reader.close()
    mount.unmount()


def test_open_files_of_many_tensors_stay_within_the_budget(mounts, tmp_path):
    """Each takes most of the budget, so that the least recently read one is evicted and read again when needed."""
    tensors, files, budget = 50_000, 6, 16 << 20
    for n in range(files):
        folder = tmp_path / f"source/{n}"
        folder.mkdir(parents=True)
        for shard in (1, 2):
            entries = ",".join(
                f'"{shard}.layer.{t}.weight":{{"dtype":"U8","shape":[1],"data_offsets":[{t},{t + 1}]}}'
                for t in range(tensors)
            )
            header = f"{{{entries}}}".encode()
            data = bytes([16 * n + shard]) * tensors
            path = folder / f"model-0000{shard}-of-00002.safetensors"
            path.write_bytes(len(header).to_bytes(8, "little") + header + data)
    mount = mounts(tmp_path / "source", "--memory", "16M")
    opened = [open(mount / f"{n}/model.safetensors", "rb", buffering=0) for n in range(files)]
    size = os.fstat(opened[0].fileno()).st_size
    for turn in range(2):
        for n, file in enumerate(opened):
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
            assert set(os.pread(file.fileno(), 2 * tensors, size - 2 * tensors)) == {16 * n + 1, 16 * n + 2}
            held = mount.stats()["memory"]["held"]
            # A single one is held even if it is larger than the budget.
            assert held < budget + (32 << 20), f"{held >> 20} MiB in turn {turn}"
    print(f"resident {mount.resident()[0] >> 20} MiB, held {held >> 20} MiB")
    assert mount.resident()[0] < budget + ALLOWANCE_BYTES + (32 << 20)
    for file in opened:
        file.close()
    mount.unmount()
