"""Lightning checkpoints are shown as their state dict, under the trainer's names. With `--keep` they stay as they are,
and training goes on from them."""

from types import SimpleNamespace

import lightning
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from safetensors.torch import load_file
from torch import nn

from models import check_same, fingerprints, on_show


class Net(lightning.LightningModule):
    def __init__(self, width=16, name="net"):
        super().__init__()
        self.save_hyperparameters()
        self.body = nn.Sequential(nn.Linear(8, width), nn.BatchNorm1d(width), nn.Linear(width, 2))
        self.tied = self.body[0].weight
        self.register_buffer("seen", torch.zeros((), dtype=torch.int64))

    def training_step(self, batch, _):
        self.seen += len(batch)
        return self.body(batch).square().mean()

    def configure_optimizers(self):
        optimizer = torch.optim.AdamW(self.parameters(), lr=0.01)
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 1)]


def train(folder, epochs, resume=None, **more):
    torch.manual_seed(0)
    data = torch.utils.data.DataLoader(torch.randn(16, 8), batch_size=4)
    trainer = lightning.Trainer(
        default_root_dir=folder, max_epochs=epochs, accelerator="cpu", logger=False,
        enable_progress_bar=False, enable_model_summary=False, callbacks=[ModelCheckpoint(**more)],
    )  # fmt: skip
    model = Net()
    trainer.fit(model, data, ckpt_path=resume)
    return model


@pytest.fixture(scope="module")
def shelf(tmp_path_factory):
    folder = tmp_path_factory.mktemp("lightning")
    source = folder / "source"
    train(source / "every", 2, save_top_k=-1, save_last=True)
    train(source / "linked", 2, save_top_k=-1, save_last="link")
    train(source / "light", 1, save_weights_only=True)
    with on_show(folder) as mount:
        yield SimpleNamespace(source=source, mount=mount)


CHECKPOINTS = {
    "every": ["epoch=0-step=4", "epoch=1-step=8", "last"],
    "linked": ["epoch=0-step=4", "epoch=1-step=8", "last"],
    "light": ["epoch=0-step=4"],
}


@pytest.mark.parametrize("run", CHECKPOINTS)
def test_state_dicts_are_shown(shelf, run):
    originals = {file.stem for file in (shelf.source / run / "checkpoints").glob("*.ckpt")}
    assert originals == set(CHECKPOINTS[run])
    shown = sorted(file.name for file in (shelf.mount / run / "checkpoints").iterdir())
    assert shown == sorted(f"{name}.safetensors" for name in originals)
    for name in originals:
        path = shelf.source / run / "checkpoints" / f"{name}.ckpt"
        state = torch.load(path, weights_only=False)["state_dict"]
        tensors = load_file(shelf.mount / run / "checkpoints" / f"{name}.safetensors")
        assert fingerprints(tensors) == fingerprints(state)
        model = Net()
        model.load_state_dict(tensors, strict=True)
        check_same(model, Net.load_from_checkpoint(path))


def test_training_resumes_from_kept_checkpoints(shelf, mounts, tmp_path):
    """lightning itself reads nothing but its own files."""
    kept = mounts(shelf.source, "--keep", "*.ckpt")
    name = "every/checkpoints/epoch=0-step=4.ckpt"
    check_same(Net.load_from_checkpoint(kept / name), Net.load_from_checkpoint(shelf.source / name))
    resumed = [
        train(tmp_path / str(n), 3, resume=root / name) for n, root in enumerate((shelf.source, kept.point))
    ]
    check_same(*resumed)
