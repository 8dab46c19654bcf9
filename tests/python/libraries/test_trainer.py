"""What transformers' Trainer leaves with FSDP and with DeepSpeed loads through a mount without consolidation, and training
resumes through it. The runs are real, with two ranks on processors."""

import shutil
import subprocess
import sys

import pytest
import torch
from transformers import AutoModelForCausalLM

import zero
from compare import check_same
from program import COMMON

# A run starts in ten seconds, and is over in as many.
PATIENCE = 240

RANKS = 2

INTERPRETERS = {"fsdp": sys.executable, "zero3": zero.INTERPRETER}


def train(kind, folder, resume=""):
    words = COMMON / "trainer_run.py", kind, RANKS, folder, resume
    done = subprocess.run(
        [INTERPRETERS[kind], *map(str, words)],
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=PATIENCE,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-4000:]
    return torch.load(f"{folder}.expected", weights_only=True)


@pytest.mark.parametrize(
    "kind", ["fsdp", pytest.param("zero3", marks=pytest.mark.skipif(zero.INTERPRETER is None, reason=zero.MISSING))]
)
def test_a_run_loads_and_resumes_through_a_mount(kind, mounts, tmp_path):
    runs = tmp_path / "runs"
    runs.mkdir()
    expected = train(kind, runs / "run")
    mount = mounts(runs)
    checkpoint = mount.point / "run/checkpoint-2"
    # With FSDP, Trainer writes no config beside the weights.
    assert (checkpoint / "config.json").exists() == (kind != "fsdp")
    if kind == "fsdp":
        shutil.copy(runs / "run.config/config.json", runs / "run/checkpoint-2")
    model = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32)
    check_same(model.state_dict(), expected)
    resumed = train(kind, tmp_path / "again", mount.point / "run/checkpoint-1")
    check_same(resumed, expected)
