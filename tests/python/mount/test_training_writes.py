"""Training writes into a mounted source. Each checkpoint is read whole or not at all while checkpoints appear, rotate
and are deleted. Training goes on from the mount as from the original."""

import errno
import shutil
import threading
from functools import partial

import pytest
import torch
from safetensors.torch import load, load_file
from transformers import Trainer, TrainerCallback, TrainingArguments

import models
from models import check_same, fingerprints, listening
from mounts import until

STEPS = 8

# Errors that a reader may get. The checkpoint is not there yet, or gone; or, where it was removed twice during an open,
# that it must look again.
GONE = {errno.ENOENT, errno.ESTALE}

# So many that readers meet checkpoints in every state of being written and deleted.
MANY = 40


def trainer(output, steps=STEPS, **more):
    """A tiny trainer with everything that must be restored to go on: momenta, a schedule, dropout."""
    torch.manual_seed(1)
    numbers = torch.randint(3, 100, (32, 12))
    model = models.gpt2()
    # As large models are saved: in shards.
    model.save_pretrained = partial(model.save_pretrained, max_shard_size=20_000)
    arguments = TrainingArguments(
        output_dir=str(output), max_steps=steps, per_device_train_batch_size=4, learning_rate=0.01,
        warmup_steps=2, save_steps=1, use_cpu=True, report_to=[], logging_strategy="no", disable_tqdm=True,
        **more,
    )  # fmt: skip
    rows = [{"input_ids": row, "labels": row} for row in numbers]
    return Trainer(model=model, args=arguments, train_dataset=rows)


class Watcher(TrainerCallback):
    """Records the expected tensors of each checkpoint before it is written, and waits until the mount shows it."""

    def __init__(self, source, point):
        self.source, self.point, self.expected = source, point, {}

    def on_step_end(self, args, state, control, model, **_):
        self.expected[f"checkpoint-{state.global_step}"] = of_saved(model.state_dict())

    def on_save(self, args, state, control, **_):
        name = f"checkpoint-{state.global_step}"
        until(f"{name} is there", lambda: names(self.point) == names(self.source))
        virtual_file = self.point / name / "model.safetensors"
        until(f"{name} is whole", virtual_file.exists)
        assert fingerprints(load_file(virtual_file)) == self.expected[name]
        assert not list(virtual_file.parent.glob("model-*"))


def names(folder):
    return sorted(path.name for path in folder.iterdir())


def of_saved(state):
    """One name of a tied tensor is saved."""
    return {name: found for name, found in fingerprints(state).items() if name != "lm_head.weight"}


class Reader(threading.Thread):
    """Reads every checkpoint that it finds, over and over."""

    def __init__(self, point, expected):
        super().__init__()
        self.point, self.expected = point, expected
        self.ended, self.right, self.wrong, self.faults = threading.Event(), [], [], []

    def run(self):
        while not self.ended.is_set():
            try:
                found = sorted(self.point.iterdir())
            except OSError as fault:
                self.faults.append(fault)
                continue
            for folder in found:
                self.look(folder)

    def look(self, folder):
        try:
            tensors = fingerprints(load((folder / "model.safetensors").read_bytes()))
        except Exception as fault:
            self.faults.append(fault)
            return
        is_right = tensors == self.expected.get(folder.name)
        (self.right if is_right else self.wrong).append(folder.name)


def saving_while_read(save, readers):
    """Saves a model, the first file of a checkpoint, and saves the rest after each reader has read one meanwhile."""

    def save_and_wait(*arguments, **more):
        save(*arguments, **more)
        before = [len(reader.right) for reader in readers]

        def have_read():
            return all(len(reader.right) > n for reader, n in zip(readers, before, strict=True))

        until("each reader has read a checkpoint", have_read)

    return save_and_wait


def test_a_checkpoint_is_read_whole_while_training_writes(mounts, tmp_path):
    source = tmp_path / "source"
    source.mkdir()
    point = mounts(source).point
    watcher = Watcher(source, point)
    training = trainer(source, MANY, save_total_limit=2)
    training.add_callback(watcher)
    readers = [Reader(point, watcher.expected) for _ in range(2)]
    training.model.save_pretrained = saving_while_read(training.model.save_pretrained, readers)
    for reader in readers:
        reader.start()
    try:
        training.train()
    finally:
        for reader in readers:
            reader.ended.set()
            reader.join()
    assert len(watcher.expected) == MANY
    assert names(point) == [f"checkpoint-{n}" for n in (MANY - 1, MANY)]
    for reader in readers:
        assert len(reader.right) >= MANY
        assert not reader.wrong
        assert {getattr(fault, "errno", fault) for fault in reader.faults} <= GONE


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    folder = tmp_path_factory.mktemp("trained") / "source"
    training = trainer(folder)
    training.train()
    # A checkpoint as older releases wrote it.
    pickled = folder / "pickled" / "checkpoint-3"
    shutil.copytree(folder / "checkpoint-3", pickled)
    (pickled / "model.safetensors.index.json").unlink()
    state = {}
    for shard in list(pickled.glob("*.safetensors")):
        state |= load_file(shard)
        shard.unlink()
    torch.save(state, pickled / "pytorch_model.bin")
    return folder, training.model


@pytest.mark.parametrize("where", ["checkpoint-3", "pickled/checkpoint-3"])
def test_training_goes_on_from_the_mount(trained, mounts, tmp_path, where):
    folder, whole = trained
    point = mounts(folder).point
    state = {name for name in names(folder / where) if not name.startswith(("model", "pytorch"))}
    assert {"optimizer.pt", "scheduler.pt", "rng_state.pth", "trainer_state.json"} <= state
    assert set(names(point / where)) == state | {"model.safetensors"}
    ends, heard = [], []
    for n, root in enumerate((folder, point)):
        training = trainer(tmp_path / str(n))
        with listening() as said:
            training.train(resume_from_checkpoint=str(root / where))
        assert training.state.global_step == STEPS
        ends.append(training.model)
        heard.append(set(said))
    check_same(ends[1], ends[0])
    # Nothing was lost: the end is that of training without a break.
    check_same(ends[0], whole)
    assert heard[1] <= heard[0]
