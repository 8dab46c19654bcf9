"""The measured process: does its work on something tiny, so that all that it imports is there, says `ready`, waits
for a line, and then does it on PATH and prints what it took as JSON.

    bench.worker MODULE WAY TINY PATH [WORD...]

In: a way, which given a path and words makes ready and gives what is measured: a call that returns a number, the
same of all who do the same. Then a path for a try, or nothing, and the one that counts, which need not be there before
the line comes.
Out: when it began and ended, on the system's clock; seconds of processor; the memory at the peak above what was there
before, in bytes; and the number. It ends with its input, so that many at once have what they loaded until all are
done.
"""

import ctypes
import importlib
import inspect
import json
import os
import subprocess
import sys
import time
from pathlib import Path

from bench.fixtures import of_status

# Python has no name for it.
MADV_POPULATE_READ = 22


def keep_programs():
    """Has all pages of this process's programs mapped: those that are not go when caches are dropped, and the kernel
    then reads half a gigabyte of libraries beside what is measured."""
    libc = ctypes.CDLL(None)
    for line in Path("/proc/self/maps").read_text().splitlines():
        place, access, _, _, _, *path = line.split(maxsplit=5)
        if access.startswith("r") and path and path[0].startswith("/"):
            start, end = (int(address, 16) for address in place.split("-"))
            libc.madvise(ctypes.c_void_p(start), ctypes.c_size_t(end - start), MADV_POPULATE_READ)


class Measured:
    """Such a process, seen from who measures. It is ready when this is made. A way and its words, names or what has
    one, are one tuple."""

    def __init__(self, way, tiny, path, env=None):
        way, *words = way
        module, words = f"bench.{Path(inspect.getfile(way)).stem}", [getattr(word, "__name__", word) for word in words]
        command = [sys.executable, "-P", "-m", __spec__.name, module, way.__name__, str(tiny or ""), str(path), *words]
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=env)
        self._said("ready")

    def go(self):
        self.process.stdin.write("go\n")
        self.process.stdin.flush()

    def took(self):
        return json.loads(self._said("{"))

    def end(self):
        self.process.communicate()

    def _said(self, start):
        line = self.process.stdout.readline()
        if not line.startswith(start):
            raise SystemExit(f"failed: {' '.join(self.process.args)}")
        return line


def main(module, way, tiny, path, *words):
    way = getattr(importlib.import_module(module), way)
    if tiny:
        way(tiny, *words)()
    measured = way(path, *words)
    keep_programs()
    Path("/proc/self/clear_refs").write_text("5")
    before = of_status("VmRSS")
    print("ready", flush=True)
    if not sys.stdin.readline():
        # Nobody measures any more.
        os._exit(1)
    start, used = time.monotonic(), time.process_time()
    number = measured()
    end, cpu = time.monotonic(), time.process_time() - used
    took = {"start": start, "end": end, "cpu": cpu, "peak": of_status("VmHWM") - before, "number": number}
    print(json.dumps(took), flush=True)
    sys.stdin.read()
    # What libraries do at their end is nothing to wait for.
    os._exit(0)


if __name__ == "__main__":
    main(*sys.argv[1:])
