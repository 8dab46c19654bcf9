"""A safetensors file is not written under the name of another format, unless it is asked for."""

import os

import ckptfs
import ckptfs.numpy
import ckptfs.torch
import numpy
import pytest
import torch

Refused = ckptfs.SafetensorError

SAVES = {
    "torch": lambda path, **how: ckptfs.torch.save_file({"a": torch.ones(2)}, path, **how),
    "model": lambda path, **how: ckptfs.torch.save_model(torch.nn.Linear(2, 2), path, **how),
    "numpy": lambda path, **how: ckptfs.numpy.save_file({"a": numpy.ones(2)}, path, **how),
    "serialize": lambda path, **how: ckptfs.serialize_file({}, path, **how),
}


@pytest.mark.parametrize("name", SAVES)
@pytest.mark.parametrize("suffix", ["bin", "PT", "gguf", "npz"])
def test_a_name_of_another_format_is_refused_with_the_right_one(tmp_path, name, suffix):
    path = tmp_path / f"it's x.v1.{suffix}"
    with pytest.raises(Refused, match="is the suffix of another format") as refused:
        SAVES[name](path)
    assert str(refused.value).startswith(f"{path}: .{suffix.lower()} is")
    [remedy] = refused.value.__notes__
    assert "it'\\''s x.v1.safetensors" in remedy and "any_suffix=True" in remedy
    assert os.listdir(tmp_path) == []
    SAVES[name](path, any_suffix=True)
    assert os.listdir(tmp_path) == [path.name]


@pytest.mark.parametrize("name", ["x.safetensors", "x.sft", "x", "x.tmp", "x.v1"])
def test_other_names_are_written(tmp_path, name):
    for save in SAVES.values():
        save(tmp_path / name)
    assert os.listdir(tmp_path) == [name]


def test_cached_refuses_before_the_work(tmp_path):
    with pytest.raises(Refused, match=".pt is the suffix of another format"):
        ckptfs.torch.cached(tmp_path / "x.pt", lambda: pytest.fail("made"))
    # A file that is there is read, whatever its name.
    torch.save({"a": torch.ones(2)}, tmp_path / "x.pt")
    assert ckptfs.torch.cached(tmp_path / "x.pt", lambda: pytest.fail("made"))["a"].tolist() == [1, 1]
