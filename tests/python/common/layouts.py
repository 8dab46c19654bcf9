"""Rewrites a saved pipeline into the other layouts that people publish."""

import json
from pathlib import Path

import torch
from safetensors.torch import load_file


def as_older_releases_did(folder, limit=None):
    """Turns every safetensors file of transformers' parts into the pickle that older releases wrote.

    `limit` bytes make shards with an index. diffusers writes its own pickles; today's transformers has no option for
    these.
    """
    for path in [*Path(folder).rglob("model.safetensors"), *Path(folder).rglob("model.*.safetensors")]:
        variant = path.name.removeprefix("model").removesuffix("safetensors").strip(".")
        write_pickles(path.parent, load_file(path), variant, limit)
        path.unlink()


def write_pickles(folder, tensors, variant="", limit=None):
    """`pytorch_model[.variant].bin`, or shards of it with their index."""
    middle = f".{variant}" if variant else ""
    if limit is None:
        torch.save(tensors, folder / f"pytorch_model{middle}.bin")
        return
    shards, room = [{}], limit
    for name, tensor in tensors.items():
        if shards[-1] and tensor.nbytes > room:
            shards, room = [*shards, {}], limit
        shards[-1][name], room = tensor, room - tensor.nbytes
    assert len(shards) > 1, "made to be sharded"
    weight_map = {}
    for n, shard in enumerate(shards):
        name = f"pytorch_model{middle}-{n + 1:05}-of-{len(shards):05}.bin"
        torch.save(shard, folder / name)
        weight_map |= dict.fromkeys(shard, name)
    size = sum(tensor.nbytes for tensor in tensors.values())
    index = {"metadata": {"total_size": size}, "weight_map": weight_map}
    name = f"pytorch_model.bin.index.{variant + '.' if variant else ''}json"
    (folder / name).write_text(json.dumps(index))
