"""timm loads from a mount what it loads from the original. Where a checkpoint also holds averaged weights, the
trained ones are shown, unless others are asked for."""

import json
from types import SimpleNamespace

import pytest
import timm
import torch
from safetensors.torch import load_file
from timm.models import load_checkpoint, load_state_dict

from models import check_loads_same, check_same, fingerprints, on_show

NAME = "resnet10t"
FEW = {"num_classes": 3}


def make(seed):
    torch.manual_seed(seed)
    model = timm.create_model(NAME, **FEW).eval()
    with torch.no_grad():
        for tensor in model.state_dict().values():
            tensor.add_(torch.rand_like(tensor) if tensor.is_floating_point() else seed)
    return model


@pytest.fixture(scope="module")
def shelf(tmp_path_factory):
    folder = tmp_path_factory.mktemp("timm")
    source = folder / "source"
    trained, averaged = make(1), make(2)
    wrapped = {f"module.{name}": tensor for name, tensor in trained.state_dict().items()}
    results = source / "results"
    results.mkdir(parents=True)
    torch.save(trained.state_dict(), results / "plain.pth")
    torch.save({"epoch": 3, "arch": NAME, "state_dict": wrapped}, results / "wrapped.pth")
    both = {"epoch": 3, "state_dict": trained.state_dict(), "state_dict_ema": averaged.state_dict()}
    torch.save(both | {"optimizer": {"state": {0: torch.ones(3)}}}, results / "both.pth")
    model = source / "model"
    model.mkdir()
    torch.save(trained.state_dict(), model / "pytorch_model.bin")
    config = {"architecture": NAME, "num_classes": 3, "num_features": trained.num_features}
    (model / "config.json").write_text(json.dumps(config))
    with on_show(folder) as mount:
        yield SimpleNamespace(source=source, mount=mount, trained=trained, averaged=averaged)


@pytest.mark.parametrize("name", ["plain", "wrapped"])
def test_create_model_loads_the_trained_weights_from_a_path(shelf, name):
    def load(path):
        return timm.create_model(NAME, checkpoint_path=str(path), **FEW)

    paths = shelf.source / f"results/{name}.pth", shelf.mount / f"results/{name}.safetensors"
    first, _ = check_loads_same(load, *paths)
    check_same(first, shelf.trained)


@pytest.mark.parametrize("name", ["plain", "wrapped"])
def test_load_checkpoint_fills_a_model_with_the_same_weights(shelf, name):
    def load(path):
        model = make(9)
        assert not any(load_checkpoint(model, str(path)))
        return model

    check_loads_same(load, shelf.source / f"results/{name}.pth", shelf.mount / f"results/{name}.safetensors")


def test_a_local_folder_loads_as_pretrained(shelf):
    def load(folder):
        return timm.create_model(f"local-dir:{folder}", pretrained=True)

    first, _ = check_loads_same(load, shelf.source / "model", shelf.mount / "model")
    check_same(first, shelf.trained)


def test_averaged_weights_are_asked_for(ckptfs, shelf, mounts, tmp_path):
    """timm takes the averaged weights of a pickle that has both. A virtual file has one of them: the trained ones,
    and a note says what else there is."""
    trained, averaged = (fingerprints(model.state_dict()) for model in (shelf.trained, shelf.averaged))
    both = shelf.source / "results/both.pth"
    assert fingerprints(load_state_dict(str(both))) == averaged
    assert fingerprints(load_state_dict(str(both), use_ema=False)) == trained
    assert fingerprints(load_state_dict(str(shelf.mount / "results/both.safetensors"))) == trained
    notes = ckptfs.inspect(both)["notes"]
    assert any("--root" in note and "state_dict_ema" in note for note in notes), notes

    asked = mounts(shelf.source, "--root", "state_dict_ema")
    assert fingerprints(load_state_dict(str(asked / "results/both.safetensors"))) == averaged
    # Checkpoints without averaged weights are shown all the same.
    assert fingerprints(load_file(asked / "results/plain.safetensors")) == trained

    kept = mounts(shelf.source, "--keep", "both.pth")
    assert fingerprints(load_state_dict(str(kept / "results/both.pth"))) == averaged
