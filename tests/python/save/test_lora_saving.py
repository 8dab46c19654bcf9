"""Adapters keep the metadata of their libraries: saved by us and read by safetensors, peft and diffusers, and the
other way round."""

import json

import ckptfs
import ckptfs.torch
import pytest
import safetensors
import safetensors.torch
import torch
from diffusers import StableDiffusionPipeline
from peft import LoraConfig, PeftModel, get_peft_model, get_peft_model_state_dict
from peft.utils import load_peft_weights

import models
from compare import check_same
from samples import numbers


def peft():
    layers = [f"base_model.model.model.layers.{n}.self_attn.{which}_proj" for n in range(3) for which in "qv"]
    tensors = {f"{layer}.lora_{ab}.weight": numbers(n, 4, 8) for n, layer in enumerate(layers) for ab in "AB"}
    return tensors | {"base_model.model.lm_head.lora_embedding_A": numbers(9, 4, 3).bfloat16()}, {"format": "pt"}


def diffusers():
    blocks = ["unet.down_blocks.0.attentions.0.to_q", "unet.mid_block.attentions.0.to_out.0",
              "text_encoder.text_model.encoder.layers.0.self_attn.q_proj"]  # fmt: skip
    tensors = {f"{block}.lora_{ab}.weight": numbers(n, *shape).half()
               for n, block in enumerate(blocks) for ab, shape in (("A", (4, 8)), ("B", (8, 4)))}  # fmt: skip
    about = {"unet.r": 4, "unet.lora_alpha": 4, "unet.target_modules": ["to_q", "to_out.0"]}
    return tensors, {"format": "pt", "lora_adapter_metadata": json.dumps(about, indent=2, sort_keys=True)}


def kohya():
    names = ["lora_unet_down_blocks_0_attentions_0_proj_in", "lora_te_text_model_encoder_layers_0_mlp_fc1",
             "lora_unet_größe_日本語_\U0001f3a8"]  # fmt: skip
    tensors = {}
    for n, name in enumerate(names):
        tensors[f"{name}.alpha"] = torch.tensor(float(n + 1), dtype=torch.float16)
        tensors[f"{name}.lora_down.weight"] = numbers(n, 4, 8, 1, 1).half()
        tensors[f"{name}.lora_up.weight"] = numbers(n + 7, 8, 4, 1, 1).half()
    tags = {f"{n}_größe": {"1girl, \"quoted\"": n, "日本語\\タグ": n, "\U0001f3a8\u200d\u2028": n} for n in range(40)}
    metadata = {f"ss_setting_{n}": str(n * 0.1) for n in range(150)} | {
        "ss_tag_frequency": json.dumps(tags), "ss_tags_as_they_are": json.dumps(tags, ensure_ascii=False),
        "ss_training_comment": "first\r\nsecond\t\x00\x1f\x7f", "ss_network_args": "{}", "ss_none": "None", "": "no name",
        "ss_empty": "", "modelspec.title": "e\u0301 is not \u00e9", "sshs_model_hash": "0" * 64, "ключ": "значение",
    }  # fmt: skip
    return tensors, metadata


KINDS = [peft, diffusers, kohya]


@pytest.fixture(params=KINDS, ids=lambda kind: kind.__name__)
def adapter(request):
    return request.param()


def has(open_with, path, tensors, metadata):
    with open_with(path, framework="pt") as f:
        assert f.metadata() == metadata and set(f.keys()) == set(tensors)
        check_same({name: f.get_tensor(name) for name in f.keys()}, tensors)


def test_our_save_keeps_the_metadata(tmp_path, adapter):
    tensors, metadata = adapter
    path = tmp_path / "größe \U0001f3a8.safetensors"
    ckptfs.torch.save_file(tensors, path, metadata)
    has(safetensors.safe_open, path, tensors, metadata)
    check_same(safetensors.torch.load_file(path), tensors)
    check_same(safetensors.torch.load(path.read_bytes()), tensors)


def test_metadata_survives_a_save_by_safetensors_and_then_by_us(tmp_path, adapter):
    tensors, metadata = adapter
    first, second = tmp_path / "first.safetensors", tmp_path / "second.safetensors"
    safetensors.torch.save_file(tensors, first, metadata)
    has(ckptfs.safe_open, first, tensors, metadata)
    with ckptfs.safe_open(first, framework="pt") as f:
        ckptfs.torch.save_file(f.get_tensors(), second, f.metadata())
    has(safetensors.safe_open, second, tensors, metadata)
    has(ckptfs.safe_open, second, tensors, metadata)


def test_an_adapter_can_be_saved_over_the_file_it_is_mapped_from(tmp_path, adapter):
    tensors, metadata = adapter
    path = tmp_path / "adapter_model.safetensors"
    safetensors.torch.save_file(tensors, path, metadata)
    with ckptfs.safe_open(path, framework="pt") as f:
        ckptfs.torch.save_file(ckptfs.torch.load_file(path), path, f.metadata() | {"again": "ja"})
    has(safetensors.safe_open, path, tensors, metadata | {"again": "ja"})


def test_in_shards_every_one_has_the_metadata(tmp_path, adapter):
    tensors, metadata = adapter
    names = ckptfs.torch.save_sharded(tensors, tmp_path, 300, metadata, name="adapter_model.safetensors")
    assert len(names) > 2
    for name in names[:-1]:
        with safetensors.safe_open(tmp_path / name, framework="pt") as f:
            assert f.metadata() == metadata
    check_same(ckptfs.torch.load_sharded(tmp_path), tensors)


def test_peft_loads_what_we_saved(tmp_path):
    config = LoraConfig(r=4, target_modules=["q_proj", "v_proj"], init_lora_weights=False)
    model = get_peft_model(models.llama(), config)
    model.save_pretrained(tmp_path / "theirs")
    model.peft_config["default"].save_pretrained(tmp_path / "ours")
    path = tmp_path / "ours" / "adapter_model.safetensors"
    ckptfs.torch.save_file(get_peft_model_state_dict(model), path, {"format": "pt"})
    check_same(load_peft_weights(tmp_path / "ours", device="cpu"), load_peft_weights(tmp_path / "theirs", device="cpu"))
    models.check_same(PeftModel.from_pretrained(models.llama(), tmp_path / "ours"),
                      PeftModel.from_pretrained(models.llama(), tmp_path / "theirs"))  # fmt: skip


@pytest.mark.parametrize("kind", [diffusers, kohya], ids=lambda kind: kind.__name__)
def test_diffusers_reads_what_we_saved(tmp_path, kind):
    tensors, metadata = kind()
    # The library knows these names alone.
    tensors = {name: tensor for name, tensor in tensors.items() if name.isascii()}
    found = []
    for save, folder in (safetensors.torch.save_file, tmp_path / "theirs"), (ckptfs.torch.save_file, tmp_path / "ours"):
        folder.mkdir()
        save(tensors, folder / "pytorch_lora_weights.safetensors", metadata)
        found.append(StableDiffusionPipeline.lora_state_dict(folder, return_lora_metadata=True))
    (theirs, theirs_alphas, their_metadata), (ours, our_alphas, our_metadata) = found
    check_same(ours, theirs)
    assert len(ours) >= 4 and our_alphas == theirs_alphas and our_metadata == their_metadata
    assert (our_metadata is not None) == (kind is diffusers)
