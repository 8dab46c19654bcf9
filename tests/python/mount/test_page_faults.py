"""Any number of threads and processes may fault pages in at once, with one thread that answers them.

Programs map a model and touch it from many threads; a filesystem that waits for itself while it answers a fault hangs
them all.
"""

import hashlib
import random
import subprocess
import sys

import torch

from page_toucher import SECONDS
from program import COMMON
from samples import numbers, write_shards

THREADS, PROCESSES = 64, 8


def make(folder):
    write_shards(folder / "sharded", 1, 4, 4, 400)
    torch.save({"turned": numbers(2, 1000, 900).t(), "whole": numbers(3, 5000)}, folder / "b.pt")
    (folder / "as_it_is.dat").write_bytes(random.Random(4).randbytes(3 << 20))
    return ["sharded/model.safetensors", "b.safetensors", "as_it_is.dat"]


def expected(ckptfs, source, names, tmp_path):
    sums = []
    for n, name in enumerate(names):
        path = source / {"b.safetensors": "b.pt"}.get(name, name)
        if name.startswith("sharded"):
            path = source / "sharded"
        if not name.endswith(".dat"):
            path = ckptfs.export(path, tmp_path / f"export{n}")
        sums.append(hashlib.sha256(path.read_bytes()).hexdigest())
    return sums


def check(ckptfs, mounts, tmp_path, *options):
    source = tmp_path / "source"
    source.mkdir()
    names = make(source)
    sums = expected(ckptfs, source, names, tmp_path)
    mount = mounts(source, "--threads", "1", *options)
    paths = [str(mount / name) for name in names]
    # In another process: one that hangs in a fault can only be abandoned.
    command = [sys.executable, COMMON / "page_toucher.py", *paths]
    for threads, processes in [(THREADS, 1), (8, PROCESSES)]:
        running = [
            subprocess.Popen([*command, str(threads), str(n)], stdout=subprocess.PIPE, text=True)
            for n in range(processes)
        ]
        try:
            told = [process.communicate(timeout=SECONDS)[0].split() for process in running]
        finally:
            for process in running:
                process.kill()
        assert told == [sums] * processes
    mount.unmount()


def test_faults_on_a_plain_mount_are_answered(ckptfs, mounts, tmp_path):
    check(ckptfs, mounts, tmp_path)


def test_faults_are_answered_by_a_daemon_without_memory(ckptfs, mounts, tmp_path):
    check(ckptfs, mounts, tmp_path, "--no-passthrough", "--memory", "16M")
