"""The demo's model is what it claims to be, and it needs neither torch nor the tests' tools."""

import os
import signal
import subprocess
import sys

import pytest
import torch

from mounts import until
from program import REPOSITORY

DEMO = REPOSITORY / "scripts/demo.py"

# Runs the demo's program where torch cannot be imported.
WITHOUT_TORCH = """
import runpy, sys
sys.modules["torch"] = None
sys.argv = sys.argv[1:]
runpy.run_path(sys.argv[0], run_name="__main__")
"""


@pytest.fixture
def models(tmp_path):
    subprocess.run([sys.executable, "-c", WITHOUT_TORCH, DEMO, "make", tmp_path / "models"], check=True)
    return tmp_path / "models"


def test_the_pickle_is_one_that_torch_reads(models, ckptfs):
    tensors = torch.load(models / "pickled/pytorch_model.bin", weights_only=True)
    assert len(tensors) == 52 and all(isinstance(tensor, torch.Tensor) for tensor in tensors.values())
    again = models / "again.bin"
    torch.save(tensors, again)
    assert ckptfs("verify", models / "pickled/pytorch_model.bin", "--against", again).code == 0
    assert ckptfs("verify", models / "sharded", "--against", again).code == 0


def test_both_libraries_load_it_through_a_mount(models, mounts):
    mount = mounts(models)
    by_safetensors = [sys.executable, "-c", WITHOUT_TORCH, DEMO, "safetensors", mount.point]
    by_transformers = [sys.executable, DEMO, "transformers", mount.point]
    for command in (by_safetensors, by_transformers):
        told = subprocess.run(command, check=True, capture_output=True, text=True).stdout
        assert told.count("equal to those that were saved") == 2


def test_other_values_fail_the_demo(models, mounts):
    file = models / "pickled/pytorch_model.bin"
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)
    done = subprocess.run([sys.executable, DEMO, "safetensors", mounts(models).point], capture_output=True, text=True)
    assert done.returncode == 1 and "pickled: " in done.stderr and "other values" in done.stderr


def script(*lines):
    return ["bash", "-c", "set -euo pipefail; . scripts/machine.sh; trap end_background EXIT\n" + "\n".join(lines)]


def test_a_long_step_shows_that_it_goes_on_at_least_every_ten_seconds():
    command = script("wait_for 'a long step' bash -c 'echo compiling this; sleep 11'")
    told = subprocess.run(command, cwd=REPOSITORY, check=True, capture_output=True, text=True).stdout
    steps = [line.split() for line in told.splitlines()[1:]]
    assert all(step[1:] == ["s", "compiling", "this"] for step in steps)
    seconds = [0, *(int(step[0]) for step in steps), 11]
    assert len(steps) > 1 and max(later - sooner for sooner, later in zip(seconds, seconds[1:])) <= 10


def test_a_failed_step_shows_its_output_and_ends_the_script():
    done = subprocess.run(
        script("wait_for step bash -c 'echo the reason; exit 3'", "echo goes on"),
        cwd=REPOSITORY, capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 1 and "the reason" in done.stderr and "goes on" not in done.stdout


def test_an_interrupted_step_leaves_no_process(tmp_path):
    pids = tmp_path / "pid"
    command = script(f"trap 'exit 130' INT; wait_for step bash -c 'sleep 1000 & echo $! > {pids}; wait'")
    # A process in the background ignores Ctrl-C, and its children would too.
    started = subprocess.Popen(["env", "--default-signal", *command], cwd=REPOSITORY, start_new_session=True,
                               stdout=subprocess.DEVNULL)  # fmt: skip
    until("the step runs", lambda: pids.exists() and pids.read_text().strip())
    os.killpg(started.pid, signal.SIGINT)
    assert started.wait(60) == 130
    until("its process has ended", lambda: not os.path.exists(f"/proc/{pids.read_text().strip()}"))
