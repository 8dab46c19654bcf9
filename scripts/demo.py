"""The demo's model: `make` saves it as shards and as a pickle, `compare` loads both through a mount and compares them
with the saved tensors."""

import logging
import os
import sys
from pathlib import Path

os.environ["HF_HUB_OFFLINE"] = "1"

import torch
from safetensors.torch import load_file
from transformers import GPT2Config, GPT2LMHeadModel, logging as transformers_logging

transformers_logging.set_verbosity(logging.WARNING)
transformers_logging.disable_progress_bar()


def model():
    torch.manual_seed(0)
    return GPT2LMHeadModel(GPT2Config(
        n_layer=4, n_embd=128, n_head=4, vocab_size=1000, n_positions=64, bos_token_id=1, eos_token_id=1
    ))  # fmt: skip


def make(folder):
    made = model()
    made.save_pretrained(folder / "sharded", max_shard_size="2MB")
    pickled = folder / "pickled"
    made.config.save_pretrained(pickled)
    # As save_pretrained does, without the second name of a tensor that has two.
    tensors = {key: tensor for key, tensor in made.state_dict().items() if key != "lm_head.weight"}
    torch.save(tensors, pickled / "pytorch_model.bin")


def compare(folder):
    made = model().eval()
    expected = made.state_dict()
    prompt = torch.arange(8).unsqueeze(0)
    for name in ("sharded", "pickled"):
        loaded = GPT2LMHeadModel.from_pretrained(folder / name).eval()
        for key, tensor in loaded.state_dict().items():
            assert torch.equal(tensor, expected[key]), f"{name}: {key}: other values"
        tokens = [m.generate(prompt, max_new_tokens=8, do_sample=False) for m in (made, loaded)]
        assert torch.equal(*tokens), f"{name}: generates other tokens"
        tensors = load_file(folder / name / "model.safetensors")
        for key, tensor in tensors.items():
            assert torch.equal(tensor, expected[key]), f"{name}: {key}: other values"
        print(f"{name}: {len(tensors)} tensors equal to those saved, and the same tokens generated")


if __name__ == "__main__":
    command, folder = sys.argv[1:]
    {"make": make, "compare": compare}[command](Path(folder))
