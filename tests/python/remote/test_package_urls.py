"""Loads from a URL return the same tensors as loads from disk, by every function. Saves to a URL are refused."""

import os

import ckptfs as package
import ckptfs.fastsafetensors
import ckptfs.numpy
import numpy as np
import pytest
import torch
from ckptfs.torch import cached, load_file, load_model, load_sharded, save_file, save_model, save_sharded
from safetensors.torch import load
from safetensors.torch import save_file as save_plain

import cuda_loads
import cuda_stubs
from compare import check_same
from program import FAILED
from ranks import run
from samples import numbers

MODELS = ["sharded", "pickled", "dcp", "zero"]


@pytest.fixture(scope="module")
def small(server, tmp_path_factory):
    """A folder and its URL, with a model that numpy has all types of."""
    folder = tmp_path_factory.mktemp("small")
    save_plain({"weight": numbers(1, 300, 40), "bias": numbers(2, 300)}, folder / "model.safetensors")
    return folder, server.upload(folder, "small-model")


def test_several_urls_load_in_one_plan(store, models):
    folder, url, _ = models
    loaded = package.load_many([f"{url}/{model}" for model in MODELS])
    assert package.last_report().remote > 0
    for model, tensors in zip(MODELS, loaded, strict=True):
        check_same(tensors, load_file(folder / model, backend="pread"))
    # One on this machine beside one in a store.
    both = package.load_many([folder / "sharded", f"{url}/sharded"])
    check_same(*both)


RECIPE = """
[[file]]
path = "small.safetensors"
from = ["model.safetensors"]
rename = [{ match = "(.*)", to = "model.$1" }]
cast = [{ tensors = "*", to = "bfloat16" }]
"""


def test_views_of_a_url_are_those_of_the_files(ckptfs, mounts, store, small, tmp_path):
    folder, url = small
    views = {"rename": [{"match": "(.*)", "to": "model.$1"}], "cast": [{"tensors": "*", "to": "bfloat16"}]}
    expected = load_file(folder, views=views)
    assert {tensor.dtype for tensor in expected.values()} == {torch.bfloat16}
    check_same(load_file(url, views=views), expected)
    steps = ("--rename", "(.*)=model.$1", "--cast", "*=bfloat16")
    check_same(load_file(ckptfs.export(url, tmp_path / "out.safetensors", *steps)), expected)
    (tmp_path / "views.toml").write_text(RECIPE)
    mount = mounts(url, "--views", tmp_path / "views.toml")
    # Directly, and through the mount.
    check_same(load_file(mount / "small.safetensors"), expected)
    check_same(load((mount / "small.safetensors").read_bytes()), expected)


def test_numpy_has_the_same_arrays(store, small):
    folder, url = small
    remote, local = package.numpy.load_file(url), package.numpy.load_file(folder)
    assert remote.keys() == local.keys() and all((remote[name] == local[name]).all() for name in local)
    with package.safe_open(url, framework="np") as opened:
        assert (opened.get_slice("weight")[7:9, 3] == local["weight"][7:9, 3]).all()


def test_fastsafetensors_calls_have_the_same_tensors(store, small):
    folder, url = small
    with package.fastsafetensors.fastsafe_open(f"{url}/model.safetensors") as opened:
        check_same({name: opened.get_tensor(name) for name in opened.keys()}, load_file(folder))


def test_a_model_is_filled(store, small):
    folder, url = small
    model = torch.nn.Linear(40, 300)
    assert load_model(model, url) == (set(), [])
    check_same(model.state_dict(), load_file(folder))
    check_same(load_sharded(url), load_file(folder))
    into = {name: torch.zeros_like(tensor) for name, tensor in load_file(folder).items()}
    load_file(url, into=into)
    check_same(into, load_file(folder))


def test_ranks_load_together(store, models, tmp_path, monkeypatch):
    folder, url, _ = models
    monkeypatch.setenv("CKPTFS_TESTED_URL", f"{url}/sharded")
    expected = load_file(folder / "sharded", backend="pread")
    for got in run(tmp_path, 2, "distributed_ranks", "ckptfs.torch", "from_url"):
        check_same(got["all"], expected)


def test_a_device_gets_the_same_tensors(store, models):
    _, url, _ = models
    report = cuda_stubs.run(cuda_loads.loads, [f"{url}/{model}" for model in MODELS])
    assert report["faults"] == [] and report["sticky"] is None, report


def test_a_file_that_is_there_is_not_made(store, small):
    folder, url = small
    check_same(cached(f"{url}/model.safetensors", lambda: pytest.fail("it was made")), load_file(folder))


def test_nothing_is_written_to_a_url(ckptfs, store, small, tmp_path, monkeypatch):
    folder, _ = small
    monkeypatch.chdir(tmp_path)
    url = "s3://bucket/new/model.safetensors"
    tensors = {"a": torch.ones(3)}
    for write in (
        lambda: save_file(tensors, url), lambda: save_file(tensors, url, any_suffix=True),
        lambda: save_sharded(tensors, "s3://bucket/new"), lambda: package.numpy.save_file({"a": np.ones(3)}, url),
        lambda: save_model(torch.nn.Linear(2, 2), url), lambda: cached(url, lambda: pytest.fail("it was made")),
    ):  # fmt: skip
        with pytest.raises(package.SafetensorError, match=r"s3://bucket/new.* is a URL, and ckptfs writes files on disk only"):
            write()
    refused = ckptfs("export", folder, "s3:/bucket/new/model.safetensors")
    assert refused.code == FAILED and f"aws s3 cp model.safetensors {url}" in refused.stderr, refused
    for other in ("hf://org/name", "https://huggingface.co/org/name", "file:///tmp/x", "abfss://c@a/x"):
        with pytest.raises(package.SafetensorError, match="is a URL"):
            save_sharded(tensors, other)
    for secret in ("https://me:word@127.0.0.1/x", "https://127.0.0.1/x?token=word", "https://127.0.0.1/x?@word"):
        refused = ckptfs("export", folder, secret)
        assert refused.code == FAILED and "writes files on disk only" in refused.stderr and "word" not in refused.stderr, refused
    assert os.listdir(tmp_path) == []
