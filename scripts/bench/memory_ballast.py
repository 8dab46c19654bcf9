"""A process that holds free memory while something is measured.

A virtual machine's host may take back what its guest does not use, here what has been free for a second. Each page of
it that is used again then costs many times what copying it does. A load of two gigabytes takes longer than a second:
its second half would measure the host. So a process holds all memory but a little, and frees it as fast as the others
take it. What little is free is used once just before something is measured, for the same reason.
"""

import mmap
import os
import select

CHUNK_BYTES = 32 << 20

# Below the first much free memory some is given, up to the second. Above it nothing waits for the kernel's reclaim.
MIN_FREE_BYTES, ENOUGH_FREE_BYTES = 768 << 20, 1024 << 20

# How much free memory stays unused before something is measured. With less there may be no huge page left, for which
# the kernel takes from the page cache. The most recently used is given first.
UNUSED_BYTES = 448 << 20

# How often to look: no more than some MiB are taken meanwhile.
POLL_SECONDS = 0.002


def free():
    """Bytes of free memory."""
    return os.sysconf("SC_AVPHYS_PAGES") * mmap.PAGESIZE


class Ballast:
    """Such a process, until it is closed or its parent ends."""

    def __init__(self):
        requests, self._requests = os.pipe()
        self._answers, answers = os.pipe()
        self._pid = os.fork()
        if self._pid == 0:
            try:
                os.close(self._requests)
                hold(requests, answers)
            finally:
                os._exit(0)
        os.close(requests)
        os.close(answers)

    def take(self):
        """Makes it allocate all memory that is free now, except the minimum."""
        self._ask(b"t")

    def renew(self):
        """Makes it allocate, touch and free all free memory once."""
        self._ask(b"r")

    def _ask(self, request):
        try:
            os.write(self._requests, request)
            is_done = os.read(self._answers, 1)
        except BrokenPipeError:
            is_done = False
        if not is_done:
            raise SystemExit("failed: the process that holds free memory has ended. Did other programs need all of it?")

    def close(self):
        """Ends the process of the ballast."""
        os.close(self._requests)
        os.close(self._answers)
        os.waitpid(self._pid, 0)


class NoBallast:
    """Leaves free memory as it is."""

    def take(self):
        """Does nothing."""

    def renew(self):
        """Does nothing."""

    def close(self):
        """Does nothing."""


def hold(requests, answers):
    """Holds memory until the requests end."""
    # If memory runs out this is the process to end.
    with open("/proc/self/oom_score_adj", "w") as file:
        file.write("1000")
    # A process that takes memory must not wait for this one.
    os.nice(-20)
    held = []
    while True:
        if select.select([requests], [], [], POLL_SECONDS)[0]:
            match os.read(requests, 1):
                case b"t":
                    held += taken_down_to(MIN_FREE_BYTES)
                case b"r":
                    for chunk in taken_down_to(UNUSED_BYTES):
                        chunk.close()
                case _:
                    return
            os.write(answers, b".")
        if free() < MIN_FREE_BYTES:
            while held and free() < ENOUGH_FREE_BYTES:
                held.pop().close()


def taken_down_to(least):
    """All free memory but this much, in chunks."""
    chunks = []
    while free() > least + CHUNK_BYTES:
        chunks.append(taken())
    return chunks


def taken():
    """A chunk of memory whose pages were all written."""
    chunk = mmap.mmap(-1, CHUNK_BYTES, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    chunk.madvise(mmap.MADV_HUGEPAGE)
    for at in range(0, CHUNK_BYTES, mmap.PAGESIZE):
        chunk[at] = 1
    return chunk
