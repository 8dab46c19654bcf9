"""Fixtures and helpers for tests of `ckptfs.install`."""

import json
import os
import subprocess
import sys
import types

import ckptfs
import pytest
import safetensors
import safetensors.torch

from ckptfs.shims import calls, install

from samples import numbers

ORIGINALS = safetensors.safe_open, safetensors.torch.load_file


@pytest.fixture
def file(tmp_path):
    tensors = {"a": numbers(1, 4, 6), "b": numbers(2, 5)}
    safetensors.torch.save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    return tmp_path / "model.safetensors", tensors


@pytest.fixture(autouse=True)
def nothing_is_left():
    calls._logged.clear()
    yield
    assert not left(), left()
    assert (safetensors.safe_open, safetensors.torch.load_file) == ORIGINALS


def left():
    """The places in other modules that still hold something of ours."""
    ours = install.__name__, calls.__name__
    return [
        f"{name}.{key}" for name, module in list(sys.modules.items()) if not name.startswith("ckptfs")
        for key, value in list(getattr(module, "__dict__", {}).items())
        if type(value).__module__ in ours
        or (type(value) is types.FunctionType and value.__code__.co_filename == calls.__file__)
    ] + [type(finder).__name__ for finder in sys.meta_path if type(finder).__module__ in ours]  # fmt: skip


def originals():
    return ckptfs.stats()["originals"]


def run(code, *words, **env):
    """The JSON in the last line that a program of its own prints."""
    env = {**os.environ, "HF_HUB_OFFLINE": "1", "PYTHONPATH": os.pathsep.join(sys.path), **env}
    done = subprocess.run([sys.executable, "-c", code, *map(str, words)], env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])
