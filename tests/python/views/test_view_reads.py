"""What a mounted view reads from the disk: the bytes that it shows, and little else."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from page_cache import evict

MIB = 1 << 20

TOTAL_BYTES = 96 * MIB

RECIPE = """
[[file]]
path = "part/model.safetensors"
from = ["whole"]
slice = [{ tensors = "*", dim = 0, part = "3/8" }]
"""


def bytes_from_disk(pid):
    lines = Path(f"/proc/{pid}/io").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("read_bytes:"))


@pytest.mark.parametrize("tensor_mib", [1, 2, 3, 16])
def test_a_slice_of_an_eighth_reads_an_eighth_whatever_the_size_of_tensors(mounts, tmp_path, tensor_mib):
    source, recipe = tmp_path / "models", tmp_path / "views.toml"
    (source / "whole").mkdir(parents=True)
    state = {
        f"layers.{n:03}.weight": torch.randn(8, tensor_mib * MIB // 32) for n in range(TOTAL_BYTES // (tensor_mib * MIB))
    }
    save_file(state, source / "whole/model.safetensors", metadata={"format": "pt"})
    recipe.write_text(RECIPE)
    mount = mounts(source, "--views", recipe)
    # Its header is parsed before: that reads a page or more of the source.
    size = (mount / "part/model.safetensors").stat().st_size
    evict([source / "whole/model.safetensors"])
    before = bytes_from_disk(mount.pid)
    with open(mount / "part/model.safetensors", "rb") as file:
        while file.read(MIB):
            pass
    assert bytes_from_disk(mount.pid) - before <= 1.05 * size
    for name, tensor in load_file(mount / "part/model.safetensors").items():
        assert torch.equal(tensor, state[name][2:3])
