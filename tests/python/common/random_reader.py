"""Reads files in every way that the system has, at random, and compares with their references.

Run as a program, its argument is a JSON of {files: {path: path of its reference}, seed, operations, threads, forks}.
It exits with 0 if every read was right. It reports each wrong read, and how many there were.
"""

import json
import mmap
import os
import random
import sys
import threading
from dataclasses import dataclass

PAGE = 4096

# Mostly small reads, so that there are many of them; a few are larger than any request.
SMALL, LARGE = 15, 21

# How often each way of reading is taken, of a thousand.
WEIGHTS = {
    "pread": 250,
    "mapped": 250,
    "readv": 90,
    "preadv": 90,
    "seek": 40,
    "sendfile": 50,
    "splice": 50,
    "direct": 80,
    "advise": 60,
    "madvise": 20,
    "reopen": 10,
    "copy": 10,
}


@dataclass
class Wrong(Exception):
    what: str
    path: str
    offset: int
    length: int

    def __str__(self):
        return f"{self.what} of {self.path} at {self.offset}, {self.length} bytes: wrong"


class File:
    """One file as one thread has it open."""

    def __init__(self, path, expected, original=None):
        self.path, self.expected, self.original = path, expected, original
        self.size = len(expected)
        self.open()

    def open(self):
        self.fd = os.open(self.path, os.O_RDONLY)
        self.direct = os.open(self.path, os.O_RDONLY | os.O_DIRECT)
        self.map = mmap.mmap(self.fd, 0, prot=mmap.PROT_READ) if self.size else None

    def close(self):
        if self.map is not None:
            self.map.close()
        os.close(self.fd)
        os.close(self.direct)


class Reader:
    """Reads files at random. Its state is its own, except for descriptors that are shared after a fork."""

    def __init__(self, files, seed):
        self.rng = random.Random(seed)
        self.files = files
        self.pipe = os.pipe()
        # F_SETPIPE_SZ: a pipe that holds one whole transfer.
        import fcntl

        self.room = fcntl.fcntl(self.pipe[1], 1031, 1 << 20)
        # Aligned memory, for direct reads.
        self.memory = mmap.mmap(-1, (1 << LARGE) + 2 * PAGE)
        self.sink = os.open("/tmp", os.O_TMPFILE | os.O_RDWR)
        self.ways = [getattr(self, way) for way, weight in WEIGHTS.items() for _ in range(weight)]
        self.done = 0

    def run(self, operations):
        rng, ways, files = self.rng.random, self.ways, self.files
        for _ in range(operations):
            file = files[int(rng() * len(files))]
            length = int(2 ** (rng() * SMALL)) if rng() < 0.998 else int(2 ** (rng() * LARGE))
            # A read may begin and end behind the end of the file.
            offset = int(rng() * (file.size + 10))
            ways[int(rng() * len(ways))](file, offset, length)
            self.done += 1

    def check(self, what, file, offset, length, got):
        if got != file.expected[offset : offset + length]:
            raise Wrong(what, file.path, offset, length)

    def pread(self, file, offset, length):
        self.check("pread", file, offset, length, os.pread(file.fd, length, offset))

    def mapped(self, file, offset, length):
        if file.map is not None:
            got = file.map[offset : offset + length]
            self.check("a mapping", file, offset, length, got)

    def parts(self, length):
        """Buffers of odd lengths with the given total."""
        cut = int(self.rng.random() * length)
        return [bytearray(1), bytearray(cut), bytearray(length - cut)]

    def preadv(self, file, offset, length):
        parts = self.parts(length)
        read = os.preadv(file.fd, parts, offset)
        self.check("preadv", file, offset, length + 1, b"".join(parts)[:read])

    def readv(self, file, offset, length):
        # A descriptor shared with other processes has one position for all.
        fd = os.open(file.path, os.O_RDONLY)
        try:
            os.lseek(fd, offset, os.SEEK_SET)
            parts = self.parts(length)
            read = os.readv(fd, parts)
            self.check("readv", file, offset, length + 1, b"".join(parts)[:read])
            end = min(file.size, offset + length + 1) if offset < file.size else offset
            if os.lseek(fd, 0, os.SEEK_CUR) != end:
                raise Wrong("the position after readv", file.path, offset, length)
        finally:
            os.close(fd)

    def seek(self, file, offset, length):
        for whence, inside in [(os.SEEK_DATA, offset), (os.SEEK_HOLE, file.size)]:
            try:
                found = os.lseek(file.fd, offset, whence)
            except OSError as error:
                found = error.strerror
            if found != (inside if offset < file.size else "No such device or address"):
                raise Wrong(f"seeking ({whence}): {found}", file.path, offset, length)

    def through_pipe(self, what, file, offset, length, send):
        length = min(length, self.room - 2 * PAGE)
        sent = send(length)
        got = os.read(self.pipe[0], sent) if sent else b""
        self.check(what, file, offset, sent, got)
        if sent == 0 and offset < file.size:
            raise Wrong(f"{what}: nothing", file.path, offset, length)

    def sendfile(self, file, offset, length):
        send = lambda n: os.sendfile(self.pipe[1], file.fd, offset, n)
        self.through_pipe("sendfile", file, offset, length, send)

    def splice(self, file, offset, length):
        send = lambda n: os.splice(file.fd, self.pipe[1], n, offset_src=offset)
        self.through_pipe("splice", file, offset, length, send)

    def direct(self, file, offset, length):
        at = 0
        if self.rng.random() < 0.5:
            offset, length = offset // PAGE * PAGE, -(-length // PAGE) * PAGE
        else:
            at = self.rng.randrange(PAGE)
        into = memoryview(self.memory)[at : at + length]
        try:
            read = os.preadv(file.direct, [into], offset)
        except OSError as error:
            # A passed-through file refuses what the original refuses.
            if file.original is None or self.original_reads(file, into, offset):
                raise Wrong(f"a direct read: {error}", file.path, offset, length) from error
            return
        self.check("a direct read", file, offset, length, bytes(into[:read]))

    def original_reads(self, file, into, offset):
        fd = os.open(file.original, os.O_RDONLY | os.O_DIRECT)
        try:
            os.preadv(fd, [into], offset)
        except OSError:
            return False
        finally:
            os.close(fd)
        return True

    def advise(self, file, offset, length):
        advice = self.rng.choice(
            [os.POSIX_FADV_WILLNEED, os.POSIX_FADV_DONTNEED, os.POSIX_FADV_DONTNEED,
             os.POSIX_FADV_RANDOM, os.POSIX_FADV_SEQUENTIAL, os.POSIX_FADV_NORMAL]
        )  # fmt: skip
        os.posix_fadvise(file.fd, offset, length * 16, advice)
        self.pread(file, offset, length)

    def madvise(self, file, offset, length):
        start = offset // PAGE * PAGE
        if file.map is not None and start < file.size:
            advice = self.rng.choice([mmap.MADV_DONTNEED, mmap.MADV_WILLNEED, mmap.MADV_RANDOM])
            file.map.madvise(advice, start, min(length, file.size - start))
            self.mapped(file, offset, length)

    def reopen(self, file, offset, length):
        file.close()
        file.open()
        self.pread(file, offset, length)

    def copy(self, file, offset, length):
        try:
            copied = os.copy_file_range(file.fd, self.sink, length, offset, 0)
        except OSError as error:
            # Between filesystems callers fall back to other calls.
            if error.strerror != "Invalid cross-device link":
                raise
            return
        self.check("copy_file_range", file, offset, copied, os.pread(self.sink, copied, 0))


def run(orders):
    contents = {}
    for path, (reference, original) in orders["files"].items():
        with open(reference, "rb") as file:
            contents[path] = (file.read(), original)
    seed, threads = orders["seed"], orders["threads"]
    # Opened before the fork: the children and their parent share every descriptor.
    shared = [File(path, *about) for path, about in contents.items()]
    forks = []
    for number in range(orders["forks"]):
        pid = os.fork()
        if pid == 0:
            wrong = attempt(shared, f"{seed} fork {number}", orders["operations"])
            os._exit(report(wrong))
        forks.append(pid)
    wrong = []

    def work(name):
        files = [File(path, *about) for path, about in contents.items()]
        wrong.extend(attempt(files, name, orders["operations"] // threads))

    workers = [
        threading.Thread(target=work, args=(f"{seed} thread {n}",)) for n in range(threads)
    ]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    statuses = [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in forks]
    return report(wrong) or max(statuses, default=0)


def attempt(files, name, operations):
    reader = Reader(files, name)
    try:
        reader.run(operations)
    except Exception as error:
        return [f"{name}: {type(error).__name__}: {error}"]
    finally:
        # In one write: other processes write there too.
        os.write(1, f"{reader.done}\n".encode())
    return []


def report(wrong):
    for line in wrong:
        print(line, file=sys.stderr, flush=True)
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(run(json.loads(sys.argv[1])))
