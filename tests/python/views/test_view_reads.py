"""What a mounted view reads from the disk: the bytes that it shows, and little else."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from page_cache import evict
from samples import numbers

MIB = 1 << 20

TOTAL_BYTES = 384 * MIB

RECIPE = """
[[file]]
path = "part/model.safetensors"
from = ["whole"]
slice = [{ tensors = "*", dim = 0, part = "3/8" }]
"""


def bytes_from_disk(pid):
    lines = Path(f"/proc/{pid}/io").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("read_bytes:"))


def read_cold(mount, source):
    """Reads a view whole, and returns its bytes from the disk, as a share of its size."""
    shown = mount / "part/model.safetensors"
    # `stat` parses the source's header, before the reads are counted.
    size = shown.stat().st_size
    evict([source])
    before = bytes_from_disk(mount.pid)
    with open(shown, "rb") as file:
        while file.read(MIB):
            pass
    return (bytes_from_disk(mount.pid) - before) / size


@pytest.mark.parametrize("tensor_mib", [1, 2, 3, 16])
def test_a_slice_of_an_eighth_reads_an_eighth_whatever_the_size_of_tensors(mounts, tmp_path, tensor_mib):
    models, recipe = tmp_path / "models", tmp_path / "views.toml"
    source = models / "whole/model.safetensors"
    source.parent.mkdir(parents=True)
    noise = numbers(1, 8, tensor_mib * MIB // 32)
    state = {f"layers.{n:03}.weight": noise + n for n in range(TOTAL_BYTES // (tensor_mib * MIB))}
    save_file(state, source, metadata={"format": "pt"})
    recipe.write_text(RECIPE)
    shares = []
    # Requests that arrive out of order may have a block read twice: the least of three loads counts.
    for _ in range(3):
        mount = mounts(models, "--views", recipe)
        shares.append(read_cold(mount, source))
        mount.unmount()
    assert 0.95 <= min(shares) <= 1.05, shares
    mount = mounts(models, "--views", recipe)
    for name, tensor in load_file(mount / "part/model.safetensors").items():
        assert torch.equal(tensor, state[name][2:3])
