"""A folder of models for ComfyUI works through a mount.

Each checkpoint is listed once, as one `.safetensors`, shards included. Keys are those of the original, and tensors
that are read long after the load are right. ComfyUI keeps its list of files while the folders' times stay, and renews
it when something new is there.

ComfyUI is no library: the readers here make the calls that its own readers make.
"""

import json
import math
import mmap
import os
import struct

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file

from compare import bits
from mounts import until
from samples import numbers

EXTENSIONS = {".ckpt", ".pt", ".pt2", ".bin", ".pth", ".safetensors", ".pkl", ".sft"}
TYPES = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16, "I64": torch.int64}


def listed(folder):
    """The models beneath a folder, and the times that tell how long the list holds."""
    names, times = [], {str(folder): os.path.getmtime(folder)}
    for place, folders, files in os.walk(folder, followlinks=True):
        for name in files:
            if os.path.splitext(name)[-1].lower() in EXTENSIONS:
                names.append(os.path.relpath(os.path.join(place, name), folder))
        for name in folders:
            times[os.path.join(place, name)] = os.path.getmtime(os.path.join(place, name))
    return sorted(names), times


def still_holds(times):
    return all(os.path.getmtime(folder) == time for folder, time in times.items())


def by_safe_open(path):
    with safe_open(path, framework="pt", device="cpu") as file:
        return {key: file.get_tensor(key) for key in file.keys()}


def by_mapping(path):
    """Maps the file and takes tensors from the mapping; the descriptor is closed at once."""
    with open(path, "rb") as file:
        mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
    (length,) = struct.unpack("<Q", mapped[:8])
    header = json.loads(mapped[8 : 8 + length])
    tensors = {}
    for name, entry in header.items():
        if name == "__metadata__":
            continue
        start = 8 + length + entry["data_offsets"][0]
        dtype, shape = TYPES[entry["dtype"]], entry["shape"]
        flat = torch.frombuffer(mapped, dtype=dtype, count=math.prod(shape), offset=start)
        tensors[name] = flat.view(shape)
    return tensors


def by_slices(path):
    """Gives readers of each tensor, which use an open descriptor later."""
    file = open(path, "rb", buffering=0)
    mapped = by_mapping(path)
    (length,) = struct.unpack("<Q", file.read(8))
    header = json.loads(file.read(length))

    def read(name):
        start, end = header[name]["data_offsets"]
        room = bytearray(end - start)
        file.seek(8 + length + start)
        assert file.readinto(room) == len(room)
        return torch.frombuffer(room, dtype=mapped[name].dtype).view(mapped[name].shape)

    return {name: read(name) for name in mapped}


def checkpoint(seed):
    """Names by which ComfyUI recognises Stable Diffusion."""
    return {
        "model.diffusion_model.input_blocks.0.0.weight": numbers(seed, 320, 4, 3, 3),
        "model.diffusion_model.out.2.bias": numbers(seed + 1, 4).half(),
        "first_stage_model.decoder.conv_in.weight": numbers(seed + 2, 512, 300).bfloat16(),
        "cond_stage_model.transformer.text_model.embeddings.position_ids": torch.arange(77)[None],
    }


@pytest.fixture
def models(tmp_path):
    """The files on the disk, and the contents of each listed name."""
    folder = tmp_path / "models"
    expected = {}
    for n, name in enumerate(("v1-5-pruned.ckpt", "style/anime.ckpt")):
        path = folder / "checkpoints" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        torch.save({"state_dict": checkpoint(10 * n), "global_step": 3}, path)
        expected[f"checkpoints/{name[:-5]}.safetensors"] = checkpoint(10 * n)
    flux = {f"double_blocks.{n}.img_attn.qkv.weight": numbers(n, 500, 400) for n in range(6)}
    (folder / "diffusion_models").mkdir()
    for n in range(3):
        part = {key: flux[key] for key in list(flux)[2 * n : 2 * n + 2]}
        save_file(part, folder / f"diffusion_models/flux1-dev-0000{n + 1}-of-00003.safetensors")
    expected["diffusion_models/flux1-dev.safetensors"] = flux
    (folder / "vae").mkdir()
    save_file({"decoder.conv_in.weight": numbers(70, 9, 9)}, folder / "vae/ae.safetensors")
    expected["vae/ae.safetensors"] = {"decoder.conv_in.weight": numbers(70, 9, 9)}
    (folder / "embeddings").mkdir()
    learned = {"string_to_param": {"*": numbers(80, 2, 768)}, "name": "style"}
    torch.save(learned, folder / "embeddings/style.pt")
    # Of a safetensors file it takes the first tensor, whatever its name.
    expected["embeddings/style.safetensors"] = {"string_to_param.*": numbers(80, 2, 768)}
    return folder, expected


@pytest.mark.parametrize("options", [[], ["--no-passthrough"]], ids=str)
@pytest.mark.parametrize("read", [by_safe_open, by_mapping, by_slices])
def test_every_model_is_listed_once_and_unchanged(models, mounts, options, read):
    folder, expected = models
    mount = mounts(folder, *options)
    names, _ = listed(mount.point)
    assert names == sorted(expected)
    loaded = {name: read(mount / name) for name in names}
    # The first loaded tensor is compared after all are loaded, the last one first.
    for name in reversed(names):
        assert loaded[name].keys() == expected[name].keys(), name
        for key, tensor in reversed(expected[name].items()):
            got = loaded[name][key]
            assert got.dtype == tensor.dtype and got.shape == tensor.shape
            assert torch.equal(bits(got), bits(tensor)), f"{name}: {key}"


def test_keys_are_those_of_the_original(models, mounts):
    folder, _ = models
    mount = mounts(folder)
    original = torch.load(folder / "checkpoints/v1-5-pruned.ckpt", weights_only=True)["state_dict"]
    assert by_safe_open(mount / "checkpoints/v1-5-pruned.safetensors").keys() == original.keys()


STOCK = {
    "model.safetensors": "model.safetensors",
    "pytorch_lora_weights.safetensors": "pytorch_lora_weights.safetensors",
    "diffusion_pytorch_model.bin": "diffusion_pytorch_model.safetensors",
}


@pytest.mark.parametrize("stock", STOCK)
def test_a_stock_name_makes_a_models_folder(tmp_path, mounts, stock):
    """Pickles beside it stay as they are. One of another name, or in another folder, changes nothing."""
    tensors = {"a": numbers(1, 9)}
    write = save_file if stock.endswith(".safetensors") else torch.save
    suffix = stock.rpartition(".")[2]
    for folder, name in (("a", stock), ("b", f"mine.{suffix}"), ("c", f"inner/{stock}")):
        (tmp_path / "loras" / folder / name).parent.mkdir(parents=True)
        write(tensors, tmp_path / "loras" / folder / name)
        for pickle in ("old.pt", "older.ckpt"):
            torch.save(tensors, tmp_path / "loras" / folder / pickle)
    mount = mounts(tmp_path / "loras")
    virtual_files = ["old.safetensors", "older.safetensors"]
    assert listed(mount / "a")[0] == sorted(["old.pt", "older.ckpt", STOCK[stock]])
    assert listed(mount / "b")[0] == sorted([*virtual_files, "mine.safetensors"])
    assert listed(mount / "c")[0] == sorted([*virtual_files, f"inner/{STOCK[stock]}"])


def test_the_list_is_renewed_when_something_is_new(models, mounts):
    folder, expected = models
    mount = mounts(folder)
    # The first look learns what is there: nothing of that may look new later.
    names, times = listed(mount.point)
    for name in names:
        by_mapping(mount / name)
    assert still_holds(times)
    assert listed(mount.point) == (names, times)
    torch.save({"state_dict": checkpoint(50)}, folder / "checkpoints/style/new.ckpt")
    until("the list is out of date", lambda: not still_holds(times))
    new = "checkpoints/style/new.safetensors"
    until("the new model is listed", lambda: new in listed(mount.point)[0])
    names, times = listed(mount.point)
    assert len(names) == len(expected) + 1
    assert still_holds(times)
    (folder / "diffusion_models/flux1-dev-00002-of-00003.safetensors").unlink()
    until("the list is out of date", lambda: not still_holds(times))
    # An incomplete set is no model: its files are shown as they are.
    shards = {f"diffusion_models/flux1-dev-0000{n}-of-00003.safetensors" for n in (1, 3)}
    until("the rest of the set is listed", lambda: shards <= set(listed(mount.point)[0]))
