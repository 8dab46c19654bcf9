"""What the kernel reads by itself: files shown unchanged, and virtual files that have one source file's bytes."""

import json
import os
import platform

import pytest
import torch
from safetensors.torch import load_file, save_file

from mounts import until
from page_cache import cached_bytes, evict
from samples import numbers, write_shards

MIB = 1 << 20

NAME = "model.safetensors"

KERNEL = tuple(map(int, platform.release().split("-")[0].split(".")[:2]))
pytestmark = pytest.mark.skipif(KERNEL < (6, 9), reason="passthrough needs Linux 6.9")

UNCHANGED_VIEW = f"""
[[file]]
path = "view/{NAME}"
from = ["lone"]
beside = ["config.json"]
"""

RENAMED_VIEW = UNCHANGED_VIEW + "rename = [{ match = '^layers', to = 'blocks' }]\n"


@pytest.fixture
def models(tmp_path):
    """A model in one shard with an index, and one in a file that is shown unchanged."""
    folder = tmp_path / "models"
    write_shards(folder / "lone", 1, 1, 4, 512)
    (folder / "plain").mkdir()
    save_file({"w": numbers(2, 1024, 1024)}, folder / "plain" / NAME, metadata={"format": "pt"})
    return folder


def shard(models):
    return models / "lone/model-00001-of-00001.safetensors"


def read_by_daemon(mount, path):
    """The bytes of a mounted file, and how many of them the daemon served."""
    before = mount.stats()["bytes_served"]
    content = (mount / path).read_bytes()
    return content, mount.stats()["bytes_served"] - before


def test_the_kernel_reads_what_has_one_source_files_bytes(mounts, models, tmp_path):
    recipe = tmp_path / "views.toml"
    recipe.write_text(UNCHANGED_VIEW)
    mount = mounts(models, "--views", recipe)
    assert mount.stats()["passthrough"] is True
    sources = {f"lone/{NAME}": shard(models), f"view/{NAME}": shard(models), f"plain/{NAME}": models / "plain" / NAME}
    for path, source in sources.items():
        evict([source])
        content, served = read_by_daemon(mount, path)
        assert (content, served) == (source.read_bytes(), 0), path
        # A mapping has the pages of the source: there is no second copy.
        assert cached_bytes([source]) == cached_bytes([mount / path]) >= source.stat().st_size, path
        assert load_file(mount / path).keys() == load_file(source).keys(), path
    assert mount.stats()["bytes_served"] == 0


def test_without_passthrough_the_daemon_serves_the_same_bytes(mounts, models):
    mount = mounts(models, "--no-passthrough")
    content, served = read_by_daemon(mount, f"lone/{NAME}")
    assert content == shard(models).read_bytes() and served >= len(content)
    with open(mount / f"lone/{NAME}", "rb") as file:
        with open(shard(models), "r+b") as source:
            source.seek(-8, os.SEEK_END)
            source.write(b"changed!")
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        with pytest.raises(OSError):
            file.read()


def test_a_file_whose_bytes_differ_in_anything_is_served_by_the_daemon(mounts, models, tmp_path):
    recipe = tmp_path / "views.toml"
    recipe.write_text(RENAMED_VIEW)
    state = load_file(shard(models))

    def write(name, metadata):
        (models / name).mkdir()
        save_file(state, models / name / "model-00001-of-00001.safetensors", metadata=metadata)
        index = {"metadata": {}, "weight_map": dict.fromkeys(state, "model-00001-of-00001.safetensors")}
        (models / name / "model.safetensors.index.json").write_text(json.dumps(index))

    write("without-format", {"other": "metadata"})
    mount = mounts(models, "--views", recipe)
    for path in (f"view/{NAME}", f"without-format/{NAME}"):
        content, served = read_by_daemon(mount, path)
        assert served >= len(content) > sum(tensor.nbytes for tensor in state.values()), path
    assert load_file(mount / f"view/{NAME}").keys() == {name.replace("layers", "blocks") for name in state}


def test_a_replaced_source_shows_at_the_next_open_and_open_files_stay_what_they_were(mounts, models, tmp_path):
    mount = mounts(models)
    before = shard(models).read_bytes()
    state = {name: tensor + 1 for name, tensor in load_file(shard(models)).items()}
    new = tmp_path / "new.safetensors"
    save_file(state, new, metadata={"format": "pt"})
    with open(mount / f"lone/{NAME}", "rb") as file:
        assert file.read(MIB) == before[:MIB]
        os.rename(new, shard(models))
        until("the new file shows", lambda: (mount / f"lone/{NAME}").read_bytes() == shard(models).read_bytes())
        assert file.read() == before[MIB:]
    for name, tensor in load_file(mount / f"lone/{NAME}").items():
        assert torch.equal(tensor, state[name])
    assert mount.stats()["bytes_served"] == 0


def test_a_shard_that_its_index_does_not_fit_is_refused(mounts, models):
    index = models / "lone/model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {"absent": "model-00001-of-00001.safetensors"}}))
    mount = mounts(models)
    assert not (mount / f"lone/{NAME}").exists()
    assert (mount / "lone/model-00001-of-00001.safetensors").exists()
