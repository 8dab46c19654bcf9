"""A checkpoint written on a big-endian machine is shown with that machine's values.

The archive is made from one of this machine: its byte order record says `big`, and every storage's bytes are swapped.
"""

import random

import pytest
import torch

from compare import check_export
from pickles import turned_round
from writers import DTYPES, numbers

# torch swaps typed storages only. It misreads untyped ones unless an element is one byte; the expected values are
# then those that were saved.
TORCH_READS_WRONG = {torch.uint16, torch.uint32, torch.uint64}


def layouts(dtype):
    flat = numbers(random.Random(str(dtype)), dtype, 60)
    return {
        "whole": flat,
        "part": flat[7:20],
        "stepped": flat[1::3],
        "turned": flat.view(6, 10).t(),
        "repeated": flat[5:8].expand(4, 3),
        "windows": flat.as_strided((8, 5), (3, 1), 2),
        "empty": torch.empty(0, dtype=dtype),
    }


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_type_in_every_layout_is_byte_swapped(ckptfs, tmp_path, dtype):
    saved = layouts(dtype)
    little, path = tmp_path / "little.pt", tmp_path / "big.pt"
    torch.save(saved, little)
    unit = dtype.itemsize // 2 if dtype.is_complex else dtype.itemsize
    turned_round(little, path, unit)
    expected = saved if dtype in TORCH_READS_WRONG else torch.load(path)
    check_export(ckptfs, path, expected, tmp_path / "out.safetensors")


def test_a_swapped_checkpoint_has_a_note(ckptfs, tmp_path):
    little, path = tmp_path / "little.pt", tmp_path / "big.pt"
    torch.save({"a": torch.ones(3)}, little)
    turned_round(little, path, 4)
    report = ckptfs.inspect(path)
    assert [tensor["layout"] for tensor in report["tensors"]] == ["swapped"]
    assert any("big-endian" in note for note in report["notes"])


def test_a_byte_order_that_is_neither_is_refused(ckptfs, tmp_path):
    little, path = tmp_path / "little.pt", tmp_path / "model.pt"
    torch.save({"a": torch.ones(3)}, little)
    turned_round(little, path, 4, order=b"middle")
    outcome = ckptfs("export", path, tmp_path / "out.safetensors")
    assert outcome.code == 3
    assert "model.pt" in outcome.stderr and "byte order" in outcome.stderr
