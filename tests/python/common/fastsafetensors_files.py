"""Files that both `ckptfs.fastsafetensors` and fastsafetensors read, and loaders of either."""

import ckptfs.fastsafetensors as ours
import fastsafetensors as theirs
import pytest
import torch
from safetensors.torch import save_file

from samples import numbers

TENSORS = {
    "floats": numbers(1, 6, 4), "halves": numbers(2, 6, 4).half(), "brains": numbers(3, 5, 7).bfloat16(),
    "whole": torch.arange(-12, 12).reshape(6, 4), "bytes": torch.arange(9, dtype=torch.uint8),
    "flags": torch.tensor([True, False, True]), "small": numbers(4, 6, 4).to(torch.float8_e4m3fn),
    "scales": numbers(5, 8).abs().to(torch.float8_e8m0fnu), "words": torch.arange(7).to(torch.uint16),
    "one": torch.tensor(3.5), "none": torch.zeros(0, 4),
    "pairs": torch.arange(12, dtype=torch.uint8).reshape(2, 6).view(torch.float4_e2m1fn_x2),
}  # fmt: skip
MORE = {"other.floats": numbers(6, 3, 4), "other.wide": numbers(7, 6, 2)}


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    folder = tmp_path_factory.mktemp("files")
    save_file(TENSORS, folder / "b.safetensors", metadata={"format": "pt", "of": "b"})
    save_file(MORE, folder / "a.safetensors", metadata={"of": "a"})
    return [str(folder / "b.safetensors"), str(folder / "a.safetensors")]


def loaded(package, files, *copy, **made):
    """A loader of either package, and its buffers. The files are copied in the order of their paths."""
    loader = package.SafeTensorsFileLoader(None, "cpu", nogds=True, **made)
    loader.add_filenames({0: files})
    return loader, loader.copy_files_to_device(*copy)


@pytest.fixture
def both(files):
    pairs = [loaded(package, files) for package in (ours, theirs)]
    yield pairs
    for loader, buffers in pairs:
        buffers.close()
        loader.close()
