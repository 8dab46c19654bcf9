"""Touches every page of mapped files from many threads, and prints the hash of each file.

    python page_toucher.py FILE... THREADS SEED
"""

import hashlib
import mmap
import os
import random
import sys
import threading

SECONDS = 120


def touch(paths, seed, threads):
    """Faults in every page of every file, each thread in an order of its own, and drops pages in between. Gives the
    hash of each file."""
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
                # Pages that others map stay; dropped ones are read again.
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


if __name__ == "__main__":
    *paths, threads, seed = sys.argv[1:]
    print(*touch(paths, seed, int(threads)))
