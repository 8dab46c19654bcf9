"""The package passes safetensors' own tests, which are fetched with its source at set-up. A program that imports
ckptfs instead sees only the differences that are listed here."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from program import COMMON

FILES = [
    "test_simple", "test_pt_comparison", "test_pt_model", "test_handle", "test_multithreaded",
    "test_threadable", "test_pread_backend",
]  # fmt: skip

# Theirs prefetches to CUDA alone; ours also to the machine's memory, and so does not refuse that.
DIFFERENT = [
    f"tests/test_pread_backend.py::PreadBackendTests::{name}"
    for name in (
        "test_prefetch_works_from_any_backend",
        "test_prefetch_requires_cuda",
        "test_prefetch_device_overrides_the_handle",
    )
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A copy of their tests, which write into their folder."""
    theirs = Path(os.environ["CKPTFS_SAFETENSORS"]) / "bindings/python/tests"
    folder = tmp_path_factory.mktemp("theirs")
    shutil.copytree(theirs, folder / "tests")
    return folder


def test_safetensors_own_tests_pass(folder):
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-p", "safetensors_alias"]
    command += [f"--deselect={test}" for test in DIFFERENT] + [f"tests/{file}.py" for file in FILES]
    here = os.pathsep.join([str(COMMON), os.environ.get("PYTHONPATH", "")])
    environment = {**os.environ, "PYTHONPATH": here}
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout
    for file in FILES:
        # A dot for each test that passed.
        assert re.search(rf"^tests/{file}\.py [a-zA-Z]*\.", done.stdout, re.MULTILINE), done.stdout


@pytest.mark.parametrize("test", DIFFERENT)
def test_the_differences_are_there(folder, test):
    assert test.rsplit(":", 1)[1] in (folder / "tests/test_pread_backend.py").read_text()
