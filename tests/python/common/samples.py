"""One checkpoint of each kind that is read in its own way, and the tensors of each."""

import json
import random

import torch
from safetensors.torch import save_file

from pickles import turned_round


def numbers(seed, *shape):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def write_shards(folder, seed, shards, tensors, side):
    """Writes a model in shards with an index, and gives its tensors."""
    folder.mkdir(parents=True)
    named, index = {}, {}
    for shard in range(shards):
        name = f"model-{shard + 1:05}-of-{shards:05}.safetensors"
        part = {
            f"layers.{shard}.{n}.weight": numbers(seed + 1000 * shard + n, side, side)
            for n in range(tensors)
        }
        save_file(part, folder / name, metadata={"format": "pt"})
        index |= dict.fromkeys(part, name)
        named |= part
    text = json.dumps({"metadata": {}, "weight_map": index})
    (folder / "model.safetensors.index.json").write_text(text)
    (folder / "config.json").write_text("{}")
    return named


def small_tensors(seed, count):
    """Many tensors of a few bytes each, as in models of many parts."""
    rng = random.Random(seed)
    return {f"part.{n}": numbers(seed + n, rng.randint(1, 400)) for n in range(count)}


def strided_tensors(seed):
    """Tensors that are not contiguous."""
    base = numbers(seed, 900, 700)
    return {
        "turned": base.t(),
        "columns": base[:, 100:333],
        "stepped": base[::3, 1::2],
        "repeated": numbers(seed + 1, 1, 5000).expand(50, 5000),
        "cube": numbers(seed + 2, 40, 50, 60).permute(2, 0, 1),
        "whole": numbers(seed + 3, 1000, 333),
    }


def write_all(folder, seed):
    """Writes one of each. Gives the paths in the view, the source of each, and the passed-through files."""
    write_shards(folder / "sharded", seed, 3, 4, 400)
    loose = folder / "loose"
    loose.mkdir()
    torch.save(small_tensors(seed, 3000), loose / "small.bin")
    torch.save(strided_tensors(seed), loose / "strided.pt")
    little = folder / "little"
    torch.save({"a": numbers(seed + 9, 700, 800), "b": numbers(seed + 10, 300, 500).t()}, little)
    turned_round(little, loose / "swapped.pt", 4)
    little.unlink()
    torch.save(
        {"a": numbers(seed + 11, 600, 777), "b": numbers(seed + 12, 99)},
        loose / "legacy.pth",
        _use_new_zipfile_serialization=False,
    )
    torch.save({"state": numbers(seed + 13, 1_000_003)}, loose / "optimizer.pt")
    (loose / "tiny.txt").write_bytes(random.Random(seed).randbytes(4097))
    (loose / "empty.txt").touch()
    virtual_files = {
        "sharded/model.safetensors": "sharded",
        "loose/small.safetensors": "loose/small.bin",
        "loose/strided.safetensors": "loose/strided.pt",
        "loose/swapped.safetensors": "loose/swapped.pt",
        "loose/legacy.safetensors": "loose/legacy.pth",
    }
    as_they_are = ["loose/optimizer.pt", "loose/tiny.txt", "loose/empty.txt", "sharded/config.json"]
    return virtual_files, as_they_are
