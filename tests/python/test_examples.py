"""The scripts in examples/ do what they say, with the models that they are made for, and leave no mount
behind."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

os.environ["HF_HUB_OFFLINE"] = "1"

import pytest
import torch
from transformers import GPT2Config, GPT2LMHeadModel

from layouts import as_older_releases_did, write_pickles
from mounts import until
from pipelines import stable_diffusion
from program import REPOSITORY, find_binary
from samples import numbers, write_shards

EXAMPLES = REPOSITORY / "examples"


def mounts_of(name):
    lines = Path("/proc/self/mountinfo").read_text().splitlines()
    return [line for line in lines if "fuse.ckptfs" in line and name in line]


@pytest.fixture
def run(tmp_path):
    """Runs an example as a user does, with `ckptfs` on the PATH."""
    programs = tmp_path / "bin"
    programs.mkdir()
    (programs / "ckptfs").symlink_to(find_binary())

    def run(script, *arguments, before=()):
        started = [sys.executable] if script.endswith(".py") else []
        command = [*before, *started, EXAMPLES / script, *arguments]
        done = subprocess.run(
            list(map(str, command)), capture_output=True, text=True, timeout=300,
            env=os.environ | {"PATH": f"{programs}:{os.environ['PATH']}"},
            stdin=subprocess.DEVNULL,
        )  # fmt: skip
        assert done.returncode == 0, done.stderr
        until("what it mounted is gone", lambda: not mounts_of(str(tmp_path)))
        return done.stdout

    return run


def tiny_model(folder):
    """A language model in pickles of older releases."""
    torch.manual_seed(0)
    config = GPT2Config(
        n_layer=1, n_embd=32, n_head=2, vocab_size=50, n_positions=16, bos_token_id=1,
        eos_token_id=1,
    )  # fmt: skip
    model = GPT2LMHeadModel(config)
    config.save_pretrained(folder)
    tensors = {key: tensor for key, tensor in model.state_dict().items() if key != "lm_head.weight"}
    write_pickles(folder, tensors, limit=10_000)
    return model


def test_transformers(run, tmp_path):
    model = tiny_model(tmp_path / "gpt2")
    told = run("load_with_transformers.py", tmp_path / "gpt2")
    assert told.startswith(f"GPT2LMHeadModel with {model.num_parameters()} parameters\n")


def test_diffusers(run, tmp_path):
    pipeline = stable_diffusion(tmp_path / "tokenizer")
    pipeline.save_pretrained(tmp_path / "sd", safe_serialization=False)
    as_older_releases_did(tmp_path / "sd")
    told = run("load_with_diffusers.py", tmp_path / "sd")
    assert told.startswith("StableDiffusionPipeline of ") and "unet" in told
    pipeline.to(torch.float16).save_pretrained(tmp_path / "half", variant="fp16")
    assert "unet" in run("load_with_diffusers.py", tmp_path / "half", "fp16")


def test_comfyui(run, tmp_path):
    models = tmp_path / "models"
    write_shards(models / "diffusion_models", 1, 3, 2, 20)
    (models / "diffusion_models/config.json").unlink()
    (models / "checkpoints").mkdir()
    torch.save({"state_dict": {"a": numbers(1, 9)}}, models / "checkpoints/v1-5.ckpt")
    expected = ["checkpoints/v1-5.safetensors", "diffusion_models/model.safetensors"]
    assert sorted(run("comfyui.sh", models).split()) == [str(models / name) for name in expected]
    listed = run("comfyui.sh", models, "ls", models / "checkpoints")
    assert listed == "v1-5.safetensors\n"
    assert (models / "checkpoints/v1-5.ckpt").exists(), "still covered"


def test_hub_cache(run, tmp_path):
    repository = tmp_path / "hub/models--org--name"
    snapshot = repository / "snapshots" / ("0" * 40)
    for folder in (snapshot, repository / "blobs", repository / "refs"):
        folder.mkdir(parents=True)
    (repository / "refs/main").write_text(snapshot.name)
    model = tiny_model(tmp_path / "plain")
    for n, path in enumerate(sorted((tmp_path / "plain").iterdir())):
        shutil.move(path, repository / f"blobs/{n:040x}")
        (snapshot / path.name).symlink_to(f"../../blobs/{n:040x}")
    program = (
        "from transformers import AutoModelForCausalLM as M;"
        "print(M.from_pretrained('org/name', use_safetensors=True).num_parameters())"
    )
    told = run("hub_cache.sh", tmp_path / "hub", sys.executable, "-c", program)
    assert told.startswith(f"{model.num_parameters()}\n")


def test_fstab(run, tmp_path):
    """In a namespace of its own, where the program is in /usr/bin as it is once installed."""
    write_shards(tmp_path / "models/llama", 1, 3, 2, 20)
    installed = f"mount -t overlay overlay -o lowerdir={tmp_path / 'bin'}:/usr/bin /usr/bin"
    apart = ["unshare", "--mount", "sh", "-c", f'{installed} && exec "$0" "$@"']
    (tmp_path / "bin/ckptfs").unlink()
    shutil.copy(find_binary(), tmp_path / "bin/ckptfs")
    told = run("fstab.sh", tmp_path / "models", before=apart)
    assert "fuse.ckptfs  ro,allow_other" in told
    assert told.split("llama:")[-1].split() == ["config.json", "model.safetensors"]
