"""diffusers loads pipelines through a mount as it loads the originals. It gets the same parts and weights, the same
picture from the same seed, and no other warning.

What the mount shows needs no argument: where pickles need `use_safetensors=False`, their virtual files do not.
"""

import os
import shutil
import subprocess
import sys
from dataclasses import dataclass, field

os.environ["HF_HUB_OFFLINE"] = "1"

import pytest
import torch
from diffusers import FluxPipeline, StableDiffusionPipeline, UNet2DConditionModel

from layouts import as_older_releases_did
from pipelines import (
    check_same_pipeline, check_same_state, flux, image_of, loaded, stable_diffusion,
)  # fmt: skip
from program import COMMON

# Small enough that every part is in several files.
SHARD = {"max_shard_size": "700KB"}
SHARD_BYTES = 20_000


@dataclass
class Layout:
    """How a pipeline is saved, and how the original must be loaded."""

    saved: dict = field(default_factory=dict)
    asked: dict = field(default_factory=dict)
    # The name of the UNet in the mount, which replaces all files that it hides.
    unet: str = "diffusion_pytorch_model.safetensors"
    pickles: int | None = 0


PICKLES = {"safe_serialization": False}
FP16 = {"variant": "fp16"}
UNET_FP16 = "diffusion_pytorch_model.fp16.safetensors"
LAYOUTS = {
    "pickles": Layout(PICKLES, {"use_safetensors": False}, pickles=None),
    "shards": Layout(SHARD),
    "sharded pickles": Layout(SHARD | PICKLES, {"use_safetensors": False}, pickles=SHARD_BYTES),
    "fp16 pickles": Layout(
        FP16 | PICKLES, FP16 | {"use_safetensors": False}, UNET_FP16, pickles=None
    ),
    "fp16 shards": Layout(SHARD | FP16, FP16, UNET_FP16),
    "fp16 sharded pickles": Layout(
        SHARD | FP16 | PICKLES, FP16 | {"use_safetensors": False}, UNET_FP16, SHARD_BYTES
    ),
}


@pytest.fixture(scope="session")
def made(tmp_path_factory):
    return stable_diffusion(tmp_path_factory.mktemp("made") / "tokenizer")


@pytest.fixture(scope="session")
def sources(made, tmp_path_factory):
    """The same pipeline in every layout, by name."""
    folder = tmp_path_factory.mktemp("pipelines")
    for name, layout in LAYOUTS.items():
        pipeline = made
        if "variant" in layout.saved:
            pipeline = StableDiffusionPipeline.from_pretrained(folder / "shards").to(torch.float16)
        pipeline.save_pretrained(folder / name, **layout.saved)
        if layout.pickles != 0:
            as_older_releases_did(folder / name, layout.pickles)
            assert not list((folder / name).rglob("*.safetensors"))
    return folder


def indexes_of(folder):
    """Safetensors indexes, which stay where the virtual file is not called `model.safetensors`."""
    return {path.name for path in folder.glob("*.safetensors.index*.json")}


def checked_info(folder, **options):
    _, info = UNet2DConditionModel.from_pretrained(
        folder / "unet", output_loading_info=True, **options
    )
    return info


@pytest.mark.parametrize("name", LAYOUTS)
def test_a_pipeline_of_every_layout_loads_the_same(sources, mounts, name):
    layout = LAYOUTS[name]
    mount = mounts(sources)
    shown = {path.name for path in (mount / name / "unet").iterdir()}
    assert shown == {"config.json", layout.unet, *indexes_of(sources / name / "unet")}
    variant = {"variant": "fp16"} if "variant" in layout.asked else {}
    # Halved weights are loaded as they are stored, so that nothing is cast.
    dtype = {"dtype": torch.float16} if variant else {}
    load = StableDiffusionPipeline.from_pretrained
    original, said = loaded(load, sources / name, **layout.asked, **dtype)
    for options in ({}, {"disable_mmap": True}):
        got, said_here = loaded(load, mount / name, **variant, **dtype, **options)
        assert said_here <= said
        check_same_pipeline(got, original)
    assert checked_info(mount / name, **variant) == checked_info(sources / name, **layout.asked)


@pytest.mark.parametrize("name", ["pickles", "shards", "sharded pickles"])
def test_missing_unexpected_and_misshapen_keys_are_reported_the_same(made, mounts, tmp_path, name):
    layout = LAYOUTS[name]
    unet = UNet2DConditionModel.from_config(made.unet.config)
    unet.conv_norm_out = torch.nn.Identity()
    unet.surplus = torch.nn.Linear(2, 3, bias=False)
    unet.conv_out = torch.nn.Conv2d(32, 5, 3)
    unet.save_pretrained(tmp_path / "source/unet", **layout.saved)
    mount = mounts(tmp_path / "source")
    forgiving = {"ignore_mismatched_sizes": True, "low_cpu_mem_usage": False}
    info = checked_info(mount.point, **forgiving)
    original = checked_info(tmp_path / "source", **layout.asked, **forgiving)
    # The order is that of the files, of which the original has several.
    assert {what: set(found) for what, found in info.items()} == {
        what: set(found) for what, found in original.items()
    }
    assert set(info["missing_keys"]) == {"conv_norm_out.weight", "conv_norm_out.bias"}
    assert set(info["unexpected_keys"]) == {"surplus.weight"}
    assert {key for key, *_ in info["mismatched_keys"]} == {"conv_out.weight", "conv_out.bias"}


def test_a_pickled_pipeline_is_the_one_that_was_saved(made, sources, mounts):
    mount = mounts(sources, "--no-passthrough")
    check_same_pipeline(StableDiffusionPipeline.from_pretrained(mount / "sharded pickles"), made)


def test_a_model_and_its_variant_load_from_one_folder(sources, mounts, tmp_path):
    """Each asks for its own variant and gets it, also where both are sharded."""
    both = tmp_path / "both"
    shutil.copytree(sources / "shards", both)
    weights_only = shutil.ignore_patterns("*config.json")
    shutil.copytree(sources / "fp16 shards", both, dirs_exist_ok=True, ignore=weights_only)
    mount = mounts(both)
    for asked in ({}, {"variant": "fp16", "dtype": torch.float16}):
        original, said = loaded(StableDiffusionPipeline.from_pretrained, both, **asked)
        got, said_here = loaded(StableDiffusionPipeline.from_pretrained, mount.point, **asked)
        assert said_here <= said
        check_same_pipeline(got, original)


def test_a_sharded_flux_pipeline_loads_and_draws_the_same(mounts, tmp_path):
    made = flux(tmp_path / "tokenizer")
    made.save_pretrained(tmp_path / "flux", max_shard_size="100KB")
    assert len(list((tmp_path / "flux/transformer").glob("*-of-*.safetensors"))) > 2
    mount = mounts(tmp_path / "flux")
    shown = {path.name for path in (mount / "transformer").iterdir()}
    stem = "diffusion_pytorch_model.safetensors"
    assert shown == {"config.json", stem, f"{stem}.index.json"}
    original, said = loaded(FluxPipeline.from_pretrained, tmp_path / "flux")
    got, said_here = loaded(FluxPipeline.from_pretrained, mount.point)
    assert said_here <= said
    check_same_pipeline(got, original)
    assert (image_of(got) == image_of(made)).all()
    check_same_state(got.transformer, made.transformer)


@pytest.mark.parametrize("name", ["shards", "sharded pickles"])
def test_parallel_loading_loads_the_same(sources, mounts, name):
    mount = mounts(sources)
    script = COMMON / "parallel_pipeline_load.py"
    options = ["--pickles"] if "use_safetensors" in LAYOUTS[name].asked else []
    done = subprocess.run(
        [sys.executable, script, mount / name, sources / name, *options],
        env=os.environ | {"HF_ENABLE_PARALLEL_LOADING": "1", "HF_HUB_OFFLINE": "1"},
        capture_output=True, text=True, timeout=300,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
