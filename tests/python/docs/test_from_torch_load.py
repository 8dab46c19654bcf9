"""The code of docs/from-torch-load.md runs as it stands there, and gives what torch.load gave."""

import argparse
import io
import os
import pickle
import re

import ckptfs
import numpy
import pytest
import safetensors.torch
import torch

from compare import check_same
from guides import blocks, ran, rows
from samples import numbers

GUIDE = "from-torch-load.md"
NAMES, OTHER_DICTIONARIES = blocks(GUIDE)


class Runs:
    """An object that would leave a trace if its pickle were executed."""

    def __reduce__(self):
        return open, ("ran", "w")


def model_of(seed=1):
    torch.manual_seed(seed)
    parts = {"encoder": torch.nn.Linear(3, 4), "norm": torch.nn.BatchNorm1d(4), "head": torch.nn.Linear(4, 2)}
    return torch.nn.ModuleDict(parts)


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    state = model_of().state_dict()
    torch.save(state, "model.pt")
    optimizer = torch.optim.AdamW(model_of().parameters())
    for parameter in optimizer.param_groups[0]["params"]:
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    ema = {name: tensor * 2 for name, tensor in state.items()}
    everything = {"state_dict": state, "ema": ema, "optimizer": optimizer.state_dict(), "epoch": 3}
    torch.save({**everything, "args": argparse.Namespace(lr=1)}, "last.ckpt")
    torch.save({"generator": {"weights": state}, "discriminator": {"weights": ema}, "step": 1}, "gan.pt")
    (tmp_path / "shards").mkdir()
    names = list(state)
    for n, (place, part) in enumerate((("a.bin", names[:3]), ("b.bin", names[3:])), 1):
        torch.save({name: state[name] for name in part}, place)
        os.link(place, f"shards/pytorch_model-{n:05}-of-00002.bin")
    return tmp_path


def code(cell):
    """The call that a cell of the table names."""
    return re.search("`(.+?)`", cell)[1].replace(r"\|", "|")


*READS, INTO_A_MODEL, SAVES = [tuple(map(code, row)) for row in rows(GUIDE, "before")]


def called(call, **given):
    return eval(call, ran(NAMES) | given)


@pytest.mark.parametrize("before, now", READS)
def test_one_call_becomes_another(folder, before, now):
    data = (folder / "model.pt").read_bytes()
    old, new = (called(call, io=io, data=data) for call in (before, now))
    if isinstance(old, torch.Tensor):
        old, new = {"it": old}, {"it": new}
    if "half" in before:
        # ckptfs casts floating point alone.
        assert old.pop("norm.num_batches_tracked") == new.pop("norm.num_batches_tracked").half()
    if "meta" in before:
        assert {tensor.device.type for tensor in [*old.values(), *new.values()]} == {"meta"}
        old, new = (
            {name: torch.zeros_like(one, device="cpu") for name, one in each.items()} for each in (old, new)
        )
    check_same(new, old)


@pytest.mark.parametrize("call", INTO_A_MODEL)
def test_a_model_is_loaded(folder, call):
    model = model_of(2)
    called(call, model=model)
    check_same(dict(model.state_dict()), model_of().state_dict())


@pytest.mark.parametrize("call, load", [*zip(SAVES, (torch.load, safetensors.torch.load_file))])
def test_a_model_is_saved(folder, call, load):
    called(call, model=model_of(), path="saved")
    check_same(load("saved"), model_of().state_dict())


def test_other_dictionaries_are_noted_and_chosen_by_root(folder):
    made = ran(OTHER_DICTIONARIES)
    shown = "shown: `state_dict` (the usual key); not shown, choose with --root: `ema`, `optimizer`"
    assert made["notes"] == [shown]
    state = torch.load("last.ckpt", weights_only=False)["optimizer"]["state"]
    check_same(made["moments"], {f"{n}.{key}": one for n, held in state.items() for key, one in held.items()})


def test_the_table_of_differences_holds(folder):
    weight, large = torch.nn.Parameter(numbers(1, 2, 3)), numbers(2, 1000, 4)
    torch.save(
        {"one": weight, "two": weight, "count": torch.tensor(7), "part": large[:2], "turned": large[:5].t(),
         "n": 1, "last": torch.ones(2, dtype=torch.int64), "list": [torch.ones(2)]}, "x.pt",
    )  # fmt: skip
    old, new = torch.load("x.pt"), ckptfs.torch.load_file("x.pt")
    owned = ckptfs.torch.load_file("x.pt", backend="pread")
    check_same(owned, new)
    assert set(old) - set(new) == {"n", "list"} and set(new) - set(old) == {"list.0"}
    assert type(new) is dict and list(new) != list(old) and list(new)[:2] == ["count", "last"]
    assert isinstance(old["one"], torch.nn.Parameter) and type(new["one"]) is torch.Tensor
    for tensors, shared in ((old, True), (new, True), (owned, False)):
        assert (tensors["one"].data_ptr() == tensors["two"].data_ptr()) == shared
    assert old["part"].untyped_storage().nbytes() == large.nbytes
    assert new["part"].untyped_storage().nbytes() == owned["part"].untyped_storage().nbytes() == 32
    assert not old["turned"].is_contiguous() and new["turned"].is_contiguous()
    assert torch.equal(old["turned"], new["turned"])
    with ckptfs.safe_open("x.pt", "pt") as f:
        assert any("left out" in note and "`n`" in note for note in f.notes())


def test_an_object_beside_the_state_dict_is_ignored(folder):
    torch.save({"state_dict": {"w": torch.ones(2)}, "callbacks": Runs()}, "x.pt")
    with pytest.raises(Exception, match="Weights only load failed"):
        torch.load("x.pt", weights_only=True)
    check_same(ckptfs.torch.load_file("x.pt"), {"w": torch.ones(2)})
    assert not os.path.exists("ran")


def test_a_model_with_tied_weights_stays_tied(folder):
    def tied(seed):
        torch.manual_seed(seed)
        model = torch.nn.Sequential(torch.nn.Embedding(5, 3), torch.nn.Linear(3, 5))
        model[1].weight = model[0].weight
        return model

    torch.save(tied(1).state_dict(), "x.pt")
    model = tied(2)
    model.load_state_dict(ckptfs.torch.load_file("x.pt", backend="pread"))
    assert model[1].weight is model[0].weight
    check_same(dict(model.state_dict()), tied(1).state_dict())


ONE = torch.ones(2)

REFUSED = {
    "object": ({"w": ONE, "it": Runs()}, "not executed"),
    "array": ({"w": ONE, "it": numpy.ones(2)}, "not executed"),
    "sparse": ({"w": ONE, "it": torch.eye(3).to_sparse()}, "sparse"),
    "quantised": ({"w": ONE, "it": torch.quantize_per_tensor(ONE, 1.0, 0, torch.quint8)}, "quantised"),
    "complex128": ({"w": ONE, "it": ONE.to(torch.complex128)}, "complex128"),
    "conjugate": ({"w": ONE, "it": ONE.to(torch.complex64).conj()}, "conjugate"),
}


@pytest.mark.parametrize("what", REFUSED)
def test_a_refused_tensor_can_be_left_out(folder, what):
    value, said = REFUSED[what]
    torch.save(value, "x.pt")
    with pytest.raises(ckptfs.SafetensorError, match=f"`it`: .*{said}") as fault:
        ckptfs.torch.load_file("x.pt")
    assert str(fault.value).startswith("x.pt: ")
    assert fault.value.__notes__[0].startswith("what to do: leave it out with allow_partial=True; or, ")
    check_same(ckptfs.torch.load_file("x.pt", allow_partial=True), {"w": ONE})
    assert not os.path.exists("ran")


def test_refused_checkpoints_have_the_messages_of_the_page(folder):
    def refused(match):
        with pytest.raises(ckptfs.SafetensorError, match=match) as fault:
            ckptfs.torch.load_file("x.pt")
        return fault.value.__notes__[0]

    torch.save(model_of(), "x.pt")
    refused("ModuleDict.*not a dictionary of tensors")
    torch.jit.save(torch.jit.script(torch.nn.Linear(2, 2)), "x.pt")
    refused("TorchScript program")
    (folder / "x.pt").write_bytes(pickle.dumps({"w": 1}))
    refused("a pickle that torch.save did not write")
    torch.save({"a": {"b": ONE}, "a.b": ONE}, "x.pt")
    told = refused("two entries have the name `a.b`")
    assert told == "what to do: choose with root='a'"
    check_same(ckptfs.torch.load_file("x.pt", root="a"), {"b": ONE})
