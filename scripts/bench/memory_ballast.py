"""Free memory that the system owns, while something is measured.

A virtual machine's host may take back what its guest does not use, here what has been free for a second, and each
page of it that is used again then costs many times what copying it does. A load of two gigabytes takes longer than
that: the second half of it would measure the host. So a process of ours has all memory but a little, and gives it
to the others just as fast as they take it.

What little is left free is taken back as well, if it is for long: so just before something is measured it is used
once.

In: when to take again what is free, and when something is about to be measured. Out: nothing; whoever measures finds
memory as on a machine of their own.
"""

import mmap
import os
import select

CHUNK = 32 << 20

# Free memory below which some is given, and up to which. Above it nobody has to wait for the kernel's reclaim.
LEAST, ENOUGH = 768 << 20, 1024 << 20

# Of what is left free so much is not used before something is measured. With less there may be no huge page left, for
# which the kernel takes from the page cache; and the most recently used is given first.
UNUSED = 448 << 20

# How often to look, in seconds: no more than some MiB are taken meanwhile.
OFTEN = 0.002


def free():
    return os.sysconf("SC_AVPHYS_PAGES") * mmap.PAGESIZE


class Keeper:
    """Such a process, until it is closed or whoever made it ends."""

    def __init__(self):
        said, self._say = os.pipe()
        self._heard, hear = os.pipe()
        self._pid = os.fork()
        if self._pid == 0:
            try:
                os.close(self._say)
                keep(said, hear)
            finally:
                os._exit(0)
        os.close(said)
        os.close(hear)

    def take(self):
        """Has it take all that is free now, but for the least."""
        self._ask(b"t")

    def renew(self):
        """Has it use once what is free."""
        self._ask(b"r")

    def _ask(self, what):
        try:
            os.write(self._say, what)
            is_done = os.read(self._heard, 1)
        except BrokenPipeError:
            is_done = False
        if not is_done:
            raise SystemExit("failed: who keeps free memory has ended. Did other programs need all of it?")

    def close(self):
        os.close(self._say)
        os.close(self._heard)
        os.waitpid(self._pid, 0)


def keep(said, hear):
    # If memory runs out this is the one to go.
    with open("/proc/self/oom_score_adj", "w") as file:
        file.write("1000")
    # Who takes memory must not wait for it to be given.
    os.nice(-20)
    kept = []
    while True:
        if select.select([said], [], [], OFTEN)[0]:
            match os.read(said, 1):
                case b"t":
                    kept += taken_down_to(LEAST)
                case b"r":
                    for chunk in taken_down_to(UNUSED):
                        chunk.close()
                case _:
                    return
            os.write(hear, b".")
        if free() < LEAST:
            while kept and free() < ENOUGH:
                kept.pop().close()


def taken_down_to(least):
    """All that is free but for this much."""
    chunks = []
    while free() > least + CHUNK:
        chunks.append(taken())
    return chunks


def taken():
    """Memory that is there: each page of it was written."""
    chunk = mmap.mmap(-1, CHUNK, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    chunk.madvise(mmap.MADV_HUGEPAGE)
    for at in range(0, CHUNK, mmap.PAGESIZE):
        chunk[at] = 1
    return chunk
