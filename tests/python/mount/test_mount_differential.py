"""A file of the mount is its reference, byte for byte, however it is read.

Several processes of several threads read several mounts at once, in every way that the system has (random_reader.py).
They read virtual files of every kind, and passed-through files. The reference is what `ckptfs export` writes.
CKPTFS_OPERATIONS is the number of operations, and CKPTFS_SEED chooses them.
"""

import json
import os
import random
import subprocess
import sys
import time

from program import COMMON
from samples import write_all

OPERATIONS = int(os.environ.get("CKPTFS_OPERATIONS", 1_000_000))
SEED = int(os.environ.get("CKPTFS_SEED") or random.SystemRandom().randrange(2**32))

# Passed-through sources read by the kernel itself; by the daemon; and by a daemon with one thread and no memory.
MOUNTS = [[], ["--no-passthrough"], ["--no-passthrough", "--memory", "16M", "--threads", "1"]]

WORKERS, THREADS, FORKS = 2, 4, 2


def test_every_way_of_reading_gives_the_same_bytes(ckptfs, mounts, tmp_path):
    print(f"CKPTFS_SEED={SEED} CKPTFS_OPERATIONS={OPERATIONS}")
    source, exports = tmp_path / "source", tmp_path / "exports"
    source.mkdir()
    exports.mkdir()
    virtual_files, as_they_are = write_all(source, SEED % 1000)
    references = {name: (str(source / name), str(source / name)) for name in as_they_are}
    for number, (name, made_of) in enumerate(virtual_files.items()):
        out = ckptfs.export(source / made_of, exports / f"{number}.safetensors")
        references[name] = (str(out), None)

    share = OPERATIONS // (len(MOUNTS) * WORKERS * (1 + FORKS)) + THREADS
    began = time.monotonic()
    running = []
    for options in MOUNTS:
        mount = mounts(source, *options)
        files = {str(mount / name): reference for name, reference in references.items()}
        for path, (reference, _) in files.items():
            assert os.stat(path).st_size == os.stat(reference).st_size
        for worker in range(WORKERS):
            orders = {
                "files": files, "seed": f"{SEED} {options} {worker}", "operations": share,
                "threads": THREADS, "forks": FORKS,
            }  # fmt: skip
            command = [sys.executable, COMMON / "random_reader.py", json.dumps(orders)]
            pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
            running.append(subprocess.Popen(command, **pipes, text=True))
    told = [process.communicate() for process in running]
    done = sum(int(line) for out, _ in told for line in out.split())
    print(f"{done} operations in {time.monotonic() - began:.0f} s")
    wrong = "\n".join(said for _, said in told)
    assert not any(process.returncode for process in running), f"seed {SEED}\n{wrong}"
    assert done >= OPERATIONS
    for mount in mounts.all:
        assert mount.logged() == ""
        mount.unmount()
