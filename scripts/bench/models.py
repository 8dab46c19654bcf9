"""Models to measure with, as their usual writers make them, each in a process of its own, whose memory is gone when
it ends."""

import json
import shutil
import subprocess
from pathlib import Path

from ckptfs.bench import page_cache
from ckptfs.bench.process import WorkerProcess

from bench.fixtures import CKPTFS, uniform, write_model


def in_process(function, **arguments):
    """Calls one of the functions below, whose first argument is not used, in a process of its own."""
    with WorkerProcess() as worker:
        *_, last = worker.call(f"{__name__}:{function.__name__}", **{name: str(one) for name, one in arguments.items()})
    if "fault" in last:
        raise SystemExit(f"failed: {function.__name__}: {last['fault']}")


def llama(_, folder, size, dtype="bfloat16"):
    """A Llama of 2.2 GB in 4 shards, or so much of its layers; a tiny one for 0. In fp32 it has 4.4 GB."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    dtype = getattr(torch, dtype)
    torch.set_default_dtype(dtype)
    if size := float(size):
        config = LlamaConfig(hidden_size=2048, intermediate_size=5632, num_hidden_layers=max(1, round(22 * size)),
                             num_attention_heads=32, num_key_value_heads=4, vocab_size=32000)  # fmt: skip
    else:
        config = LlamaConfig(hidden_size=64, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
                             num_key_value_heads=2, vocab_size=100)  # fmt: skip
    model = LlamaForCausalLM(config)
    model.save_pretrained(folder, max_shard_size=model.num_parameters() * dtype.itemsize * 3 // 11)


def unet(_, folder, size):
    """A denoiser of 1.7 GB as diffusers saves it; a tiny one for 0."""
    import torch
    from diffusers import UNet2DConditionModel

    torch.set_default_dtype(torch.bfloat16)
    if float(size):
        network = UNet2DConditionModel(cross_attention_dim=768)
        network.save_pretrained(folder, max_shard_size="500MB")
        return
    UNet2DConditionModel(
        block_out_channels=(8, 16), layers_per_block=1, sample_size=8, down_block_types=("DownBlock2D", "DownBlock2D"),
        up_block_types=("UpBlock2D", "UpBlock2D"), norm_num_groups=4, cross_attention_dim=8,
    ).save_pretrained(folder)  # fmt: skip


def as_bin(_, model, folder):
    """The tensors of a model in as many shards of `.bin`."""
    import torch
    from safetensors.torch import load_file

    model, folder = Path(model), Path(folder)
    folder.mkdir()
    shards, weight_map = sorted(model.glob("*.safetensors")), {}
    for n, path in enumerate(shards):
        tensors, name = load_file(path), f"pytorch_model-{n + 1:05}-of-{len(shards):05}.bin"
        torch.save(tensors, folder / name)
        weight_map |= dict.fromkeys(tensors, name)
    (folder / "pytorch_model.bin.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    for config in model.glob("*config.json"):
        shutil.copy(config, folder)


def many_tensors(_, folder):
    """A sharded model of 100,000 small tensors."""
    write_model(Path(folder), uniform(160, 625, 32))


def small_pickle(_, path):
    """A checkpoint of one small tensor."""
    import torch

    torch.save({"w": torch.zeros(64)}, path)


def pickles_of_many(_, folder):
    """A checkpoint of 10,000 tensors, in both forms of pickle."""
    import torch

    many = {f"layers.{n}.weight": torch.zeros(4, 4) for n in range(10_000)}
    torch.save(many, f"{folder}/many.pt")
    torch.save(many, f"{folder}/legacy.pt", _use_new_zipfile_serialization=False)


class Models:
    """The same weights in each form, whole and tiny (for a warm-up), and many tensors. What the folder has from before
    is used again."""

    def __init__(self, folder, size):
        self.folder = Path(folder) / f"size-{size:g}"
        if not (self.folder / "complete").exists():
            shutil.rmtree(self.folder, ignore_errors=True)
            self.folder.mkdir(parents=True)
            for name, share in (("whole", size), ("tiny", 0)):
                in_process(llama, folder=self.shards(name), size=share)
                in_process(as_bin, model=self.shards(name), folder=self.bins(name))
                export = [CKPTFS, "export", self.shards(name), self.plain(name)]
                subprocess.run(export, check=True, stdout=subprocess.DEVNULL)
            in_process(many_tensors, folder=self.many)
            (self.folder / "complete").touch()
        else:
            # A virtual machine's host has in its memory what was just written, and only that.
            page_cache.warm(path for path in self.folder.rglob("*") if path.is_file())
        self.bytes = self.plain("whole").stat().st_size

    def shards(self, name="whole"):
        return self.folder / name

    def bins(self, name="whole"):
        return self.folder / f"{name}-bin"

    def plain(self, name="whole"):
        return self.folder / f"{name}.safetensors"

    @property
    def many(self):
        return self.folder / "many"

    @property
    def sources(self):
        return sorted(self.shards().glob("*.safetensors"))
