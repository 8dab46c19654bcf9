"""peft and transformers load adapters from a mount: `adapter_model.bin` is `adapter_model.safetensors` there, beside
a base model that is a virtual file itself."""

from types import SimpleNamespace

import pytest
import torch
from peft import AutoPeftModelForCausalLM, LoraConfig, PeftModel, get_peft_model
from transformers import AutoModelForCausalLM

import models
from models import check_loads_same, check_same, fingerprints, on_show, tensors_of


@pytest.fixture(scope="module")
def shelf(tmp_path_factory):
    """A sharded base model, and adapters for it as pickles, for all their kinds of tensors. They have low ranks,
    modules saved whole, and two adapters in folders of their own."""
    folder = tmp_path_factory.mktemp("peft")
    source = folder / "source"
    models.save_shards(models.llama(), source / "base")
    with on_show(folder) as mount:
        model = AutoModelForCausalLM.from_pretrained(source / "base")
        config = LoraConfig(
            r=4, target_modules=["q_proj", "v_proj"], modules_to_save=["lm_head"], init_lora_weights=False
        )
        model = get_peft_model(model, config, adapter_name="first")
        model.add_adapter("second", LoraConfig(r=2, target_modules=["o_proj"], init_lora_weights=False))
        # The adapter's configuration names the base, which both find through the mount.
        for name in ("first", "second"):
            model.peft_config[name].base_model_name_or_path = str(mount / "base")
        model.save_pretrained(source / "adapters", safe_serialization=False)
        model.save_pretrained(folder / "twins")
        for name in ("first", "second"):
            assert (source / "adapters" / name / "adapter_model.bin").exists()
        yield SimpleNamespace(
            source=source / "adapters", mount=mount / "adapters", base=mount / "base", twins=folder / "twins"
        )


@pytest.fixture(params=["first", "second"])
def name(request):
    return request.param


def test_adapters_take_the_place_of_pickles(shelf, name):
    shown = sorted(file.name for file in (shelf.mount / name).glob("adapter_model*"))
    assert shown == ["adapter_model.safetensors"]


@pytest.mark.parametrize("more", [{}, {"is_trainable": True}, {"low_cpu_mem_usage": True}], ids=str)
def test_a_peft_model_loads_its_adapter(shelf, name, more):
    def load(folder):
        base = AutoModelForCausalLM.from_pretrained(shelf.base)
        return PeftModel.from_pretrained(base, folder, **more)

    check_loads_same(load, shelf.source / name, shelf.mount / name)


def test_an_adapter_loads_from_a_subfolder(shelf, name):
    def load(folder):
        return PeftModel.from_pretrained(
            AutoModelForCausalLM.from_pretrained(shelf.base), folder, subfolder=name
        )

    check_loads_same(load, shelf.source, shelf.mount)


def test_base_and_adapter_load_by_one_name(shelf, name):
    check_loads_same(AutoPeftModelForCausalLM.from_pretrained, shelf.source / name, shelf.mount / name)


def test_a_second_adapter_loads_beside_the_first(shelf):
    def load(folder):
        model = PeftModel.from_pretrained(
            AutoModelForCausalLM.from_pretrained(shelf.base), folder / "first", adapter_name="first"
        )
        model.load_adapter(folder / "second", adapter_name="second")
        return model

    check_loads_same(load, shelf.source, shelf.mount)


def test_transformers_itself_loads_an_adapter(shelf, name):
    """transformers cannot load a pickled adapter from a folder, but its safetensors twin: and so the virtual file."""

    def load(folder):
        model = AutoModelForCausalLM.from_pretrained(shelf.base)
        model.load_adapter(str(folder))
        return model

    for way in (load, AutoModelForCausalLM.from_pretrained):
        with pytest.raises(FileNotFoundError, match="adapter_model.safetensors"):
            way(shelf.source / name)
        first, second = check_loads_same(way, shelf.twins / name, shelf.mount / name)
        prompt = torch.tensor([[1, 7, 8, 9]])
        assert torch.equal(first(prompt).logits, second(prompt).logits)


def test_a_merged_adapter_gives_the_same_weights(shelf, name):
    """The outputs of base and adapter are the same too."""
    merged = []
    for folder in (shelf.source, shelf.mount):
        base = AutoModelForCausalLM.from_pretrained(shelf.base)
        merged.append(PeftModel.from_pretrained(base, folder / name).merge_and_unload())
    check_same(merged[1], merged[0])
    plain = AutoModelForCausalLM.from_pretrained(shelf.base)
    assert fingerprints(tensors_of(merged[1])) != fingerprints(tensors_of(plain))
