"""The code of docs/python.md runs as it stands there, and its tables have the arguments and settings that there are."""

import importlib
import inspect
import re

import ckptfs
import ckptfs.torch
import pytest
import torch
from ckptfs import settings

import models
from compare import check_same
from guides import blocks, ran, rows
from program import REPOSITORY
from samples import numbers

LOADING, UNCHANGED, MOUNTS, _DEVICES, SAVING = blocks("python.md")


@pytest.fixture
def shelf(tmp_path, monkeypatch, left):
    """The files that the page names. Nothing stays mounted, installed or set."""
    models.save_shards(models.llama(), tmp_path / "models/llama")
    for part in ("unet", "vae"):
        (tmp_path / "sdxl" / part).mkdir(parents=True)
        ckptfs.torch.save_file({part: numbers(1, 3)}, tmp_path / f"sdxl/{part}/model.safetensors")
    (tmp_path / "runs").mkdir()
    averaged = {"encoder.weight": torch.full((2,), 0.5), "head.weight": torch.ones(2)}
    torch.save({"state_dict": {"encoder.weight": torch.ones(2)}, "ema": averaged}, tmp_path / "runs/last.ckpt")
    torch.save({"lm_head.weight": numbers(2, 3, 300)}, tmp_path / "pytorch_model.bin")
    monkeypatch.chdir(tmp_path)
    yield tmp_path
    ckptfs.uninstall()
    ckptfs.configure(backend=None, memory=None)
    assert not left()


@pytest.fixture
def alone():
    """A process group of this process."""
    store = torch.distributed.HashStore()
    torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    yield
    torch.distributed.destroy_process_group()


def test_the_loads_of_the_page_give_what_it_says(shelf, alone, capsys):
    assert LOADING.count('"cuda:0"') == 1
    model = models.llama()
    expected = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    made = ran(LOADING.replace('"cuda:0"', '"cpu"'), model=model)
    check_same(made["tensors"], expected)
    check_same(model.state_dict(), expected)
    check_same(made["parts"], expected)
    assert made["halves"]["encoder.weight"].dtype == torch.bfloat16 and len(made["halves"]) == 1
    assert list(made["unet"]) == ["unet"] and list(made["vae"]) == ["vae"]
    assert torch.equal(made["columns"], numbers(2, 3, 300)[:, 128:256])
    assert torch.equal(made["tensor"], numbers(2, 3, 300))
    assert "1 tensors" in capsys.readouterr().out


def test_unchanged_programs_load_through_install(shelf):
    from transformers import AutoModel

    before = ckptfs.stats()["loads"]
    ran(UNCHANGED, ckptfs=ckptfs, AutoModel=AutoModel)
    assert ckptfs.stats()["loads"] > before
    ckptfs.torch.load_file("models/llama")
    assert not ckptfs.last_report().mapped


def test_a_mount_of_the_page_is_gone_after_its_block(shelf):
    from transformers import AutoModel

    made = ran(MOUNTS, ckptfs=ckptfs, AutoModel=AutoModel)
    assert isinstance(made["model"], torch.nn.Module) and not made["path"].exists()


def test_the_saves_of_the_page_load_again(shelf):
    (shelf / "cache").mkdir()
    lora, model = {"a": numbers(1, 2)}, models.llama()
    made = ran(SAVING, lora=lora, model=model, image=3, encode=lambda image: {"latent": torch.full((2,), float(image))})
    check_same(ckptfs.torch.load_file("adapter.safetensors"), lora)
    check_same(ckptfs.torch.load_sharded("models/mine"), model.state_dict())
    check_same(ckptfs.torch.load_file("cache/1.safetensors"), made["latents"])


def test_the_arguments_of_a_load_are_those_of_load_file():
    documented = [row[0].strip("`") for row in rows("python.md", "argument of a load")]
    assert set(documented) == set(inspect.signature(ckptfs.torch.load_file).parameters) - {"filename"}


def test_the_settings_are_those_of_configure():
    documented = {row[0].strip("`"): row[1].strip("`") for row in rows("python.md", "`configure(...)`")}
    assert set(documented) == set(inspect.signature(ckptfs.configure).parameters)
    assert documented == settings._VARIABLES


def test_the_public_names_are_those_that_the_modules_export():
    documented = {row[0].strip("`"): [name.strip("`") for name in row[1].split(", ")] for row in rows("python.md", "module")}
    assert list(documented) == ["ckptfs", "ckptfs.torch", "ckptfs.numpy", "ckptfs.fastsafetensors"]
    for module, names in documented.items():
        exported = set(importlib.import_module(module).__all__)
        # A version is no call, and `import *` leaves it out.
        assert set(names) - {"__version__"} == exported and len(names) == len(set(names)), module
        assert all(hasattr(importlib.import_module(module), name) for name in names)


def test_what_the_guides_import_is_public():
    public = {row[0].strip("`"): row[1] for row in rows("python.md", "module")}
    text = "".join(page.read_text() for page in [REPOSITORY / "README.md", *(REPOSITORY / "docs").glob("*.md")])
    modules = set(re.findall(r"^(?:from|import) (ckptfs[\w.]*)", text, re.MULTILINE))
    assert modules and modules <= set(public)
    for module, names in re.findall(r"^from (ckptfs[\w.]*) import ([\w, ]+)", text, re.MULTILINE):
        assert all(f"`{name.strip().split(' as ')[0]}`" in public[module] for name in names.split(",")), (module, names)


def test_the_remedy_is_a_note():
    with pytest.raises(FileNotFoundError) as missing:
        ckptfs.torch.load_file("nothing.pt")
    assert missing.value.__notes__ == ["what to do: check the path: ls ."]
    assert "what to do" not in str(missing.value)
