"""The demo's model: `make` saves it sharded and as a pickle, `compare` proves that both exports hold it."""

import json
import sys
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

SHARDS = 3


def model():
    generator = torch.Generator().manual_seed(0)
    tensors = {}
    for layer in range(6):
        weight = torch.randn(256, 256, generator=generator)
        tensors[f"layers.{layer}.attention.weight"] = weight.to(torch.bfloat16)
        tensors[f"layers.{layer}.norm.weight"] = torch.randn(256, generator=generator)
    return tensors


def make(folder):
    tensors = model()
    sharded, pickled = folder / "sharded", folder / "pickled"
    sharded.mkdir()
    pickled.mkdir()
    names = list(tensors)
    weight_map = {}
    for shard in range(SHARDS):
        file = f"model-{shard + 1:05}-of-{SHARDS:05}.safetensors"
        part = {name: tensors[name] for name in names[shard::SHARDS]}
        save_file(part, sharded / file, metadata={"format": "pt"})
        weight_map.update(dict.fromkeys(part, file))
    total = sum(tensor.nbytes for tensor in tensors.values())
    index = {"metadata": {"total_size": total}, "weight_map": weight_map}
    (sharded / "model.safetensors.index.json").write_text(json.dumps(index))
    torch.save(tensors, pickled / "pytorch_model.bin")


def compare(folder):
    expected = model()
    for checkpoint in ("sharded", "pickled"):
        loaded = load_file(folder / f"{checkpoint}.safetensors")
        assert loaded.keys() == expected.keys(), f"{checkpoint}: other names"
        for name, tensor in expected.items():
            assert loaded[name].dtype == tensor.dtype, f"{checkpoint}: {name}: other type"
            assert torch.equal(loaded[name], tensor), f"{checkpoint}: {name}: other values"
        print(f"{checkpoint}: {len(expected)} tensors, every one equal to the one saved")


if __name__ == "__main__":
    command, folder = sys.argv[1:]
    {"make": make, "compare": compare}[command](Path(folder))
