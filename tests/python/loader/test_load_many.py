"""Several checkpoints loaded together are what they are one by one, with one report, within the process's memory and
open files."""

import os
import subprocess
import sys

import ckptfs
import ckptfs.numpy
import ckptfs.torch
import numpy
import pytest
import torch
from safetensors.torch import save_file

from compare import check_same
from samples import numbers, write_all, write_shards


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    folder = tmp_path_factory.mktemp("source")
    return folder, write_all(folder, 11)


def test_every_kind_together_is_every_kind_by_itself(source, backend):
    folder, (virtual_files, _) = source
    paths = [folder / made_of for made_of in virtual_files.values()]
    together = ckptfs.load_many(paths, backend=backend)
    report = ckptfs.last_report()
    assert len(together) == len(paths)
    bytes_of = 0
    for path, loaded in zip(paths, together, strict=True):
        check_same(loaded, ckptfs.torch.load_file(path, backend="pread"))
        bytes_of += sum(tensor.nbytes for tensor in loaded.values())
    assert report.tensors == sum(map(len, together)) and report.bytes == bytes_of
    if backend == "pread":
        assert report.mapped == 0


def test_names_are_kept_and_options_hold_for_each(source, tmp_path):
    folder, _ = source
    save_file({"up": numbers(1, 9), "down": torch.arange(4)}, tmp_path / "adapter.safetensors")
    given = {"base": folder / "sharded", 7: str(tmp_path / "adapter.safetensors")}
    loaded = ckptfs.load_many(given, dtype="bfloat16", memory=20 << 20, num_threads=2)
    assert list(loaded) == ["base", 7] and sorted(loaded[7]) == ["down", "up"]
    expected = ckptfs.torch.load_file(folder / "sharded")
    check_same(loaded["base"], {name: tensor.bfloat16() for name, tensor in expected.items()})
    assert loaded[7]["down"].dtype == torch.int64 and loaded[7]["up"].dtype == torch.bfloat16
    [only] = ckptfs.load_many([folder / "sharded"], names="layers.1.*")
    assert only and all(name.startswith("layers.1.") for name in only)
    for of in ckptfs.load_many([folder / "sharded"] * 2, names=iter(only)):
        check_same(of, only)
    with pytest.raises(ckptfs.SafetensorError, match="memory"):
        ckptfs.load_many(given, memory=1)


def test_arrays_of_one_file_loaded_twice_share_no_memory(source):
    folder, _ = source
    first, second = ckptfs.load_many([folder / "sharded"] * 2, framework="np")
    expected = ckptfs.numpy.load_file(folder / "sharded")
    for name, array in expected.items():
        assert numpy.array_equal(first[name], array) and numpy.array_equal(second[name], array)
        assert not numpy.shares_memory(first[name], second[name])


def test_a_mounted_file_and_a_missing_name_load_from_what_is_there(source, mounts, tmp_path, backend):
    folder, _ = source
    mount = mounts(folder)
    torch.save({"latent": numbers(3, 8)}, tmp_path / "x.pt")
    paths = [mount / "sharded", tmp_path / "x.safetensors"]
    of_mount, instead = ckptfs.load_many(paths, backend=backend)
    [why] = ckptfs.last_report().fallbacks.items()
    check_same(of_mount, ckptfs.torch.load_file(folder / "sharded"))
    assert torch.equal(instead["latent"], numbers(3, 8))
    assert why == (f"{tmp_path}/x.safetensors is not there: {tmp_path}/x.pt was loaded", 1)


def test_nothing_is_loaded_if_one_cannot_be(source, tmp_path, backend):
    folder, _ = source
    before = ckptfs.stats()["loads"]
    with pytest.raises(FileNotFoundError, match="nothing.safetensors"):
        ckptfs.load_many([folder / "sharded", tmp_path / "nothing.safetensors"], backend=backend)
    (tmp_path / "bad.safetensors").write_bytes(b"\xff" * 100)
    with pytest.raises(ckptfs.SafetensorError, match="bad.safetensors"):
        ckptfs.load_many([folder / "sharded", tmp_path / "bad.safetensors"], backend=backend)
    with pytest.raises(ckptfs.SafetensorError, match="no tensor matches"):
        ckptfs.load_many([folder / "sharded"], names="layers.9.*", backend=backend)
    with pytest.raises(ckptfs.SafetensorError, match="one path was given"):
        ckptfs.load_many(folder / "sharded")
    assert ckptfs.stats()["loads"] == before
    assert ckptfs.load_many([]) == [] and ckptfs.load_many({}) == {}


def test_progress_is_of_all_of_them(source, capsys):
    folder, _ = source
    ckptfs.load_many([folder / "sharded"] * 3, progress=True, backend="pread")
    shown = capsys.readouterr().err
    size = 3 * sum(tensor.nbytes for tensor in ckptfs.torch.load_file(folder / "sharded").values())
    assert "100%" in shown and f"of {size / 1e9:.2f} GB" in shown


MANY = """
import os, resource, sys
import ckptfs, torch
most = len(os.listdir("/proc/self/fd")) + 30
resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
folder, backend = sys.argv[1:]
paths = [f"{folder}/{n}.safetensors" for n in range(300)] + [f"{folder}/set"] * 10
before = len(os.listdir("/proc/self/fd"))
for n, loaded in enumerate(ckptfs.load_many(paths, backend=backend)[:300]):
    assert loaded["x"].tolist() == [n] * 5
assert len(os.listdir("/proc/self/fd")) == before
"""


def test_more_files_load_than_a_process_may_have_open(tmp_path, backend):
    for n in range(300):
        save_file({"x": torch.full((5,), n)}, tmp_path / f"{n}.safetensors")
    write_shards(tmp_path / "set", 5, 6, 1, 10)
    command = [sys.executable, "-c", MANY, str(tmp_path), backend]
    done = subprocess.run(command, capture_output=True, text=True, env=os.environ)
    assert done.returncode == 0, done.stderr
