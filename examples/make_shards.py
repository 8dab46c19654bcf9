"""Writes a small model of two shards with an index, to try ckptfs with.

    python make_shards.py MODEL_DIR

Needs numpy and safetensors.
"""

import json
import sys
from pathlib import Path

import numpy
from safetensors.numpy import save_file

if len(sys.argv) != 2:
    sys.exit("usage: python make_shards.py MODEL_DIR")
model = Path(sys.argv[1])
model.mkdir(parents=True, exist_ok=True)
shards = {}
for n in (1, 2):
    shard = f"model-0000{n}-of-00002.safetensors"
    tensors = {f"layers.{n}.weight": numpy.full((4, 4), n, dtype="float32")}
    save_file(tensors, model / shard, metadata={"format": "pt"})
    shards.update(dict.fromkeys(tensors, shard))
index = {"metadata": {"total_size": 128}, "weight_map": shards}
(model / "model.safetensors.index.json").write_text(json.dumps(index))
