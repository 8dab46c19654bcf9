"""Tied weights are saved in shards once, and transformers and ckptfs tie them again; what shares memory otherwise is
refused."""

import ckptfs.torch
import pytest
import safetensors.torch
import torch

import models
from compare import check_same


@pytest.mark.parametrize("size", ["600", "1GB"])
def test_tied_weights_are_written_once_and_tied_again(tmp_path, size):
    model = models.gpt2()
    state = model.state_dict()
    assert state["lm_head.weight"].data_ptr() == state["transformer.wte.weight"].data_ptr()
    model.config.save_pretrained(tmp_path)
    names = ckptfs.torch.save_sharded(state, tmp_path, size)
    assert names == ["model.safetensors"] if size == "1GB" else len(names) > 3
    # The first name stays, which is the one that older versions of transformers look for, too.
    kept = {name: tensor for name, tensor in state.items() if name != "lm_head.weight"}
    check_same(ckptfs.torch.load_sharded(tmp_path), kept)
    check_same({k: v for name in names if name.endswith(".safetensors")
                for k, v in safetensors.torch.load_file(tmp_path / name).items()}, kept)  # fmt: skip
    with ckptfs.safe_open(tmp_path, "pt") as f:
        assert f.metadata() == {"format": "pt", "lm_head.weight": "transformer.wte.weight"}

    found, told = type(model).from_pretrained(tmp_path, output_loading_info=True)
    assert not any(told.values()), told
    models.check_same(found, model)
    assert found.lm_head.weight is found.transformer.wte.weight

    for load in (lambda other: ckptfs.torch.load_model(other, tmp_path), lambda other: load_into(other, tmp_path)):
        other = models.gpt2()
        for parameter in other.parameters():
            torch.nn.init.zeros_(parameter)
        load(other)
        check_same(other.state_dict(), state)
        assert other.lm_head.weight is other.transformer.wte.weight


def load_into(model, path):
    state = model.state_dict()
    loaded = ckptfs.torch.load_file(path, into=state)
    assert {*loaded} == {*state} and all(loaded[name] is state[name] for name in state)


def test_tied_metadata_leaves_what_was_given(tmp_path):
    tensor = torch.ones(3)
    tied = {"b": tensor, "a": tensor, "mine": tensor.view(3), "flat": torch.zeros(2)}
    ckptfs.torch.save_sharded(tied, tmp_path, metadata={"mine": "kept as it is"})
    with safetensors.safe_open(tmp_path / "model.safetensors", "pt") as f:
        assert sorted(f.keys()) == ["b", "flat"] and f.metadata() == {"a": "b", "mine": "kept as it is"}


SHARING = {
    "a-part": lambda whole: whole[1:], "another-shape": lambda whole: whole.view(-1),
    "another-type": lambda whole: whole.view(torch.int32), "overlapping": lambda whole: whole[:2],
}  # fmt: skip


@pytest.mark.parametrize("other", SHARING.values(), ids=SHARING)
def test_tensors_that_share_memory_otherwise_are_refused(tmp_path, other):
    whole = torch.zeros(4, 4)
    with pytest.raises(RuntimeError, match=r"share memory, and are not the same tensor.*`.clone\(\)`"):
        ckptfs.torch.save_sharded({"a": whole, "b": other(whole)}, tmp_path / "x")
    assert not (tmp_path / "x").exists()
