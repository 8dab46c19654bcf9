"""Tiny image pipelines, complete in every part, and comparisons of two of them.

A pipeline has seeded random weights and is saved by its own library. `sd_checkpoint` gives the same weights as the
single files of Stable Diffusion 1.x.
"""

import json
import logging
import warnings

import torch
from diffusers import (
    AutoencoderKL, DDIMScheduler, FlowMatchEulerDiscreteScheduler, FluxPipeline,
    FluxTransformer2DModel, StableDiffusionPipeline, UNet2DConditionModel,
)  # fmt: skip
from transformers import (
    CLIPTextConfig, CLIPTextModel, CLIPTokenizer, PreTrainedTokenizerFast, T5Config, T5EncoderModel,
)  # fmt: skip
from tokenizers import Tokenizer, models, pre_tokenizers

from compare import bits

PROMPT = "a red cat"


def clip_tokenizer(folder):
    """A tokenizer that knows the letters, and nothing else."""
    folder.mkdir(parents=True)
    letters = "abcdefghijklmnopqrstuvwxyz"
    words = [*letters, *(f"{letter}</w>" for letter in letters), "<|startoftext|>", "<|endoftext|>"]
    (folder / "vocab.json").write_text(json.dumps({word: n for n, word in enumerate(words)}))
    (folder / "merges.txt").write_text("#version: 0.2\n")
    settings = {"model_max_length": 16, "tokenizer_class": "CLIPTokenizer"}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    return CLIPTokenizer.from_pretrained(folder)


def clip(words):
    config = CLIPTextConfig(
        vocab_size=words, hidden_size=32, intermediate_size=37, num_hidden_layers=2,
        num_attention_heads=4, max_position_embeddings=16, projection_dim=32,
        bos_token_id=words - 2, eos_token_id=words - 1, pad_token_id=words - 1,
    )  # fmt: skip
    return CLIPTextModel(config)


def vae(channels):
    return AutoencoderKL(
        block_out_channels=(32, 64), down_block_types=["DownEncoderBlock2D"] * 2,
        up_block_types=["UpDecoderBlock2D"] * 2, latent_channels=channels,
        sample_size=32, shift_factor=0.1,
    )  # fmt: skip


def stable_diffusion(folder):
    """A pipeline with a UNet, like Stable Diffusion 1.x."""
    torch.manual_seed(1)
    tokenizer = clip_tokenizer(folder)
    unet = UNet2DConditionModel(
        block_out_channels=(32, 64), layers_per_block=1, sample_size=16, norm_num_groups=8,
        down_block_types=("CrossAttnDownBlock2D", "DownBlock2D"),
        up_block_types=("UpBlock2D", "CrossAttnUpBlock2D"),
        cross_attention_dim=32, attention_head_dim=4,
    )  # fmt: skip
    return StableDiffusionPipeline(
        unet=unet, vae=vae(4), text_encoder=clip(len(tokenizer)), tokenizer=tokenizer,
        scheduler=DDIMScheduler(clip_sample=False, steps_offset=1),
        safety_checker=None, feature_extractor=None, requires_safety_checker=False,
    )  # fmt: skip


def flux(folder):
    """A pipeline with a transformer and two text encoders, like Flux."""
    torch.manual_seed(2)
    tokenizer = clip_tokenizer(folder)
    words = {"<pad>": 0, "</s>": 1, "<unk>": 2, "a": 3, "red": 4, "cat": 5}
    second = Tokenizer(models.WordLevel(words, unk_token="<unk>"))
    second.pre_tokenizer = pre_tokenizers.Whitespace()
    second = PreTrainedTokenizerFast(
        tokenizer_object=second, pad_token="<pad>", eos_token="</s>", unk_token="<unk>"
    )
    transformer = FluxTransformer2DModel(
        patch_size=1, in_channels=4, num_layers=2, num_single_layers=2, attention_head_dim=16,
        num_attention_heads=2, joint_attention_dim=32, pooled_projection_dim=32,
        axes_dims_rope=(4, 4, 8),
    )  # fmt: skip
    t5 = T5Config(
        vocab_size=len(words), d_model=32, d_kv=8, d_ff=37, num_layers=2, num_heads=4
    )
    return FluxPipeline(
        transformer=transformer, vae=vae(1), scheduler=FlowMatchEulerDiscreteScheduler(),
        text_encoder=clip(len(tokenizer)), tokenizer=tokenizer,
        text_encoder_2=T5EncoderModel(t5), tokenizer_2=second,
    )  # fmt: skip


def image_of(pipeline, side=32):
    """The picture that it paints from a seed. Its weights are first copied to memory of their own. Rounding depends on
    the place of a tensor in a page, which differs between a shard and its virtual file."""
    for model in modules_of(pipeline).values():
        model.eval()
        for parameter in model.parameters():
            parameter.data = parameter.data.clone()
    pipeline.set_progress_bar_config(disable=True)
    options = {"max_sequence_length": 8} if isinstance(pipeline, FluxPipeline) else {}
    return pipeline(
        PROMPT, height=side, width=side, num_inference_steps=2, output_type="np",
        generator=torch.Generator().manual_seed(3), **options,
    ).images  # fmt: skip


def state_of(model):
    """Every parameter and buffer, unsaved ones included."""
    return dict(model.named_parameters()) | dict(model.named_buffers())


def modules_of(pipeline):
    parts = pipeline.components.items()
    return {name: part for name, part in parts if isinstance(part, torch.nn.Module)}


def check_same_state(got, expected):
    got, expected = state_of(got), state_of(expected)
    assert got.keys() == expected.keys()
    for name, tensor in expected.items():
        assert got[name].dtype == tensor.dtype and got[name].shape == tensor.shape, name
        assert torch.equal(bits(got[name].contiguous()), bits(tensor.contiguous())), name


def check_same_pipeline(got, expected):
    """Asserts the same parts, the same weights in each, and the same picture."""
    assert type(got) is type(expected)
    assert got.components.keys() == expected.components.keys()
    parts, originals = modules_of(got), modules_of(expected)
    assert parts.keys() == originals.keys() and parts
    for name, part in parts.items():
        check_same_state(part, originals[name])
    assert (image_of(got) == image_of(expected)).all()


class Told(logging.Handler):
    """The libraries' messages during a load, from warnings on."""

    NAMES = ("diffusers", "transformers", "accelerate", "peft", "py.warnings")

    def __enter__(self):
        super().__init__(logging.WARNING)
        self.said = []
        self.warnings = warnings.catch_warnings()
        self.warnings.__enter__()
        warnings.simplefilter("always")
        # diffusers leaves files open for the garbage collector.
        warnings.simplefilter("ignore", ResourceWarning)
        logging.captureWarnings(True)
        for name in self.NAMES:
            logging.getLogger(name).addHandler(self)
        return self

    def emit(self, record):
        self.said.append(f"{record.name}: {record.getMessage()}")

    def __exit__(self, *_):
        logging.captureWarnings(False)
        self.warnings.__exit__(None, None, None)
        for name in self.NAMES:
            logging.getLogger(name).removeHandler(self)


def loaded(load, path, **options):
    """The result of a load, and its messages without the file's path."""
    with Told() as told:
        value = load(path, **options)
    return value, {text.replace(str(path), "PATH") for text in told.said}


RESNET = {
    "norm1": "in_layers.0", "conv1": "in_layers.2", "time_emb_proj": "emb_layers.1",
    "norm2": "out_layers.0", "conv2": "out_layers.3", "conv_shortcut": "skip_connection",
}  # fmt: skip
UNET_ENDS = {
    "conv_in": "input_blocks.0.0", "time_embedding.linear_1": "time_embed.0",
    "time_embedding.linear_2": "time_embed.2", "conv_norm_out": "out.0", "conv_out": "out.2",
}  # fmt: skip
VAE_NAMES = {
    "conv_shortcut": "nin_shortcut", "mid_block.resnets.0": "mid.block_1",
    "mid_block.resnets.1": "mid.block_2", "mid_block.attentions.0": "mid.attn_1",
    "conv_norm_out": "norm_out", "downsamplers.0": "downsample", "upsamplers.0": "upsample",
    "group_norm": "norm", "to_q": "q", "to_k": "k", "to_v": "v", "to_out.0": "proj_out",
}  # fmt: skip


def _unet_name(name, layers):
    for ours, theirs in UNET_ENDS.items():
        if name.startswith(f"{ours}."):
            return theirs + name.removeprefix(ours)
    side, *rest = name.split(".")
    if side == "mid_block":
        kind, number, *rest = rest
        place = "middle_block.1" if kind == "attentions" else f"middle_block.{2 * int(number)}"
    else:
        block, kind, number, *rest = rest
        block, number = int(block), int(number)
        if kind == "downsamplers":
            return f"input_blocks.{(block + 1) * (layers + 1)}.0.op.{rest[-1]}"
        if kind == "upsamplers":
            # After the resnet of the last layer; the block that has attention has no upsampler.
            return f"output_blocks.{(block + 1) * (layers + 1) - 1}.1.conv.{rest[-1]}"
        first = f"input_blocks.{1 + block * (layers + 1) + number}"
        up = f"output_blocks.{block * (layers + 1) + number}"
        place = f"{first if side == 'down_blocks' else up}.{int(kind == 'attentions')}"
    if kind == "resnets":
        rest[0] = RESNET[rest[0]]
    return ".".join([place, *rest])


def _vae_name(name, blocks):
    half, *rest = name.split(".")
    if rest[0] in ("down_blocks", "up_blocks"):
        block = int(rest[1])
        rest[:2] = ["down", str(block)] if rest[0] == "down_blocks" else ["up", str(blocks - 1 - block)]
        rest[2:3] = {"resnets": ["block"]}.get(rest[2], [rest[2]])
    name = f".{'.'.join([half, *rest])}."
    for ours, theirs in VAE_NAMES.items():
        name = name.replace(f".{ours}.", f".{theirs}.")
    return name.strip(".")


def sd_checkpoint(pipeline):
    """The weights by the names of Stable Diffusion 1.x, as its trainer wrote them to a `.ckpt`."""
    unet, vae = pipeline.unet, pipeline.vae
    named = {}
    for name, tensor in unet.state_dict().items():
        name = _unet_name(name, unet.config.layers_per_block)
        named[f"model.diffusion_model.{name}"] = tensor
    for name, tensor in vae.state_dict().items():
        name = _vae_name(name, len(vae.config.block_out_channels))
        if ".attn_1." in name and name.endswith("weight") and tensor.dim() == 2:
            tensor = tensor[:, :, None, None]
        named[f"first_stage_model.{name}"] = tensor
    for name, tensor in pipeline.text_encoder.state_dict().items():
        name = name if name.startswith("text_model.") else f"text_model.{name}"
        named[f"cond_stage_model.transformer.{name}"] = tensor
    return {"state_dict": named, "global_step": 7, "epoch": 1}
