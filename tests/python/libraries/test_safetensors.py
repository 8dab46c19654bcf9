"""Unchanged programs load from a mount what they would load from the originals."""

import mmap

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load, load_file

from compare import same
from samples import numbers, strided_tensors, write_shards


@pytest.fixture(params=[[], ["--no-passthrough"]], ids=str)
def loaded(mounts, tmp_path, request):
    source = tmp_path / "source"
    expected = {"sharded/model.safetensors": write_shards(source / "sharded", 1, 3, 2, 300)}
    torch.save(strided_tensors(2), source / "strided.pt")
    expected["strided.safetensors"] = strided_tensors(2)
    halves = {"h": numbers(3, 100, 7).half(), "b": numbers(4, 33).bfloat16(), "e": torch.empty(0)}
    torch.save({"state_dict": halves}, source / "halves.ckpt")
    expected["halves.safetensors"] = halves
    state = {"state": {0: {"exp_avg": numbers(5, 1000, 400)}}, "lr": 0.1}
    torch.save(state, source / "optimizer.pt")
    mount = mounts(source, *request.param)
    yield mount, expected, state
    mount.unmount()


def test_safetensors_loads_what_was_saved(loaded):
    mount, expected, _ = loaded
    for name, tensors in expected.items():
        files = [load_file(mount / name), load((mount / name).read_bytes())]
        for file in files:
            assert file.keys() == tensors.keys()
            for key, tensor in tensors.items():
                same(file[key], tensor)
        del file, files


def test_a_slice_has_the_values_of_the_tensor(loaded):
    mount, expected, _ = loaded
    for name, tensors in expected.items():
        with safe_open(mount / name, framework="pt") as file:
            assert file.metadata()["format"] == "pt"
            for key, tensor in tensors.items():
                part = file.get_slice(key)
                assert part.get_shape() == list(tensor.shape)
                if tensor.numel():
                    same(part[1:3], tensor[1:3])
                if tensor.dim() == 2:
                    same(part[:, 2:5], tensor[:, 2:5])
                    same(part[5:60, 3:], tensor[5:60, 3:])


def test_numpy_gets_what_was_saved(loaded):
    mount, expected, _ = loaded
    with safe_open(mount / "sharded/model.safetensors", framework="numpy") as file:
        for key, tensor in expected["sharded/model.safetensors"].items():
            assert (file.get_tensor(key) == tensor.numpy()).all()


def test_torch_load_reads_a_passed_through_file(loaded):
    mount, _, state = loaded
    for mapped in (False, True):
        got = torch.load(mount / "optimizer.pt", mmap=mapped)
        assert got["lr"] == state["lr"]
        same(got["state"][0]["exp_avg"], state["state"][0]["exp_avg"])
        del got


def test_torch_load_reads_a_pickle_only_if_it_is_kept(mounts, tmp_path):
    """The optimizer's pickle is not shown, unless it is kept."""
    source = tmp_path / "source"
    source.mkdir()
    torch.save({"a": numbers(1, 9)}, source / "model.pt")
    mount = mounts(source)
    with pytest.raises(FileNotFoundError):
        torch.load(mount / "model.pt")
    same(load_file(mount / "model.safetensors")["a"], numbers(1, 9))
    same(torch.load(mounts(source, "--keep", "*.pt") / "model.pt")["a"], numbers(1, 9))


def test_a_mapping_is_the_file(ckptfs, loaded, tmp_path):
    mount, expected, _ = loaded
    for n, name in enumerate(expected):
        source = tmp_path / "source" / {0: "sharded", 1: "strided.pt", 2: "halves.ckpt"}[n]
        exported = ckptfs.export(source, tmp_path / f"{n}.safetensors").read_bytes()
        with open(mount / name, "rb") as file:
            with mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ) as mapped:
                assert mapped[:] == exported
            assert file.read() == exported
