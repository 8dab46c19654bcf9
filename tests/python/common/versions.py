"""Writes versions of a model as slime and miles do, and applies deltas as their engines do: from the description of the
layout, in numpy."""

import json
import struct
import zlib
from pathlib import Path

import blake3
import numpy as np
import torch
import xxhash
import zstandard
from safetensors.torch import save_file

CHECKSUMS = {
    "xxh3-128": lambda raw: xxhash.xxh3_128(raw).hexdigest(),
    "blake3": lambda raw: blake3.blake3(raw).hexdigest(),
    "adler32": lambda raw: f"{zlib.adler32(raw):08x}",
}


def name_of(version):
    return f"weight_v{version:06}"


def raw_bytes(tensor):
    """The bytes of a tensor."""
    return tensor.contiguous().reshape(-1).view(torch.uint8).numpy()


def encode(old, new, encoding):
    """The changes between two states of a tensor, uncompressed."""
    if encoding == "xor":
        return (old ^ new).tobytes()
    (positions,) = (old != new).nonzero()
    return struct.pack("<I", len(positions)) + positions.astype("<u4").tobytes() + new[positions].tobytes()


def blob(data, level=1):
    return zstandard.ZstdCompressor(level=level).compress(data)


def write_blobs(path, blobs, metadata):
    """Writes a safetensors file of lists of bytes."""
    save_file({name: torch.frombuffer(bytearray(data), dtype=torch.uint8) for name, data in blobs.items()}, path, metadata)


def write_index(folder, version, encoding, checksum, weight_map, metadata=None):
    written = {
        "version": f"{version:06}", "base_version": f"{version - 1:06}", "delta_encoding": encoding,
        "compression_format": "zstd", "checksum_format": checksum,
    }  # fmt: skip
    index = {"metadata": written | (metadata or {}), "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))


def write_delta(parent, version, old, new, *, encoding="xor", checksum="xxh3-128", ranks=2, metadata=None):
    """Writes the changes between two states of a model. Each rank has some of the changed tensors. `metadata`
    replaces fields of the index. Returns the folder."""
    folder = Path(parent) / name_of(version)
    folder.mkdir(parents=True)
    changed = [name for name in new if not np.array_equal(raw_bytes(old[name]), raw_bytes(new[name]))]
    parts = [part for part in (changed[rank::ranks] for rank in range(ranks)) if part]
    weight_map = {}
    for number, part in enumerate(parts):
        shard = f"model-{number:05}-of-{len(parts):05}.safetensors"
        blobs = {name: blob(encode(raw_bytes(old[name]), raw_bytes(new[name]), encoding)) for name in part}
        sums = {name: CHECKSUMS[checksum](raw_bytes(new[name]).tobytes()) for name in part}
        write_blobs(folder / shard, blobs, sums)
        weight_map |= dict.fromkeys(part, shard)
    # Last, as trainers do.
    write_index(folder, version, encoding, checksum, weight_map, metadata)
    return folder


def write_whole(parent, version, tensors, shards=2):
    """Writes a version whole, as a Hugging Face checkpoint with its config. Returns the folder."""
    folder = Path(parent) / name_of(version)
    folder.mkdir(parents=True)
    names = list(tensors)
    weight_map = {}
    for number in range(shards):
        shard = f"model-{number + 1:05}-of-{shards:05}.safetensors"
        part = {name: tensors[name].contiguous() for name in names[number::shards]}
        save_file(part, folder / shard, {"format": "pt"})
        weight_map |= dict.fromkeys(part, shard)
    (folder / "config.json").write_text("{}")
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    return folder


def apply_delta(state, folder):
    """The raw bytes of a model, by name, after a delta. Fails where a checksum does."""
    metadata = json.loads((folder / "model.safetensors.index.json").read_text())["metadata"]
    state = dict(state)
    for path in sorted(folder.glob("*.safetensors")):
        data = path.read_bytes()
        (length,) = struct.unpack("<Q", data[:8])
        header = json.loads(data[8 : 8 + length])
        sums = header.pop("__metadata__")
        for name, entry in header.items():
            begin, end = (8 + length + offset for offset in entry["data_offsets"])
            changes = np.frombuffer(zstandard.ZstdDecompressor().decompress(data[begin:end]), np.uint8)
            if metadata["delta_encoding"] == "xor":
                after = state[name] ^ changes
            else:
                count = int.from_bytes(changes[:4].tobytes(), "little")
                after = state[name].copy()
                after[np.frombuffer(changes[4 : 4 + 4 * count].tobytes(), "<u4")] = changes[4 + 4 * count :]
            assert CHECKSUMS[metadata["checksum_format"]](after.tobytes()) == sums[name], name
            state[name] = after
    return state
