"""Versions that a trainer writes as deltas: times to the first byte, to load and to read a whole version, and the daemon's
peak memory. Beside them, the base is copied, and the copy is patched."""

import json
import os
import shutil
import struct
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor

from bench.fixtures import RUNS, alternate
from bench.growth import read_whole
from bench.machine import machine
from bench.results import Results

# 2.1 GB of 16-bit weights, of which 2 % change.
TENSORS, ROWS, COLUMNS = 50, 5120, 4096
CHANGED_SHARE = 0.02

# A version that is not shown by then never will be.
MAX_WAIT_SECONDS = 30

INDEX = "model.safetensors.index.json"

LOAD = """
import sys, time
import torch, ckptfs.torch
start = time.perf_counter()
tensors = ckptfs.torch.load_file(sys.argv[1], backend="pread")
print(time.perf_counter() - start, len(tensors))
"""


def name_of(n):
    return f"model.layers.{n}.mlp.down_proj.weight"


def write_file(path, tensors, metadata):
    """Writes a safetensors file of arrays of bytes. `tensors` has the dtype, shape and bytes of each by name."""
    header, at = {"__metadata__": metadata}, 0
    for name, (dtype, shape, raw) in tensors.items():
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [at, at + raw.nbytes]}
        at += raw.nbytes
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with open(path, "wb") as out:
        out.write(struct.pack("<Q", len(text)) + text)
        for _, _, raw in tensors.values():
            out.write(raw)


def write_versions(folder, encodings):
    """Writes a base, and for each encoding a delta on it, each in a folder of its own."""
    import numpy as np
    import xxhash
    import zstandard

    rng = np.random.default_rng(5)
    base = folder / "base"
    base.mkdir(parents=True)
    tensors, blobs, sums = {}, {encoding: {} for encoding in encodings}, {}
    for n in range(TENSORS):
        old = rng.integers(0, 256, 2 * ROWS * COLUMNS, np.uint8)
        new = old.copy()
        values = rng.random(ROWS * COLUMNS, np.float32) < CHANGED_SHARE
        # The low byte of a value changes, and the high byte of few.
        new[::2][values] += rng.integers(1, 256, values.sum(), np.uint8)
        new[1::2][values] ^= rng.random(values.sum()) < 0.05
        name = name_of(n)
        tensors[name], sums[name] = ("BF16", [ROWS, COLUMNS], old), xxhash.xxh3_128(new).hexdigest()
        for encoding in encodings:
            if encoding == "xor":
                changes = (old ^ new).tobytes()
            else:
                (at,) = (old != new).nonzero()
                changes = struct.pack("<I", len(at)) + at.astype("<u4").tobytes() + new[at].tobytes()
            raw = np.frombuffer(zstandard.ZstdCompressor(level=1).compress(changes), np.uint8)
            blobs[encoding][name] = ("U8", [raw.size], raw)
    write_file(base / "model.safetensors", tensors, {"format": "pt"})
    for encoding in encodings:
        delta = folder / encoding
        delta.mkdir()
        write_file(delta / "model-00000-of-00001.safetensors", blobs[encoding], sums)
        metadata = {
            "version": "000001", "base_version": "000000", "delta_encoding": encoding, "compression_format": "zstd",
            "checksum_format": "xxh3-128",
        }  # fmt: skip
        weight_map = dict.fromkeys(sums, "model-00000-of-00001.safetensors")
        (delta / INDEX).write_text(json.dumps({"metadata": metadata, "weight_map": weight_map}))


def header_of(path):
    data = memoryview(path.read_bytes())
    (length,) = struct.unpack("<Q", data[:8])
    return data, 8 + length, json.loads(bytes(data[8 : 8 + length]))


def copy_and_patch(base, delta, local):
    """Copies the base, and applies a delta to the copy in place, as trainers' engines do. Each thread patches a tensor, and
    compares its checksum."""
    import mmap

    import numpy as np
    import xxhash
    import zstandard

    shutil.copytree(base, local)
    encoding = json.loads((delta / INDEX).read_text())["metadata"]["delta_encoding"]
    blob, blob_start, blob_header = header_of(delta / "model-00000-of-00001.safetensors")
    sums = blob_header.pop("__metadata__")
    with open(local / "model.safetensors", "r+b") as file, mmap.mmap(file.fileno(), 0) as map:
        (length,) = struct.unpack("<Q", map[:8])
        header = json.loads(map[8 : 8 + length])

        def patch(name):
            begin, end = header[name]["data_offsets"]
            first, last = blob_header[name]["data_offsets"]
            raw = np.ndarray(end - begin, np.uint8, map, 8 + length + begin)
            part = blob[blob_start + first : blob_start + last]
            if encoding == "xor":
                hasher, done = xxhash.xxh3_128(), 0
                with zstandard.ZstdDecompressor().stream_reader(part) as reader:
                    while changes := reader.read(2 << 20):
                        now = raw[done : done + len(changes)]
                        now ^= np.frombuffer(changes, np.uint8)
                        hasher.update(now)
                        done += len(changes)
                digits = hasher.hexdigest()
            else:
                changes = np.frombuffer(zstandard.ZstdDecompressor().decompress(part), np.uint8)
                count = int.from_bytes(changes[:4].tobytes(), "little")
                raw[np.frombuffer(changes[4 : 4 + 4 * count].tobytes(), "<u4")] = changes[4 + 4 * count :]
                digits = xxhash.xxh3_128(raw).hexdigest()
            assert digits == sums[name], name

        with ThreadPoolExecutor() as pool:
            list(pool.map(patch, blob_header))


def first_byte_of_tensor(path):
    """Reads the first byte of the first tensor, as soon as there is a file."""
    while not path.exists():
        time.sleep(0.002)
    with open(path, "rb", buffering=0) as file:
        (length,) = struct.unpack("<Q", file.read(8))
        assert len(os.pread(file.fileno(), 1, 8 + length)) == 1


def inode_and_time(path):
    with open(path, "rb", buffering=0) as file:
        stat = os.fstat(file.fileno())
    return stat.st_ino, stat.st_mtime_ns


# Follows the newest version under one path.
RECIPE = """
[[file]]
path = "latest/model.safetensors"
base = "weight_v000000"
deltas = "auto"
"""


def main(*encodings):
    """Measures all encodings, or these."""
    results = Results("versions", encodings)
    encodings = encodings or ("xor", "overwrite")
    with machine() as measuring:
        folder, local = measuring.folder, measuring.folder / "local"
        write_versions(folder / "made", encodings)
        base = folder / "made/base"

        def arrive(encoding):
            """A folder of versions, in which the index of the delta is still missing; and what brings it there."""
            run = folder / "run"
            shutil.rmtree(run, ignore_errors=True)
            run.mkdir()
            os.link(base / "model.safetensors", ensure(run / "weight_v000000") / "model.safetensors")
            version = ensure(run / "weight_v000001")
            for path in (folder / "made" / encoding).iterdir():
                if path.name != INDEX:
                    os.link(path, version / path.name)
            shutil.copy(folder / "made" / encoding / INDEX, run / "index")
            return run, lambda: os.replace(run / "index", version / INDEX)

        def mounted_first_byte(encoding, prepare):
            run, publish = arrive(encoding)
            prepare()
            with measuring.mounted(run):
                assert os.listdir(measuring.point / "weight_v000001") == ["model-00000-of-00001.safetensors"]
                start = time.perf_counter()
                publish()
                first_byte_of_tensor(measuring.point / "weight_v000001/model.safetensors")
                return time.perf_counter() - start

        def recipe_first_byte(encoding, prepare):
            """Seconds to the first byte at the path of a recipe, which showed the base before."""
            run, publish = arrive(encoding)
            prepare()
            (measuring.folder / "views.toml").write_text(RECIPE)
            with measuring.mounted(run, views=measuring.folder / "views.toml"):
                path = measuring.point / "latest/model.safetensors"
                before = inode_and_time(path)
                start = time.perf_counter()
                publish()
                while inode_and_time(path) == before:
                    if time.perf_counter() > start + MAX_WAIT_SECONDS:
                        raise SystemExit("failed: the recipe does not show the new version")
                    time.sleep(0.002)
                first_byte_of_tensor(path)
                return time.perf_counter() - start

        def patched_first_byte(encoding, prepare):
            shutil.rmtree(local, ignore_errors=True)
            prepare()
            start = time.perf_counter()
            copy_and_patch(base, folder / "made" / encoding, local)
            first_byte_of_tensor(local / "model.safetensors")
            return time.perf_counter() - start

        def loaded(path):
            done = subprocess.run([sys.executable, "-c", LOAD, str(path)], check=True, capture_output=True, text=True)
            seconds, tensors = done.stdout.split()
            assert int(tensors) == TENSORS
            return float(seconds)

        def load(encoding, prepare):
            run, publish = arrive(encoding)
            publish()
            prepare()
            return loaded(run / "weight_v000001")

        def patch_and_load(encoding, prepare):
            return patched_first_byte(encoding, prepare) + loaded(local)

        def read(encoding, prepare):
            run, publish = arrive(encoding)
            publish()
            prepare()
            with measuring.mounted(run):
                return read_whole(measuring.point / "weight_v000001/model.safetensors")

        def patch_and_read(encoding, prepare):
            return patched_first_byte(encoding, prepare) + read_whole(local / "model.safetensors")

        def compare(table, label, ours, other):
            measuring.peaks.clear()
            runs = alternate(["ours", "other"], lambda name: {"ours": ours, "other": other}[name](), RUNS)
            memory = measuring.peaks or [{}] * len(runs)
            results.add(table, [label], [run | used for run, used in zip(runs, memory, strict=True)])

        files = [base / "model.safetensors"]
        for encoding in encodings:
            for state, prepare in measuring.states(*files):
                for suffix, first_byte in (("", mounted_first_byte), (", at the path of a recipe", recipe_first_byte)):
                    compare(
                        "versions-first-byte", f"{encoding}, base {state}{suffix}",
                        lambda: first_byte(encoding, prepare), lambda: patched_first_byte(encoding, prepare),
                    )  # fmt: skip
            cached = lambda: measuring.warm(*files)
            for table, ours, other in (("loads", load, patch_and_load), ("reads", read, patch_and_read)):
                compare(
                    f"versions-{table}", f"{encoding}, base cached",
                    lambda: ours(encoding, cached), lambda: other(encoding, cached),
                )  # fmt: skip


def ensure(folder):
    folder.mkdir()
    return folder
