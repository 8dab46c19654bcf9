"""What every check is written with: its place, its registration in `CHECKS`, and comparisons."""

from dataclasses import dataclass
from pathlib import Path

import torch

from compare import check_same

CHECKS = {}


class Skipped(Exception):
    """A check that says nothing here; its words are the reason."""


@dataclass
class Place:
    """The device and the folder of a check."""

    device: str
    folder: Path
    quick: bool

    @property
    def is_gpu(self):
        return self.device != "cpu"

    @property
    def times(self):
        return 2 if self.quick else 5


def check(name):
    """Registers a check, which raises where something is wrong, and may return words for the table."""

    def keep(function):
        CHECKS[name] = function
        return function

    return keep


def same(got, expected, device):
    """Asserts that tensors by name are on the device, and bit for bit those that were expected."""
    elsewhere = {name: str(tensor.device) for name, tensor in got.items() if tensor.device != torch.device(device)}
    assert not elsewhere, f"not on {device}: {elsewhere}"
    check_same({name: tensor.cpu() for name, tensor in got.items()}, expected)
