"""A store with checkpoints of every kind."""

import warnings

import pytest
import torch
import torch.distributed.checkpoint as dcp

import store_kinds
import stores
from samples import write_shards
from stores import Moto
from zero import Run

if stores.MOTO is None:
    warnings.warn(stores.MISSING, stacklevel=1)
    collect_ignore_glob = ["test_*.py"]

for kind in store_kinds.KINDS:
    if not store_kinds.is_installed(kind):
        warnings.warn(f"NOT TESTED: the store {kind}; `. scripts/setup.sh` installs it", stacklevel=1)


@pytest.fixture(scope="session")
def server():
    store = Moto()
    yield store
    store.end()


@pytest.fixture
def store(server, monkeypatch):
    """The store without faults, and an environment in which it is found."""
    server.fault()
    for name, value in server.environment.items():
        monkeypatch.setenv(name, value)
    # What is read must come from the server. Tests of the cache have one of their own.
    monkeypatch.setenv("CKPTFS_NO_CACHE", "1")
    yield server
    server.fault()


def write_models(folder):
    """Checkpoints of each kind, and the folder of each."""
    write_shards(folder / "sharded", 1, 3, 4, 900)
    (folder / "pickled").mkdir()
    tensors = {"a": torch.arange(300_000.0), "t": torch.arange(60_000).reshape(200, 300).t(), "b": torch.ones(3).bfloat16()}
    torch.save(tensors, folder / "pickled/pytorch_model.bin")
    torch.save({"w": torch.randn(40, 30)}, folder / "pickled/optimizer.pt")
    state = {"model": {f"layer.{n}": torch.randn(64, 33) for n in range(12)}}
    dcp.save(state, checkpoint_id=str(folder / "dcp"), no_dist=True)
    run = Run(7, stage=3, world=2)
    run.write(folder / "zero/global_step7")
    (folder / "zero/latest").write_text("global_step7")
    return ["sharded", "pickled", "dcp", "zero"]


@pytest.fixture(scope="session")
def models(server, tmp_path_factory):
    """The folder on disk, its URL, and the names in it."""
    folder = tmp_path_factory.mktemp("models")
    kinds = write_models(folder)
    return folder, server.upload(folder, "models"), kinds
