"""accelerate loads checkpoints from a mount by folder and by file, whole and with layers left on the disk, as from
the original."""

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


def save_shards_as(stem):
    """Shards of another name, which identify a folder only through their index."""

    def save(model, folder):
        models.save_shards(model, folder)
        (index,) = folder.glob("*.index.json")
        text = index.read_text().replace('"model-', f'"{stem}-')
        (folder / f"{stem}.safetensors.index.json").write_text(text)
        index.unlink()
        for shard in list(folder.glob("model-*")):
            shard.rename(folder / f"{stem}{shard.name.removeprefix('model')}")

    return save


def save_shards_alone(model, folder):
    """And without a configuration."""
    save_shards_as("flux1-dev")(model, folder)
    for name in ("config.json", "generation_config.json"):
        (folder / name).unlink()


STEMS = {"diffusers": save_shards_as("diffusion_pytorch_model"), "alone": save_shards_alone}


@pytest.fixture(scope="module")
def shelf(tmp_path_factory):
    folder = tmp_path_factory.mktemp("accelerate")
    source = folder / "source"
    made = {name: make() for name, make in MAKERS.items()}
    for layout, save in (LAYOUTS | STEMS).items():
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
def test_an_empty_model_is_filled_from_folder_or_file(shelf, name, layout, what, dtype):
    def load(folder):
        model = empty(folder)
        load_checkpoint_in_model(model, what(folder), device_map={"": "cpu"}, dtype=dtype)
        return model

    where = f"{name}-{layout}"
    first, _ = check_loads_same(load, shelf.source / where, shelf.mount / where)
    if dtype is None:
        check_same(first, shelf.made[name])


def test_an_existing_model_is_overwritten_with_the_checkpoint(shelf, name, layout):
    def load(folder):
        torch.manual_seed(1)
        model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder))
        load_checkpoint_in_model(model, str(folder))
        return model

    where = f"{name}-{layout}"
    check_loads_same(load, shelf.source / where, shelf.mount / where)


@pytest.mark.parametrize("what", [str, of_a_file], ids=["folder", "file"])
def test_dispatched_layers_on_disk_generate_the_same(shelf, layout, what, tmp_path):
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


@pytest.mark.parametrize("stem", STEMS)
def test_shards_of_another_name_load_by_their_index(shelf, name, stem):
    """A folder of them is loaded by its one index, which names the virtual file."""
    where = f"{name}-{stem}"

    def load(folder):
        model = empty(shelf.source / f"{name}-shards")
        load_checkpoint_in_model(model, str(folder), device_map={"": "cpu"})
        return model

    def dispatch(folder):
        model = empty(shelf.source / f"{name}-shards")
        return load_checkpoint_and_dispatch(model, str(folder), device_map={"": "cpu"})

    for way in (load, dispatch):
        first, _ = check_loads_same(way, shelf.source / where, shelf.mount / where)
        check_same(first, shelf.made[name])
    assert len(list((shelf.mount / where).glob("*.safetensors"))) == 1


def test_a_folder_whose_index_is_not_shown_loads_by_file(mounts, tmp_path):
    """Shards of pickles not called `pytorch_model`, and a variant alone, load by file."""
    source, made = tmp_path / "source", models.gpt2()
    models.save_bin_shards(made, source / "pickles")
    for path in list((source / "pickles").glob("pytorch_model*")):
        if path.suffix == ".json":
            path.write_text(path.read_text().replace("pytorch_model", "diffusion_pytorch_model"))
        path.rename(path.with_name(f"diffusion_{path.name}"))
    models.save_shards(made, source / "variant", "fp16")
    models.respell(source / "variant", "fp16")
    point = mounts(source).point
    virtual_files = {"pickles": "diffusion_pytorch_model.safetensors", "variant": "model.fp16.safetensors"}
    for name, virtual_file in virtual_files.items():
        with pytest.raises(ValueError, match="is not a folder containing"):
            load_checkpoint_in_model(empty(source / name), str(point / name))

        def load(file):
            model = empty(source / name)
            load_checkpoint_in_model(model, str(file), device_map={"": "cpu"})
            return model

        check_loads_same(load, source / name, point / name / virtual_file)


def test_a_file_that_is_not_shown_is_refused(shelf):
    """A caller that names the index or the pickle itself must name the virtual file."""
    for gone in ("llama-shards/model.safetensors.index.json", "llama-bin/pytorch_model.bin"):
        assert (shelf.source / gone).exists()
        with pytest.raises(ValueError, match="should be the path to a file"):
            load_checkpoint_in_model(empty(shelf.source / "llama-bin"), str(shelf.mount / gone))
