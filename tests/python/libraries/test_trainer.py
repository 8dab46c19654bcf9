"""What transformers' Trainer leaves with FSDP and with DeepSpeed loads through a mount without consolidation, and training
resumes through it. The runs are real, with two ranks on processors."""

import shutil
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
from transformers import AutoModelForCausalLM

import models
import zero
from compare import check_same
from guides import blocks
from program import COMMON

# A run starts in ten seconds, and is over in as many.
PATIENCE = 240

RANKS = 2

INTERPRETERS = {"fsdp": sys.executable, "zero3": zero.INTERPRETER}

needs_deepspeed = pytest.mark.skipif(zero.INTERPRETER is None, reason=zero.MISSING)

# The recipe of the page reads the folder checkpoint-500.
HF_FOLDER = blocks("views.md", "toml", "Recipes for common needs")[0]


def train(kind, folder, resume=""):
    words = COMMON / "trainer_run.py", kind, RANKS, folder, resume
    done = subprocess.run(
        [INTERPRETERS[kind], *map(str, words)],
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=PATIENCE,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-4000:]
    return torch.load(f"{folder}.expected", weights_only=True)


class TrainingRun(NamedTuple):
    """A finished run: the folder of its two checkpoints, and the tensors after the last step."""

    folder: Path
    expected: dict


@pytest.fixture(scope="module")
def training_run(tmp_path_factory):
    """A function that trains a run of a kind, once for all tests."""
    runs = {}

    def run(kind):
        if kind not in runs:
            folder = tmp_path_factory.mktemp(kind) / "run"
            runs[kind] = TrainingRun(folder, train(kind, folder))
        return runs[kind]

    return run


@pytest.mark.parametrize("kind", ["fsdp", pytest.param("zero3", marks=needs_deepspeed)])
def test_a_run_loads_and_resumes_through_a_mount(kind, training_run, mounts, tmp_path):
    trained, expected = training_run(kind)
    folder = tmp_path / "run"
    shutil.copytree(trained, folder)
    mount = mounts(folder)
    checkpoint = mount.point / "checkpoint-2"
    # With FSDP, Trainer writes no config beside the weights.
    assert (checkpoint / "config.json").exists() == (kind != "fsdp")
    if kind == "fsdp":
        shutil.copy(f"{trained}.config/config.json", folder / "checkpoint-2")
    model = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32)
    check_same(model.state_dict(), expected)
    resumed = train(kind, tmp_path / "again", mount.point / "checkpoint-1")
    check_same(resumed, expected)


@needs_deepspeed
def test_a_zero3_run_is_served_in_bf16_by_a_recipe(training_run, mounts, tmp_path):
    folder, expected = training_run("zero3")
    checkpoint = tmp_path / "models/checkpoint-500"
    shutil.copytree(folder / "checkpoint-2", checkpoint)
    models.tokenizer().save_pretrained(checkpoint)
    recipe = tmp_path / "views.toml"
    recipe.write_text(HF_FOLDER)
    served = mounts(checkpoint.parent, "--views", recipe).point / "served"
    model, info = AutoModelForCausalLM.from_pretrained(served, dtype="auto", output_loading_info=True)
    assert model.dtype == torch.bfloat16 and not any(info.values()), info
    check_same(model.state_dict(), {name: tensor.bfloat16() for name, tensor in expected.items()})
