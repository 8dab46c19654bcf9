"""An export holds every tensor that torch or safetensors wrote, by its name, bit for bit.

Each random checkpoint has a seed, which its test is named after; CKPTFS_CASES is their number. The expected tensors
are those that torch or safetensors reads.
"""

import json
import os
import random

import pytest
import torch
from safetensors.torch import load_file, save_file

from compare import check_export, names_of
from writers import DTYPES, UNCLASSED, Writer, loose_tensors, numbers

CASES = int(os.environ.get("CKPTFS_CASES", "1200"))

# The share of each kind, of ten cases.
ZIP, LEGACY, SINGLE, SHARDED, SHARDED_BIN = 4, 3, 1, 1, 1

# torch.load(weights_only=True) reads no pickle past this protocol.
LAST_SAFE_PROTOCOL = 3

# Names of an index and its shards, with and without a variant.
SPELLINGS = [
    ("{stem}.{ext}.index.json", "{stem}-{n}-of-{of}.{ext}"),
    ("{stem}.{ext}.index.fp16.json", "{stem}-{n}-of-{of}.fp16.{ext}"),
    ("{stem}.fp16.{ext}.index.json", "{stem}.fp16-{n}-of-{of}.{ext}"),
]


def seeds(share):
    return [pytest.param(seed, id=f"seed{seed}") for seed in range(CASES * share // 10)]


def save_and_read(value, path, protocol, legacy):
    """Saves with torch, and gives what torch reads."""
    zipped = not legacy
    torch.save(value, path, pickle_protocol=protocol, _use_new_zipfile_serialization=zipped)
    return torch.load(path, weights_only=protocol <= LAST_SAFE_PROTOCOL)


@pytest.mark.parametrize("seed", seeds(ZIP))
def test_random_zip_checkpoints_export_every_tensor(ckptfs, tmp_path, seed):
    writer = Writer(f"zip {seed}")
    made = writer.checkpoint()
    path = tmp_path / writer.rng.choice(["model.pt", "pytorch_model.bin", "x.ckpt", "x.pth"])
    read = save_and_read(made.saved, path, writer.rng.randint(2, 5), legacy=False)
    check_export(ckptfs, path, names_of(made.shown(read)), tmp_path / "out.safetensors")


@pytest.mark.parametrize("seed", seeds(LEGACY))
def test_random_legacy_checkpoints_export_every_tensor(ckptfs, tmp_path, seed):
    dtypes = [dtype for dtype in DTYPES if dtype not in UNCLASSED]
    writer = Writer(f"legacy {seed}", dtypes)
    made = writer.checkpoint()
    path = tmp_path / "model.pth"
    read = save_and_read(made.saved, path, writer.rng.randint(2, 5), legacy=True)
    check_export(ckptfs, path, names_of(made.shown(read)), tmp_path / "out.safetensors")


@pytest.mark.parametrize("dtype", UNCLASSED, ids=str)
def test_legacy_types_that_torch_cannot_read_back_export_every_tensor(ckptfs, tmp_path, dtype):
    flat = numbers(random.Random(str(dtype)), dtype, 24)
    saved = {"whole": flat, "part": flat[3:9], "turned": flat.view(4, 6).t()}
    path = tmp_path / "model.pth"
    torch.save(saved, path, _use_new_zipfile_serialization=False)
    with pytest.raises(AttributeError):
        torch.load(path)
    check_export(ckptfs, path, saved, tmp_path / "out.safetensors")


@pytest.mark.parametrize("seed", seeds(SINGLE))
def test_random_safetensors_files_export_every_tensor(ckptfs, tmp_path, seed):
    rng = random.Random(f"safetensors {seed}")
    path = tmp_path / "model.safetensors"
    metadata = rng.choice([None, {"format": "pt"}, {"format": "pt", "lora": '{"r": 8}', "ü": ""}])
    save_file(loose_tensors(rng, rng.randint(1, 12)), path, metadata)
    kept = check_export(ckptfs, path, load_file(path), tmp_path / "out.safetensors")
    assert kept == {**(metadata or {}), "format": "pt"}


def write_shards(rng, directory, stem, ext, write):
    """Writes shards of one spelling, with or without an index. Gives the path to open and the tensors."""
    index, shard = rng.choice(SPELLINGS)
    of = rng.randint(2, 4)
    tensors = list(loose_tensors(rng, rng.randint(of, 12)).items())
    weight_map, expected = {}, {}
    for number in range(of):
        name = shard.format(stem=stem, ext=ext, n=f"{number + 1:05}", of=f"{of:05}")
        part = dict(tensors[number::of])
        expected |= write(part, directory / name)
        weight_map |= dict.fromkeys(part, name)
    if rng.random() < 0.4:
        return directory, expected
    index = directory / index.format(stem=stem, ext=ext)
    index.write_text(json.dumps({"metadata": {"total_size": 0}, "weight_map": weight_map}))
    return rng.choice([directory, index]), expected


@pytest.mark.parametrize("seed", seeds(SHARDED))
def test_random_sharded_safetensors_export_every_tensor(ckptfs, tmp_path, seed):
    def write(part, path):
        save_file(part, path, {"format": "pt"})
        return load_file(path)

    directory = tmp_path / "model"
    directory.mkdir()
    rng = random.Random(f"sharded {seed}")
    source, expected = write_shards(rng, directory, "model", "safetensors", write)
    check_export(ckptfs, source, expected, tmp_path / "out.safetensors")


@pytest.mark.parametrize("seed", seeds(SHARDED_BIN))
def test_random_sharded_pickles_export_every_tensor(ckptfs, tmp_path, seed):
    rng = random.Random(f"sharded bin {seed}")

    def write(part, path):
        legacy = not any(tensor.dtype in UNCLASSED for tensor in part.values())
        return save_and_read(part, path, rng.randint(2, 5), legacy and rng.random() < 0.5)

    directory = tmp_path / "model"
    directory.mkdir()
    source, expected = write_shards(rng, directory, "pytorch_model", "bin", write)
    check_export(ckptfs, source, expected, tmp_path / "out.safetensors")


@pytest.mark.parametrize("named", [True, False], ids=["by-index", "by-directory"])
def test_tensors_that_the_index_does_not_name_are_kept_with_a_note(ckptfs, tmp_path, named):
    directory = tmp_path / "model"
    directory.mkdir()
    first, second = "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"
    a, b, c = torch.ones(2), torch.zeros(3), torch.ones(4)
    save_file({"a": a}, directory / first)
    save_file({"b": b, "unnamed": c}, directory / second)
    index = directory / "model.safetensors.index.json"
    index.write_text(json.dumps({"metadata": {}, "weight_map": {"a": first, "b": second}}))
    source = index if named else directory
    expected = {"a": a, "b": b, "unnamed": c}
    check_export(ckptfs, source, expected, tmp_path / "out.safetensors")
    assert any("unnamed" in note for note in ckptfs.inspect(source)["notes"])


def test_shared_bytes_are_kept_under_every_name_and_reported(ckptfs, tmp_path):
    path = tmp_path / "model.pt"
    table = torch.arange(12.0)
    torch.save({"embed": table, "head": table, "half": table[6:], "own": torch.ones(2)}, path)
    shares = {t["name"]: set(t["shares_with"]) for t in ckptfs.inspect(path)["tensors"]}
    assert shares["embed"] == {"head", "half"}
    assert shares["own"] == set()


def test_layouts_are_reported(ckptfs, tmp_path):
    path = tmp_path / "model.pt"
    table = torch.arange(12.0).view(3, 4)
    torch.save({"whole": table, "turned": table.t(), "repeated": table[0].expand(5, 4)}, path)
    layouts = {t["name"]: t["layout"] for t in ckptfs.inspect(path)["tensors"]}
    assert layouts == {"whole": "run", "turned": "strided", "repeated": "expanded"}
