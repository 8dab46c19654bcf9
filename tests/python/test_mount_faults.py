"""Any number of threads and processes may fault pages in at once, with one thread that answers them.

Programs that load a model map it and touch it from many threads; a filesystem that waits for itself
while it answers a fault hangs them all.
"""

import hashlib
import mmap
import os
import random
import subprocess
import sys
import threading

import torch

from samples import numbers, write_shards

THREADS, PROCESSES = 64, 8
SECONDS = 120


def make(folder):
    write_shards(folder / "sharded", 1, 4, 4, 400)
    torch.save({"turned": numbers(2, 1000, 900).t(), "whole": numbers(3, 5000)}, folder / "b.pt")
    (folder / "as_it_is.dat").write_bytes(random.Random(4).randbytes(3 << 20))
    return ["sharded/model.safetensors", "b.safetensors", "as_it_is.dat"]


def touch(paths, seed, threads):
    """Faults in every page of every file, each thread in an order of its own, and drops pages in
    between. Says what was read."""
    files = [os.open(path, os.O_RDONLY) for path in paths]
    maps = [mmap.mmap(file, 0, prot=mmap.PROT_READ) for file in files]
    read = [[None] * -(-len(m) // mmap.PAGESIZE) for m in maps]
    start = threading.Barrier(threads)

    def work(number):
        rng = random.Random(f"{seed} {number}")
        pages = [(m, p) for m in range(len(maps)) for p in range(number, len(read[m]), threads)]
        rng.shuffle(pages)
        start.wait()
        for n, (m, page) in enumerate(pages):
            at = page * mmap.PAGESIZE
            read[m][page] = maps[m][at : at + mmap.PAGESIZE]
            if n % 16 == 0:
                # What is mapped by others stays; what they let go of is read again.
                size = min(64, len(read[m]) - page) * mmap.PAGESIZE
                maps[m].madvise(mmap.MADV_DONTNEED, at, min(size, len(maps[m]) - at))
                os.posix_fadvise(files[m], at, size, os.POSIX_FADV_DONTNEED)

    workers = [threading.Thread(target=work, args=(n,), daemon=True) for n in range(threads)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join(SECONDS)
        assert not worker.is_alive(), "a thread still waits for a page"
    return [hashlib.sha256(b"".join(pages)).hexdigest() for pages in read]


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
    # In another process: one that hangs in a fault can only be left.
    command = [sys.executable, __file__, *paths]
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


def test_as_it_is_mounted(ckptfs, mounts, tmp_path):
    check(ckptfs, mounts, tmp_path)


def test_every_byte_by_the_daemon_and_no_memory(ckptfs, mounts, tmp_path):
    check(ckptfs, mounts, tmp_path, "--no-passthrough", "--memory", "16M")


if __name__ == "__main__":
    *paths, threads, seed = sys.argv[1:]
    print(*touch(paths, seed, int(threads)))
