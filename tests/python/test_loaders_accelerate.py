"""accelerate loads checkpoints from a mount by folder and by file, whole and with layers left on the disk,
as it loads them from the original."""

import json
from types import SimpleNamespace

import pytest
import torch
from accelerate import init_empty_weights, load_checkpoint_and_dispatch, load_checkpoint_in_model
from accelerate.utils.modeling import get_state_dict_offloaded_model
from transformers import AutoConfig, AutoModelForCausalLM

import models
from models import check_fingerprints, check_loads_same, check_same, fingerprints, on_show

LAYOUTS = {"shards": models.save_shards, "bin": models.save_bin, "bin-shards": models.save_bin_shards}
MAKERS = {"llama": models.llama, "gpt2": models.gpt2}


@pytest.fixture(scope="module")
def shelf(tmp_path_factory):
    folder = tmp_path_factory.mktemp("accelerate")
    source = folder / "source"
    made = {name: make() for name, make in MAKERS.items()}
    for layout, save in LAYOUTS.items():
        for name, model in made.items():
            save(model, source / f"{name}-{layout}")
    with on_show(folder) as mount:
        yield SimpleNamespace(source=source, mount=mount.point, made=made)


@pytest.fixture(params=LAYOUTS)
def layout(request):
    return request.param


@pytest.fixture(params=MAKERS)
def name(request):
    return request.param


def empty(folder):
    with init_empty_weights(include_buffers=False):
        model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder))
    model.tie_weights()
    return model.eval()


def of_a_file(folder):
    """The one file of the checkpoint, or the index of its shards."""
    index = list(folder.glob("*.index.json"))
    return str((index or [*folder.glob("*.safetensors"), *folder.glob("*.bin")])[0])


@pytest.mark.parametrize("what", [str, of_a_file], ids=["folder", "file"])
@pytest.mark.parametrize("dtype", [None, torch.bfloat16], ids=str)
def test_load_checkpoint_in_model(shelf, name, layout, what, dtype):
    def load(folder):
        model = empty(folder)
        load_checkpoint_in_model(model, what(folder), device_map={"": "cpu"}, dtype=dtype)
        return model

    where = f"{name}-{layout}"
    first, _ = check_loads_same(load, shelf.source / where, shelf.mount / where)
    if dtype is None:
        check_same(first, shelf.made[name])


def test_into_a_model_that_is_there(shelf, name, layout):
    def load(folder):
        torch.manual_seed(1)
        model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder))
        load_checkpoint_in_model(model, str(folder))
        return model

    where = f"{name}-{layout}"
    check_loads_same(load, shelf.source / where, shelf.mount / where)


@pytest.mark.parametrize("what", [str, of_a_file], ids=["folder", "file"])
def test_dispatch_with_disk_offload(shelf, layout, what, tmp_path):
    prompt, found = torch.tensor([[1, 7, 8, 9]]), []
    for n, root in enumerate((shelf.source, shelf.mount)):
        folder = root / f"llama-{layout}"
        model = load_checkpoint_and_dispatch(
            empty(folder), what(folder), device_map="auto", max_memory={"cpu": 60_000},
            offload_folder=tmp_path / str(n), no_split_module_classes=["LlamaDecoderLayer"],
        )  # fmt: skip
        assert set(model.hf_device_map.values()) == {"cpu", "disk"}
        assert json.loads((tmp_path / str(n) / "index.json").read_text())
        tokens = model.generate(prompt, max_new_tokens=8, do_sample=False)
        found.append((fingerprints(get_state_dict_offloaded_model(model)), tokens.tolist()))
    check_fingerprints(found[1][0], found[0][0])
    assert found[1][1] == found[0][1]


def test_a_name_that_is_not_shown(shelf):
    """Who names the index or the pickle itself must name the image."""
    for gone in ("llama-shards/model.safetensors.index.json", "llama-bin/pytorch_model.bin"):
        assert (shelf.source / gone).exists()
        with pytest.raises(ValueError, match="should be the path to a file"):
            load_checkpoint_in_model(empty(shelf.source / "llama-bin"), str(shelf.mount / gone))
