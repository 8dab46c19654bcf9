"""fio, which verifies every block that it reads, finds no fault with a mount.

fio writes blocks that carry their own checksum and offset. They become the values of a tensor, at the offsets in the
virtual file that they were written for, and a passed-through file.
"""

import shutil
import subprocess

import pytest
import torch
from safetensors.torch import save_file

from compare import DATA_ALIGNMENT, read_header

FILE_BYTES = 24 << 20
BLOCK = 4096

JOBS = {
    "sequential": ["--rw=read", "--bs=128k", "--ioengine=psync"],
    "random": ["--rw=randread", "--bs=4k", "--ioengine=psync"],
    "many at once": ["--rw=randread", "--bs=16k", "--ioengine=psync", "--numjobs=4", "--thread"],
    "vectors": ["--rw=randread", "--bs=64k", "--ioengine=pvsync2"],
    "direct": ["--rw=read", "--bs=1m", "--direct=1", "--ioengine=psync"],
    "random direct": ["--rw=randread", "--bs=8k", "--direct=1", "--ioengine=psync"],
    "queued": ["--rw=randread", "--bs=32k", "--direct=1", "--ioengine=libaio", "--iodepth=32"],
}

# fio's own mappings start at the wrong place where a job does not start at the file's beginning. So these fault the
# pages in, and the next job verifies those pages.
FAULTS = {
    "mmap": ["--rw=read", "--bs=64k", "--ioengine=mmap"],
    "random mmap": ["--rw=randread", "--bs=4k", "--ioengine=mmap", "--numjobs=4", "--thread"],
}
AFTER_FAULTS = ["--rw=read", "--bs=4k", "--ioengine=psync", "--invalidate=0"]

VERIFIED = [
    f"--offset={DATA_ALIGNMENT}", "--verify=crc32c", f"--verify_interval={BLOCK}",
    "--verify_fatal=1",
]  # fmt: skip


def fio(path, *options):
    assert shutil.which("fio"), "these tests need fio: apt-get install fio"
    command = [
        "fio", "--name=job", f"--filename={path}", f"--size={FILE_BYTES}", "--group_reporting", *options
    ]  # fmt: skip
    return subprocess.run(command, capture_output=True, text=True, cwd="/tmp", timeout=120)


@pytest.fixture(scope="module")
def blocks(tmp_path_factory):
    """A file of fio's blocks."""
    path = tmp_path_factory.mktemp("fio") / "blocks"
    written = fio(path, *VERIFIED, "--rw=write", "--bs=64k", "--do_verify=0", "--randseed=7")
    assert written.returncode == 0, written.stderr
    assert path.stat().st_size == DATA_ALIGNMENT + FILE_BYTES
    return path


@pytest.fixture
def source(blocks, tmp_path):
    """The blocks as a contiguous tensor, as a transposed one, in shards, and as they are."""
    source = tmp_path / "source"
    source.mkdir()
    raw = bytearray(blocks.read_bytes()[DATA_ALIGNMENT:])
    values = torch.frombuffer(raw, dtype=torch.uint8)
    torch.save({"values": values}, source / "in_order.bin")
    torch.save({"values": values.view(3 << 10, -1).t().contiguous().t()}, source / "turned.pt")
    halves = values.chunk(2)
    (source / "shards").mkdir()
    for n, half in enumerate(halves, 1):
        path = source / f"shards/model-{n:05}-of-00002.safetensors"
        save_file({f"values.{n}": half.clone()}, path)
    shutil.copy(blocks, source / "as_it_is.dat")
    return source


FILES = ["in_order.safetensors", "turned.safetensors", "shards/model.safetensors", "as_it_is.dat"]


@pytest.mark.parametrize("options", [[], ["--no-passthrough", "--threads", "1"]], ids=str)
def test_every_block_is_right(mounts, source, options):
    mount = mounts(source, *options)
    for name in FILES[:-1]:
        assert read_header(mount / name)[2] == DATA_ALIGNMENT
    for name in FILES:
        for job, how in JOBS.items():
            right(mount / name, job, *VERIFIED, *how)
        for job, how in FAULTS.items():
            right(mount / name, job, *how)
            right(mount / name, f"after {job}", *VERIFIED, *AFTER_FAULTS)
    mount.unmount()


def right(path, job, *how):
    done = fio(path, "--readonly", *how)
    assert done.returncode == 0, f"{job} of {path}: {done.stdout} {done.stderr}"


def test_one_wrong_byte_is_found(blocks, tmp_path):
    """A wrong block is found: fio can fail here."""
    wrong = tmp_path / "wrong"
    raw = bytearray(blocks.read_bytes())
    raw[-100] ^= 1
    wrong.write_bytes(raw)
    for job, how in JOBS.items():
        assert fio(blocks, "--readonly", *VERIFIED, *how).returncode == 0, job
        assert fio(wrong, "--readonly", *VERIFIED, *how).returncode != 0, job
