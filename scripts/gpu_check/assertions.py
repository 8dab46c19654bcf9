"""What every check is written with: its context, its registration in `CHECKS`, and comparisons."""

from dataclasses import dataclass
from pathlib import Path

import torch

from compare import check_same

CHECKS = {}


class Skipped(Exception):
    """A check that says nothing here; its words are the reason."""


@dataclass
class CheckContext:
    """The device and the folder of a check."""

    device: str
    folder: Path
    quick: bool

    @property
    def is_gpu(self):
        return self.device != "cpu"

    @property
    def repeats(self):
        return 2 if self.quick else 5


def check(name):
    """Registers a check, which raises where something is wrong, and may return words for the table."""

    def register(function):
        CHECKS[name] = function
        return function

    return register


def assert_same(actual, expected, device):
    """Asserts that tensors by name are on the device, and bit for bit those that were expected."""
    devices = {name: tensor.device for name, tensor in actual.items()}
    wrong_devices = {name: str(found) for name, found in devices.items() if found != torch.device(device)}
    assert not wrong_devices, f"not on {device}: {wrong_devices}"
    check_same({name: tensor.cpu() for name, tensor in actual.items()}, expected)
