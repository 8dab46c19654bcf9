"""What transformers' Trainer leaves with FSDP and with DeepSpeed loads through a mount without consolidation, and training
resumes through it. The runs are real, with two ranks on processors."""

import os
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
    words = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", RANKS, COMMON / "trainer_run.py"]
    # The ranks are numbered by torch alone.
    env = {name: value for name, value in os.environ.items() if name not in ("RANK", "WORLD_SIZE", "LOCAL_RANK")}
    done = subprocess.run(
        [INTERPRETERS[kind], *map(str, words), kind, str(folder), str(resume)],
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=PATIENCE, env=env,
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
