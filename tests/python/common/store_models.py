"""Checkpoints of every kind, for stores."""

import torch
import torch.distributed.checkpoint as dcp

from samples import write_shards
from zero import Run


def write_models(folder):
    """Checkpoints of each kind, and the folder of each."""
    write_shards(folder / "sharded", 1, 3, 4, 900)
    (folder / "pickled").mkdir()
    tensors = {"a": torch.arange(300_000.0), "t": torch.arange(60_000).reshape(200, 300).t(), "b": torch.ones(3).bfloat16()}
    torch.save(tensors, folder / "pickled/pytorch_model.bin")
    torch.save({"w": torch.randn(40, 30)}, folder / "pickled/optimizer.pt")
    state = {"model": {f"layer.{n}": torch.randn(64, 33) for n in range(12)}}
    dcp.save(state, checkpoint_id=str(folder / "dcp"), no_dist=True)
    run = Run(7, stage=3, world=2)
    run.write(folder / "zero/global_step7")
    (folder / "zero/latest").write_text("global_step7")
    return ["sharded", "pickled", "dcp", "zero"]
