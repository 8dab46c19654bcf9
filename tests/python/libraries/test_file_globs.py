"""Loaders that take every `.safetensors` of a folder find in the view what one file saved whole would have left
there, in every layout. Where other weights lie beside a sharded model, the index that tells them apart is there, and
true.

vLLM, SGLang and llama.cpp's converter need a GPU or cannot be installed here: the functions below choose files by the
same rules.
"""

import glob
import json
import os
import shutil

os.environ["HF_HUB_OFFLINE"] = "1"

import pytest
import torch
from accelerate import load_checkpoint_in_model
from safetensors.torch import load_file, save_file
from transformers import GPT2Config, GPT2LMHeadModel

from layouts import write_pickles
from pipelines import check_same_state
from samples import numbers

INDEX = "model.safetensors.index.json"


def found(folder, pattern="*.safetensors"):
    return sorted(os.path.basename(path) for path in glob.glob(os.path.join(folder, pattern)))


def in_index(folder, names, index=INDEX):
    """Takes every file, or those that an index names, if there is one."""
    path = os.path.join(folder, index)
    if not os.path.isfile(path):
        return names
    with open(path) as file:
        named = set(json.load(file)["weight_map"].values())
    return [name for name in names if name in named]


def vllm(folder, load_format="auto"):
    """vLLM takes Mistral's own files where there are some, unless a format is given."""
    consolidated = found(folder, "consolidated*.safetensors")
    if load_format == "auto" and consolidated:
        return in_index(folder, consolidated, "consolidated.safetensors.index.json")
    return in_index(folder, found(folder)) or found(folder, "*.bin")


def sglang(folder):
    names = found(folder)
    if not os.path.isfile(os.path.join(folder, INDEX)) and len(names) == 2:
        if names[0] == "consolidated.safetensors" and names[1] == "model.safetensors":
            return names[1:]
    return in_index(folder, names)


def llama_cpp(folder):
    """Its converter lists names; newer releases go by the index where there is one."""
    names = sorted(name for name in os.listdir(folder) if name.startswith("model"))
    names = [name for name in names if name.endswith(".safetensors")]
    path = os.path.join(folder, INDEX)
    if not os.path.isfile(path):
        return names
    with open(path) as file:
        weight_map = json.load(file)["weight_map"]
    held = set().union(*(load_file(os.path.join(folder, name)) for name in set(weight_map.values())))
    assert held == set(weight_map), "it refuses an index that is not true"
    return sorted(set(weight_map.values()))


def mlx(folder):
    return found(folder, "model*.safetensors")


def weights(seed, dtype=torch.float32):
    return {f"layers.{n}.weight": numbers(seed + n, 40, 30).to(dtype) for n in range(6)}


def write_set(folder, tensors, stem, index, count=3):
    """Shards of two tensors each, with an index if it has a name."""
    weight_map, names = {}, list(tensors)
    for n in range(count):
        before, _, variant = stem.partition(".")
        middle = f".{variant}" if variant else ""
        name = f"{before}{middle}-{n + 1:05}-of-{count:05}.safetensors"
        part = {key: tensors[key] for key in names[2 * n : 2 * n + 2]}
        save_file(part, folder / name, metadata={"format": "pt"})
        weight_map |= dict.fromkeys(part, name)
    if index:
        text = json.dumps({"metadata": {"total_size": 1}, "weight_map": weight_map})
        (folder / index).write_text(text)


LIMIT = 12_000
LAYOUTS = {
    "shards": lambda folder: write_set(folder, weights(0), "model", INDEX),
    "shards without an index": lambda folder: write_set(folder, weights(0), "model", None),
    "a pickle": lambda folder: write_pickles(folder, weights(0)),
    "sharded pickles": lambda folder: write_pickles(folder, weights(0), limit=LIMIT),
    "one file": lambda folder: save_file(weights(0), folder / "model.safetensors"),
}
LOADERS = {
    "vllm": vllm, "vllm safetensors": lambda folder: vllm(folder, "safetensors"), "sglang": sglang,
    "llama.cpp": llama_cpp, "mlx": mlx, "run:ai": found,
}  # fmt: skip


def check_all_take(folder, names, expected, loaders=LOADERS):
    for loader, choose in loaders.items():
        assert choose(str(folder)) == names, loader
    held = {}
    for name in names:
        held |= load_file(folder / name)
    assert held.keys() == expected.keys()
    assert all(torch.equal(held[key], tensor) for key, tensor in expected.items())


@pytest.fixture
def folder(tmp_path):
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    return folder


@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_layout_is_one_file(folder, mounts, layout):
    LAYOUTS[layout](folder)
    # Training state beside it is no model.
    torch.save({"state": numbers(1, 9)}, folder / "optimizer.pt")
    torch.save({"state": numbers(1, 9)}, folder / "rng_state_0.pth")
    mount = mounts(folder)
    check_all_take(mount.point, ["model.safetensors"], weights(0))
    assert not (mount / INDEX).exists()


@pytest.mark.parametrize("layout", LAYOUTS)
def test_links_of_a_hub_cache_show_one_file(tmp_path, mounts, layout):
    """Snapshots of links into `blobs`, as huggingface_hub lays them out."""
    repository = tmp_path / "hub/models--org--name"
    plain, snapshot = tmp_path / "plain", repository / "snapshots/0123abc"
    for made in (plain, snapshot, repository / "blobs"):
        made.mkdir(parents=True)
    (plain / "config.json").write_text("{}")
    LAYOUTS[layout](plain)
    for n, path in enumerate(sorted(plain.iterdir())):
        shutil.move(path, repository / "blobs" / f"{n:040x}")
        (snapshot / path.name).symlink_to(f"../../blobs/{n:040x}")
    mount = mounts(tmp_path / "hub")
    shown = mount / "models--org--name/snapshots/0123abc"
    check_all_take(shown, ["model.safetensors"], weights(0))


@pytest.mark.parametrize("layout", ["shards", "a pickle"])
def test_a_variant_alone_keeps_its_name(folder, mounts, layout):
    if layout == "shards":
        write_set(folder, weights(0), "model.fp16", "model.safetensors.index.fp16.json")
    else:
        write_pickles(folder, weights(0), "fp16")
    mount = mounts(folder)
    check_all_take(mount.point, ["model.fp16.safetensors"], weights(0))


# Files that can lie beside a sharded model and are no part of it.
BESIDE = {
    "Mistral's own": "consolidated.safetensors",
    "an adapter": "adapter_model.safetensors",
    "a variant": "model.fp16.safetensors",
}


@pytest.mark.parametrize("beside", BESIDE)
def test_other_weights_beside_shards_change_no_choice(folder, mounts, beside):
    """Each loader takes what it takes of the original folder."""
    write_set(folder, weights(0), "model", INDEX)
    save_file(weights(100), folder / BESIDE[beside])
    chosen = {name: choose(str(folder)) for name, choose in LOADERS.items()}
    mount = mounts(folder)
    by_index = ["vllm safetensors", "sglang", "llama.cpp"]
    for name in by_index:
        assert all(shard.startswith("model-0") for shard in chosen[name]), name
    check_all_take(
        mount.point, ["model.safetensors"], weights(0), {name: LOADERS[name] for name in by_index}
    )
    if "consolidated" in BESIDE[beside]:
        assert vllm(str(mount.point)) == chosen["vllm"] == [BESIDE[beside]]
    assert found(str(mount.point)) == sorted(["model.safetensors", BESIDE[beside]])
    with open(mount / INDEX) as file:
        index = json.load(file)
    assert index["weight_map"] == dict.fromkeys(weights(0), "model.safetensors")
    assert index["metadata"]["total_size"] == sum(t.nbytes for t in weights(0).values())


def test_a_sharded_model_and_its_sharded_variant_are_one_file_each(folder, mounts):
    write_set(folder, weights(0), "model", INDEX)
    half = weights(0, torch.float16)
    write_set(folder, half, "model.fp16", "model.safetensors.index.fp16.json")
    mount = mounts(folder)
    assert found(str(mount.point)) == ["model.fp16.safetensors", "model.safetensors"]
    for name, expected in {"model": weights(0), "model.fp16": half}.items():
        held = load_file(mount / f"{name}.safetensors")
        assert held.keys() == expected.keys()
        for key, tensor in expected.items():
            assert held[key].dtype == tensor.dtype and torch.equal(held[key], tensor), (name, key)
    for loader in (vllm, sglang, llama_cpp):
        assert loader(str(mount.point)) == ["model.safetensors"], loader
    with open(mount / "model.safetensors.index.fp16.json") as file:
        assert set(json.load(file)["weight_map"].values()) == {"model.fp16.safetensors"}


def test_originals_that_are_shown_keep_their_index(folder, mounts):
    write_set(folder, weights(0), "model", INDEX)
    save_file(weights(100), folder / "consolidated.safetensors")
    mount = mounts(folder, "--show-originals")
    assert (mount / INDEX).read_bytes() == (folder / INDEX).read_bytes()
    assert len(vllm(str(mount.point), "hf")) == 3
    kept = mounts(folder, "--keep", "model-*")
    assert (kept / INDEX).read_bytes() == (folder / INDEX).read_bytes()
    assert vllm(str(kept.point), "hf") == vllm(str(folder), "hf")


def test_libraries_that_go_by_names_load_the_same_beside_an_index(folder, mounts):
    """transformers takes the single file before the index, accelerate too; both must be right."""
    torch.manual_seed(0)
    config = GPT2Config(
        n_layer=2, n_embd=32, n_head=2, vocab_size=50, n_positions=16, bos_token_id=1,
        eos_token_id=1,
    )  # fmt: skip
    made = GPT2LMHeadModel(config)
    made.save_pretrained(folder, max_shard_size="40KB")
    assert len(found(str(folder))) > 2
    save_file(weights(100), folder / "consolidated.safetensors")
    mount = mounts(folder)
    assert (mount / INDEX).exists()
    got, told = GPT2LMHeadModel.from_pretrained(mount.point, output_loading_info=True)
    _, told_before = GPT2LMHeadModel.from_pretrained(folder, output_loading_info=True)
    assert told == told_before
    check_same_state(got, made)
    empty = GPT2LMHeadModel(config)
    load_checkpoint_in_model(empty, str(mount.point))
    empty.tie_weights()
    check_same_state(empty, made)
