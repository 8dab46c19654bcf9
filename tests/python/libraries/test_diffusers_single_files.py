"""diffusers reads single files through a mount as it reads the originals. They are the `.ckpt` of Stable Diffusion 1.x
by `from_single_file`, and LoRA weights in either format with their metadata."""

import os

os.environ["HF_HUB_OFFLINE"] = "1"

import pytest
import torch
from diffusers import StableDiffusionPipeline, UNet2DConditionModel
from peft import LoraConfig
from peft.utils import get_peft_model_state_dict
from safetensors import safe_open

from pipelines import (
    check_same_pipeline, check_same_state, image_of, loaded, sd_checkpoint, stable_diffusion,
)  # fmt: skip

# The UNet in the format of Stable Diffusion 1.x's trainer, for readers that know only this.
ORIGINAL_CONFIG = """
model:
  params:
    unet_config:
      params: {image_size: 16, in_channels: 4, out_channels: 4, model_channels: 32,
               channel_mult: [1, 2], attention_resolutions: [1], num_res_blocks: 1, num_heads: 8,
               use_spatial_transformer: true, transformer_depth: 1, context_dim: 32}
    first_stage_config: {params: {ddconfig: {ch_mult: [1, 2]}}}
"""


@pytest.fixture(scope="session")
def made(tmp_path_factory):
    return stable_diffusion(tmp_path_factory.mktemp("made") / "tokenizer")


@pytest.fixture(scope="session")
def configs(made, tmp_path_factory):
    """The pipeline as a folder, of which only the configurations are read."""
    folder = tmp_path_factory.mktemp("configs")
    made.save_pretrained(folder)
    for weights in folder.rglob("*.safetensors"):
        weights.unlink()
    return folder


@pytest.mark.parametrize("options", [[], ["--no-passthrough"]], ids=str)
@pytest.mark.parametrize("disable_mmap", [False, True])
def test_a_stable_diffusion_checkpoint_loads_as_a_pipeline(made, configs, mounts, tmp_path, options, disable_mmap):
    source = tmp_path / "checkpoints"
    source.mkdir()
    torch.save(sd_checkpoint(made), source / "v1-5.ckpt")
    mount = mounts(source, *options)
    load = StableDiffusionPipeline.from_single_file
    asked = {"config": str(configs), "disable_mmap": disable_mmap}
    original, said = loaded(load, source / "v1-5.ckpt", **asked)
    got, said_here = loaded(load, mount / "v1-5.safetensors", **asked)
    assert said_here <= said
    check_same_pipeline(got, original)
    check_same_pipeline(got, made)


def test_a_checkpoint_loads_by_its_original_config(made, configs, mounts, tmp_path):
    source = tmp_path / "checkpoints"
    source.mkdir()
    torch.save(sd_checkpoint(made), source / "v1-5.ckpt")
    config = tmp_path / "v1-inference.yaml"
    config.write_text(ORIGINAL_CONFIG)
    mount = mounts(source)
    load = UNet2DConditionModel.from_single_file
    original, said = loaded(load, source / "v1-5.ckpt", original_config=str(config))
    got, said_here = loaded(load, mount / "v1-5.safetensors", original_config=str(config))
    assert said_here <= said
    check_same_state(got, original)
    check_same_state(got, made.unet)


def lora_of(made, folder):
    """Writes the same LoRA weights as a pickle and, with metadata, as safetensors."""
    torch.manual_seed(5)
    unet = UNet2DConditionModel.from_config(made.unet.config)
    config = LoraConfig(
        r=4, lora_alpha=6, target_modules=["to_q", "to_k"], init_lora_weights="gaussian"
    )
    unet.add_adapter(config)
    for name, parameter in unet.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter)
    weights = get_peft_model_state_dict(unet)
    save = StableDiffusionPipeline.save_lora_weights
    save(folder / "pickle", weights, safe_serialization=False)
    save(folder / "safe", weights, unet_lora_adapter_metadata=config.to_dict())


def with_lora(made, folder, **options):
    pipeline = StableDiffusionPipeline(**made.components, requires_safety_checker=False)
    pipeline.unet = UNet2DConditionModel.from_config(made.unet.config)
    pipeline.unet.load_state_dict(made.unet.state_dict())
    _, said = loaded(pipeline.load_lora_weights, folder, **options)
    return pipeline, said


def test_lora_weights_load_with_their_metadata(made, mounts, tmp_path):
    source = tmp_path / "loras"
    lora_of(made, source)
    mount = mounts(source)
    safe = "pytorch_lora_weights.safetensors"
    assert [path.name for path in (mount / "pickle").iterdir()] == [safe]
    for kind, name in (("pickle", "pytorch_lora_weights.bin"), ("safe", safe)):
        original, said = with_lora(made, source / kind, weight_name=name)
        for asked in ({}, {"weight_name": safe}):
            got, said_here = with_lora(made, mount / kind, **asked)
            assert said_here <= said
            check_same_pipeline(got, original)
        assert any("lora_B" in name for name, _ in got.unet.named_parameters())
        assert (image_of(got) != image_of(made)).any(), "weights that do nothing"
        config = got.unet.peft_config["default_0"]
        assert config.lora_alpha == original.unet.peft_config["default_0"].lora_alpha
        assert config.lora_alpha == (6 if kind == "safe" else 4)
    with safe_open(mount / "safe" / safe, framework="pt") as file:
        assert "lora_adapter_metadata" in file.metadata()
    assert (mount / "safe" / safe).read_bytes() == (source / "safe" / safe).read_bytes()
