"""How time and memory of a mount grow: with tensors, files, readers and bytes. Arguments name the kinds to measure.

Files are sparse, so that there may be more of them than the disk has room for: only their headers are written.
"""

import json
import os
import shutil
import struct
import tempfile
import threading
import time
from pathlib import Path

from ckptfs.bench import page_cache

from bench.fixtures import RUNS, first_byte, mounted
from bench.machine import VIRTUAL_FILE
from bench.results import Results

REQUEST_BYTES = 1 << 20

TENSORS = (10, 100, 1_000, 10_000, 100_000, 1_000_000)
FILES = (1, 10, 100, 1_000)
READERS = (1, 4, 16, 64)
GIGABYTES = (0.1, 1, 10, 40)


def write_sparse_model(folder, shards, tensors, tensor_bytes):
    """Writes a checkpoint of so many shards and tensors in all, with an index."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    weight_map = {}
    for shard in range(shards):
        file = folder / f"model-{shard + 1:05}-of-{shards:05}.safetensors"
        header, end = {}, 0
        for number in range(shard, tensors, shards):
            header[f"t{number}"] = {
                "dtype": "U8", "shape": [tensor_bytes], "data_offsets": [end, end + tensor_bytes],
            }  # fmt: skip
            end += tensor_bytes
            weight_map[f"t{number}"] = file.name
        text = json.dumps(header, separators=(",", ":")).encode()
        text += b" " * (-len(text) % 8)
        with open(file, "wb") as out:
            out.write(struct.pack("<Q", len(text)) + text)
            out.truncate(8 + len(text) + end)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))


def read_whole(path, readers=1):
    """Seconds that so many threads take, each of which reads all of a file."""

    def read():
        buffer = bytearray(REQUEST_BYTES)
        with open(path, "rb", buffering=0) as file:
            while file.readinto(buffer):
                pass

    threads = [threading.Thread(target=read) for _ in range(readers)]
    start = time.perf_counter()
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return time.perf_counter() - start


def measure(folder, work):
    """What some work with the virtual file of a fresh mount takes. Headers are in the page cache, no other byte is."""
    point = folder.parent / "mount"
    point.mkdir(exist_ok=True)
    runs = []
    for _ in range(RUNS):
        os.sync()
        page_cache.drop_all()
        for file in folder.iterdir():
            with open(file, "rb") as opened:
                opened.read(REQUEST_BYTES)
        with mounted(folder, point) as daemon:
            before = daemon.cpu
            seconds = work(point / VIRTUAL_FILE, daemon)
            runs.append({"seconds": seconds, "cpu": daemon.cpu - before, "peak": daemon.peak})
    return runs


def wait_for_first_byte(path, daemon):
    """Seconds from the start of the mount to its first byte: a mount may or may not wait until all is parsed."""
    return daemon.seconds + first_byte(path)


def grow_tensors(folder):
    for count in TENSORS:
        write_sparse_model(folder, min(count, 16), count, 64)
        yield count, measure(folder, wait_for_first_byte)


def grow_files(folder):
    for count in FILES:
        write_sparse_model(folder, count, 10 * count, 64 << 10)
        yield count, measure(folder, wait_for_first_byte)


def grow_readers(folder):
    write_sparse_model(folder, 4, 64, 8 << 20)
    for count in READERS:
        yield count, measure(folder, lambda path, _, count=count: read_whole(path, count))


def grow_bytes(folder):
    for gigabytes in GIGABYTES:
        write_sparse_model(folder, 4, 100, round(gigabytes * 1e7))
        yield gigabytes, measure(folder, lambda path, _: read_whole(path))


KINDS = {"tensors": grow_tensors, "files": grow_files, "readers": grow_readers, "gigabytes": grow_bytes}


def main(*names):
    if unknown := [name for name in names if name not in KINDS]:
        raise SystemExit(f"nothing grows by {unknown[0]!r}; there are: {', '.join(KINDS)}")
    assert os.geteuid() == 0, "dropping caches needs root"
    results = Results("growth", names)
    with tempfile.TemporaryDirectory() as folder:
        for name, grow in KINDS.items():
            if name in names or not names:
                for count, runs in grow(Path(folder) / "model"):
                    runs = [{**run, "count": count} for run in runs]
                    results.add(f"growth-{name}", [f"{count:,}"], runs)
