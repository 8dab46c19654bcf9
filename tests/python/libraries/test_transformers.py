"""transformers loads from a mount what it loads from the original, in every layout and by every call. It gets the same
parameters and buffers, the same ties, and no warning of its own."""

import codecs
import json
import shutil
from types import SimpleNamespace

import ckptfs.torch
import pytest
import torch
import transformers
from accelerate.utils.modeling import get_state_dict_offloaded_model
from safetensors.torch import load_file
from transformers import AutoModel, AutoModelForCausalLM, AutoTokenizer, pipeline

import models
from models import check_fingerprints, check_loads_same, check_same, fingerprints, on_show, tensors_of
from program import REFUSED

MAKERS = {
    "llama": models.llama,
    "gpt2": models.gpt2,
    "resnet": models.resnet,
}
LAYOUTS = {
    "shards": models.save_shards,
    "bin": models.save_bin,
    "bin-shards": models.save_bin_shards,
}


@pytest.fixture(scope="module")
def shelf(tmp_path_factory):
    """Every model in every layout, each with its halves as the variant fp16 beside it, and mounted."""
    folder = tmp_path_factory.mktemp("transformers")
    source = folder / "source"
    made = {name: make() for name, make in MAKERS.items()}
    for name, model in made.items():
        half = models.halved(model)
        for layout, save in LAYOUTS.items():
            save(model, source / f"{name}-{layout}")
            save(half, source / f"{name}-{layout}-half-only", "fp16")
            # Not saved there: the library removes the shards of one variant when it saves another.
            for file in (source / f"{name}-{layout}-half-only").glob("*fp16*"):
                shutil.copy(file, source / f"{name}-{layout}")
            if layout != "bin":
                save(half, source / f"{name}-{layout}-respelled", "fp16")
                models.respell(source / f"{name}-{layout}-respelled", "fp16")
    for layout, save in LAYOUTS.items():
        save(made["llama"], source / f"parts-{layout}" / "language")
        models.tokenizer().save_pretrained(source / f"llama-{layout}")
    with on_show(folder) as mount:
        yield SimpleNamespace(source=source, mount=mount.point, made=made)


def load(name, **more):
    kind = getattr(transformers, {
        "llama": "LlamaForCausalLM",
        "gpt2": "GPT2LMHeadModel",
        "resnet": "ResNetForImageClassification",
    }[name])  # fmt: skip
    return lambda folder: kind.from_pretrained(folder, output_loading_info=True, **more)


@pytest.fixture(params=LAYOUTS)
def layout(request):
    return request.param


@pytest.fixture(params=MAKERS)
def name(request):
    return request.param


CALLS = {
    "plain": {},
    "dtype-auto": {"dtype": "auto"},
    "dtype-given": {"dtype": torch.bfloat16},
    "device-map-auto": {"device_map": "auto"},
    "without-mmap": {"disable_mmap": True},
}


@pytest.mark.parametrize("call", CALLS)
def test_every_layout_loads_by_every_call(shelf, name, layout, call):
    where = f"{name}-{layout}"
    weights = {file.name for file in (shelf.mount / where).glob("*model*") if file.suffix != ".json"}
    assert weights == {"model.safetensors", "model.fp16.safetensors"}
    first, _ = check_loads_same(load(name, **CALLS[call]), shelf.source / where, shelf.mount / where)
    if call == "plain":
        check_same(first, shelf.made[name])


@pytest.mark.parametrize("call", CALLS)
def test_a_variant_loads_by_every_call(shelf, name, layout, call):
    for where in (f"{name}-{layout}", f"{name}-{layout}-half-only"):
        load_half = load(name, variant="fp16", **CALLS[call])
        check_loads_same(load_half, shelf.source / where, shelf.mount / where)


def test_a_variant_is_not_shown_without_it(shelf, name, layout):
    for folder in (shelf.source, shelf.mount):
        with pytest.raises(OSError, match="no file named model.safetensors"):
            load(name)(folder / f"{name}-{layout}-half-only")


@pytest.mark.parametrize("layout", ["shards", "bin-shards"])
def test_a_variant_in_the_other_spelling_loads(shelf, name, layout):
    """transformers itself does not look for these; through the mount it need not."""
    load_half = load(name, variant="fp16")
    with pytest.raises(OSError, match="no file named model.fp16.safetensors"):
        load_half(shelf.source / f"{name}-{layout}-respelled")
    check_loads_same(
        load_half,
        shelf.source / f"{name}-{layout}-half-only",
        shelf.mount / f"{name}-{layout}-respelled",
    )


def test_a_model_loads_from_a_subfolder(shelf, layout):
    where = f"parts-{layout}"
    check_loads_same(load("llama", subfolder="language"), shelf.source / where, shelf.mount / where)


def test_a_caller_that_insists_on_safetensors_gets_them(shelf, name, layout):
    wanted, where = load(name, use_safetensors=True), f"{name}-{layout}"
    original, _ = load(name)(shelf.source / where)
    got, info = wanted(shelf.mount / where)
    assert not any(info.values())
    check_same(got, original)


def test_a_caller_that_insists_on_pickles_needs_them_kept(shelf, mounts):
    """A caller that insists on pickles needs them kept."""
    insisting = load("gpt2", use_safetensors=False)
    with pytest.raises(OSError, match="no file named"):
        insisting(shelf.mount / "gpt2-bin")
    kept = mounts(shelf.source, "--keep", "*.bin")
    check_loads_same(insisting, shelf.source / "gpt2-bin", kept / "gpt2-bin")
    kept.unmount()


@pytest.mark.parametrize("kinds", [["st", "bin", "fp16"], ["shards", "bin"], ["bin", "fp16"], ["shards", "fp16"]])
def test_of_several_layouts_in_a_directory_the_library_and_ckptfs_take_the_same(mounts, tmp_path, kinds):
    """The library takes one of them, and ckptfs takes the same, on disk and through a mount."""
    source, half = tmp_path / "source", models.halved(models.llama())
    for kind in kinds:
        # Each has other values, which show the one that was taken.
        made = models.llama()
        with torch.no_grad():
            made.lm_head.weight += len(kind)
        part = tmp_path / kind
        if kind == "fp16":
            half.save_pretrained(part, variant="fp16")
        elif kind == "st":
            made.save_pretrained(part)
        else:
            LAYOUTS[kind](made, part)
        shutil.copytree(part, source, dirs_exist_ok=True)
    taken, _ = load("llama", dtype=torch.float32)(source)
    for folder in (source, mounts(source).point):
        loaded = ckptfs.torch.load_file(folder)
        check_fingerprints(fingerprints(loaded), fingerprints(taken.state_dict()))
        (note,) = [note for note in ckptfs.last_report().notes if "was chosen in this directory" in note]
        assert "left out" in note


def test_an_index_that_the_config_names_must_be_kept(mounts, tmp_path):
    """A caller that names an index needs it kept."""
    source = tmp_path / "source"
    models.save_shards(models.llama(), source)
    config = json.loads((source / "config.json").read_text())
    config["transformers_weights"] = "model.safetensors.index.json"
    (source / "config.json").write_text(json.dumps(config))
    with pytest.raises(ValueError, match="Can't find a checkpoint index"):
        load("llama")(mounts(source).point)
    check_loads_same(load("llama"), source, mounts(source, "--keep", "*.index.json").point)


@pytest.mark.parametrize("number", ["NaN", "-Infinity", "Infinity"])
def test_an_index_with_numbers_that_only_python_has_is_read(mounts, tmp_path, number):
    source = tmp_path / "source"
    models.save_shards(models.llama(), source)
    (index,) = source.glob("*.index.json")
    index.write_text(index.read_text().replace('"metadata": {', f'"metadata": {{"loss": {number},', 1))
    assert number in index.read_text()
    point = mounts(source).point
    assert {file.name for file in point.glob("*.safetensors")} == {"model.safetensors"}
    check_loads_same(load("llama"), source, point)


def test_an_index_with_a_byte_order_mark_is_refused(ckptfs, tmp_path):
    """No loader reads such an index."""
    models.save_shards(models.llama(), tmp_path)
    (index,) = tmp_path.glob("*.index.json")
    index.write_bytes(codecs.BOM_UTF8 + index.read_bytes())
    with pytest.raises(json.JSONDecodeError):
        load("llama")(tmp_path)
    refused = ckptfs("inspect", tmp_path)
    assert refused.code == REFUSED and "byte order mark" in refused.stderr


def test_without_a_type_in_the_config_the_first_tensor_decides(mounts, tmp_path):
    """The library goes by the first tensor: of a pickle the first saved one, of safetensors the first by name. A
    caller that gives the type gets the same from both."""
    source = tmp_path / "source"
    made = models.llama()
    made.model.half()
    models.save_bin(made, source)
    assert "dtype" not in json.loads((source / "config.json").read_text())
    point = mounts(source).point
    types = [load("llama")(folder)[0].dtype for folder in (source, point)]
    assert types == [torch.float16, torch.float32]
    for dtype in types:
        check_loads_same(load("llama", dtype=dtype), source, point)


def test_auto_classes_load_the_same(shelf, layout):
    for kind in (AutoModel, AutoModelForCausalLM):
        for name in ("llama", "gpt2"):
            where = f"{name}-{layout}"
            check_loads_same(kind.from_pretrained, shelf.source / where, shelf.mount / where)


def test_layers_that_stay_on_disk_are_read_from_the_mount(shelf, layout, tmp_path):
    """Layers that stay on the disk are read from the mount at each use."""
    where, prompt = f"llama-{layout}", torch.tensor([[1, 7, 8, 9]])
    found = []
    for n, folder in enumerate((shelf.source, shelf.mount)):
        model = AutoModelForCausalLM.from_pretrained(
            folder / where, device_map="auto", max_memory={"cpu": 60_000}, offload_folder=tmp_path / str(n)
        )  # fmt: skip
        assert "disk" in model.hf_device_map.values()
        tokens = model.generate(prompt, max_new_tokens=8, do_sample=False)
        state = get_state_dict_offloaded_model(model)
        found.append((fingerprints(state), tokens.tolist()))
    assert found[0] == found[1]
    assert found[0][0] == fingerprints(shelf.made["llama"].state_dict())
    # The library writes nothing of its own where safetensors has what it needs.
    assert not list((tmp_path / "1").iterdir())


def test_shards_of_one_storage_show_each_tensor_once(mounts, tmp_path):
    """Tied tensors in different shards, and in each shard the storage of all."""
    source = tmp_path / "source"
    made = models.in_one_storage(models.gpt2())
    models.save_bin_shards(made, source, cloned=False)
    shards = list(source.glob("pytorch_model-*.bin"))
    weights = sum(parameter.nbytes for parameter in made.parameters())
    assert len(shards) > 1 and all(shard.stat().st_size > weights for shard in shards)
    index = json.loads((source / "pytorch_model.bin.index.json").read_text())["weight_map"]
    assert index["lm_head.weight"] != index["transformer.wte.weight"]
    point = mounts(source).point
    # The virtual file has each tensor once, however often its storage is in the shards.
    tensors = load_file(point / "model.safetensors")
    check_fingerprints(fingerprints(tensors), fingerprints(made.state_dict()))
    first, _ = check_loads_same(load("gpt2"), source, point)
    check_same(first, made)


def test_missing_and_unexpected_keys_are_reported_the_same(mounts, tmp_path, layout):
    source = tmp_path / "source"
    made = models.llama()
    made.model.norm = torch.nn.Identity()
    made.surplus = torch.nn.Linear(2, 3, bias=False)
    LAYOUTS[layout](made, source)
    point = mounts(source).point
    check_loads_same(load("llama"), source, point)
    for folder in (source, point):
        _, info = load("llama")(folder)
        assert set(info["missing_keys"]) == {"model.norm.weight"}
        assert set(info["unexpected_keys"]) == {"surplus.weight"}


def test_a_loaded_model_generates_the_same_tokens(shelf, layout):
    prompt = torch.tensor([[1, 7, 8, 9]])
    for name in ("llama", "gpt2"):
        where = f"{name}-{layout}"
        models_loaded = check_loads_same(load(name), shelf.source / where, shelf.mount / where)
        tokens = [m.generate(prompt, max_new_tokens=12, do_sample=False).tolist() for m in models_loaded]
        assert tokens[0] == tokens[1] and len(tokens[0][0]) > 4


def test_a_pipeline_generates_the_same_text(shelf, layout):
    where, said = f"llama-{layout}", []
    for folder in (shelf.source, shelf.mount):
        generate = pipeline("text-generation", model=str(folder / where))
        check_same(generate.model, shelf.made["llama"])
        said.append(generate("w1 w2 w3", max_new_tokens=6, do_sample=False))
    assert said[0] == said[1]
    assert AutoTokenizer.from_pretrained(shelf.mount / where)("w1 w2").input_ids == [5, 6]


def test_loading_one_tensor_after_the_other_gives_the_same(shelf, layout, monkeypatch):
    """One thread instead of the several that other tests use."""
    monkeypatch.setenv("HF_DEACTIVATE_ASYNC_LOAD", "1")
    where = f"llama-{layout}"
    check_loads_same(load("llama"), shelf.source / where, shelf.mount / where)


def test_a_model_from_a_mount_can_be_saved_again(shelf, layout, tmp_path):
    """A model that is loaded from a mount can be saved and is then what it was."""
    model = AutoModelForCausalLM.from_pretrained(shelf.mount / f"gpt2-{layout}")
    model.save_pretrained(tmp_path)
    again = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert fingerprints(tensors_of(again)) == fingerprints(tensors_of(shelf.made["gpt2"]))
