"""What every check is written with.

In: where it may write, and the device. Out: `CHECKS`, all of them by their names, and what compares.
"""

from dataclasses import dataclass
from pathlib import Path

import torch

from compare import check_same

CHECKS = {}


class Skipped(Exception):
    """It says nothing here, and why."""


@dataclass
class Place:
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
    """A check of a name: it raises where something is wrong, and may give words for the table."""

    def keep(function):
        CHECKS[name] = function
        return function

    return keep


def same(got, expected, device):
    """Tensors by their names are on the device, and bit for bit those that were expected."""
    elsewhere = {name: str(tensor.device) for name, tensor in got.items() if tensor.device != torch.device(device)}
    assert not elsewhere, f"not on {device}: {elsewhere}"
    check_same({name: tensor.cpu() for name, tensor in got.items()}, expected)
