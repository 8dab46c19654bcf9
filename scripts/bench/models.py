"""Models to measure with, as their usual writers make them: `apart`, in processes of their own, whose memory is gone
when they end.

    bench.models llama FOLDER SIZE     a Llama of 2.2 GB in 4 shards, or so much of its layers; a tiny one for 0
    bench.models bin MODEL FOLDER      the same tensors in as many shards of `.bin`

In: where. Out: folders of models there.
"""

import json
import shutil
import subprocess
import sys
from pathlib import Path

from bench.fixtures import CKPTFS, warm, write_shards


def apart(*words):
    """What the words above say, in a process of its own."""
    subprocess.run([sys.executable, "-P", "-m", __spec__.name, *map(str, words)], check=True, capture_output=True)


def llama(folder, size):
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.set_default_dtype(torch.bfloat16)
    if size:
        config = LlamaConfig(hidden_size=2048, intermediate_size=5632, num_hidden_layers=max(1, round(22 * size)),
                             num_attention_heads=32, num_key_value_heads=4, vocab_size=32000)  # fmt: skip
    else:
        config = LlamaConfig(hidden_size=64, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
                             num_key_value_heads=2, vocab_size=100)  # fmt: skip
    model = LlamaForCausalLM(config)
    model.save_pretrained(folder, max_shard_size=model.num_parameters() * 2 * 3 // 11)


def as_bin(model, folder):
    import torch
    from safetensors.torch import load_file

    folder.mkdir()
    shards, weight_map = sorted(model.glob("*.safetensors")), {}
    for n, path in enumerate(shards):
        tensors, name = load_file(path), f"pytorch_model-{n + 1:05}-of-{len(shards):05}.bin"
        torch.save(tensors, folder / name)
        weight_map |= dict.fromkeys(tensors, name)
    (folder / "pytorch_model.bin.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    for config in model.glob("*config.json"):
        shutil.copy(config, folder)


class Models:
    """The same weights in each form, whole and tiny (to try a way on before it counts), and many tensors.
    What the folder has from before is used again."""

    def __init__(self, folder, size):
        self.folder = Path(folder) / f"size-{size:g}"
        if not (self.folder / "complete").exists():
            shutil.rmtree(self.folder, ignore_errors=True)
            self.folder.mkdir(parents=True)
            for name, share in (("whole", size), ("tiny", 0)):
                apart("llama", self.shards(name), share)
                apart("bin", self.shards(name), self.bins(name))
                export = [CKPTFS, "export", self.shards(name), self.plain(name)]
                subprocess.run(export, check=True, stdout=subprocess.DEVNULL)
            write_shards(self.many, 160, 625, 32)
            (self.folder / "complete").touch()
        else:
            # A virtual machine's host has what was just written in its memory, and the first to read what was not waits.
            warm(path for path in self.folder.rglob("*") if path.is_file())
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


if __name__ == "__main__":
    match sys.argv[1:]:
        case ["llama", folder, size]:
            llama(folder, float(size))
        case ["bin", model, folder]:
            as_bin(Path(model), Path(folder))
