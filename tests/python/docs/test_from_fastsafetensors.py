"""The code of docs/from-fastsafetensors.md runs as it stands there, in a directory with such files."""

import subprocess
import sys

import pytest
import torch
from safetensors.torch import save_file

from compare import check_same
from guides import blocks, ran
from samples import numbers

ONLY_THE_IMPORT, ANY_CHECKPOINT, METADATA, CASTING, SEVERAL_RANKS = blocks("from-fastsafetensors.md")
FIRST = {"norm.weight": numbers(1, 5), "head.weight": numbers(2, 7, 5)}
SECOND = {"q.weight": numbers(3, 4, 5), "k.weight": numbers(4, 2, 5)}


@pytest.fixture
def folder(tmp_path, monkeypatch):
    (tmp_path / "llama").mkdir()
    for place, part in enumerate((FIRST, SECOND), 1):
        save_file(part, tmp_path / f"llama/model-{place:05}-of-00002.safetensors")
    torch.save({"lora": torch.ones(3)}, tmp_path / "adapter_model.bin")
    averaged = {"head.weight": torch.zeros(2)}
    torch.save({"state_dict": {"head.weight": torch.ones(2)}, "ema": averaged}, tmp_path / "last.ckpt")
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_only_the_import_changes(folder):
    check_same(ran(ONLY_THE_IMPORT)["tensors"], FIRST | SECOND)
    theirs = ONLY_THE_IMPORT.replace("from ckptfs.fastsafetensors", "from fastsafetensors")
    assert theirs != ONLY_THE_IMPORT
    check_same(ran(theirs)["tensors"], FIRST | SECOND)


def test_any_checkpoint_loads(folder):
    made = ran(ANY_CHECKPOINT)
    check_same(made["tensors"], FIRST | SECOND | {"lora": torch.ones(3)})
    assert made["averaged"].tolist() == [0, 0]


def test_metadata_has_shapes_and_byte_ranges(folder):
    made = ran(METADATA)
    [[start, end]] = made["ranges"]
    assert made["shapes"] == {"lora": [3]} and (start, end) == (made["metadata"].header_length, start + 12)
    assert made["rows"].shape == [2] and made["rows"].offsets == [1]


def test_tensors_are_cast_while_loading_and_after(folder):
    made = ran(CASTING)
    assert torch.equal(made["halves"].get_tensor("q.weight"), SECOND["q.weight"].half())
    assert torch.equal(made["single"], FIRST["head.weight"].bfloat16())


def test_several_ranks_get_their_parts(folder):
    (folder / "load.py").write_text(SEVERAL_RANKS)
    # One output file for each rank, because a shared pipe would mix them.
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    done = subprocess.run(
        [*torchrun, "--log-dir", folder / "logs", "--redirects", "1", "load.py"],
        capture_output=True, text=True, timeout=300,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    size = "torch.Size"
    for rank, rows in enumerate((4, 3)):
        [log] = folder.glob(f"logs/*/attempt_0/{rank}/stdout.log")
        shapes = f"{size}([5]) {size}([{rows}, 5]) {size}([3, 5]) {size}([2, 5])"
        assert log.read_text() == f"{rank} {shapes} {rank == 0}\n"
