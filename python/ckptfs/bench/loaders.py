"""What `ckptfs bench` loads with: our ways, and libraries that others load with today.

In: the format of a checkpoint, and the words of `--against`. Out: the loaders that can be asked for it, by
name. Each of them imports what it needs and gives what loads: what was asked in, tensors by name out. What
must stay alive for the tensors it keeps in `_kept`.
"""

import importlib.util
from collections import deque
from typing import NamedTuple

from ckptfs._errors import error

OURS = ["ckptfs owned", "ckptfs mapped"]

# These read the one file that a mount shows, with safetensors as it is.
MOUNTED = ["mount owned", "mount mapped"]

_kept = []


class Peer(NamedTuple):
    """A word of `--against`: its module, what pip calls it, which formats it reads, and its loaders."""

    module: str
    package: str
    reads: str
    loaders: list
    on_cuda: list = []


PEERS = {
    "safetensors": Peer("safetensors", "safetensors", "safetensors", ["safetensors owned", "safetensors"]),
    "fastsafetensors": Peer(
        "fastsafetensors", "fastsafetensors", "safetensors", ["fastsafetensors"], ["fastsafetensors nogds"]
    ),
    "runai": Peer("runai_model_streamer", "runai-model-streamer", "safetensors", ["runai"]),
    "instanttensor": Peer("instanttensor", "instanttensor", "safetensors", ["instanttensor"]),
    "torch": Peer("torch", "torch", "torch", ["torch.load", "torch.load mapped"]),
}

# What others are compared with: the first of these that loads the checkpoint.
REFERENCES = ["safetensors", "torch.load"]


def chosen(words, form, device):
    """The names of the others to load with, and notes. `words` of `--against`, or `None` for all that are
    installed and read `form`, which is "safetensors" or "torch"."""
    loaders, notes = [], []
    for word in words or PEERS:
        peer = PEERS[word]
        if not is_installed(peer.module):
            if words:
                raise error(f"--against {word}: it is not installed", f"pip install {peer.package}")
        elif peer.reads == form:
            loaders += peer.loaders + (peer.on_cuda if device.startswith("cuda") else [])
        elif words:
            notes.append(f"{word} does not read {form} checkpoints, and was not asked to")
    return loaders, notes


def is_installed(module):
    return importlib.util.find_spec(module) is not None


def _ckptfs(backend):
    from ckptfs.torch import load_file

    return lambda asked: load_file(asked["path"], device=asked["device"], backend=backend)


def _safetensors(**how):
    import inspect

    from safetensors import __version__
    from safetensors.torch import load_file

    if how and "backend" not in inspect.signature(load_file).parameters:
        raise RuntimeError(f"safetensors {__version__} has no backend=, which came with 0.8")

    def load(asked):
        return _together(load_file(path, device=asked["device"], **how) for path in asked["files"])

    return load


def _fastsafetensors(nogds):
    from fastsafetensors import SafeTensorsFileLoader, SingleGroup

    def load(asked):
        # On the host there is no GPUDirect Storage to go without.
        plainly = nogds or asked["device"] == "cpu"
        loader = SafeTensorsFileLoader(SingleGroup(), asked["device"], nogds=plainly)
        loader.add_filenames({0: asked["files"]})
        buffer = loader.copy_files_to_device()
        _kept.append((loader, buffer))
        return {name: buffer.get_tensor(name) for name in loader.get_keys()}

    return load


def _runai():
    from runai_model_streamer import SafetensorsStreamer

    def load(asked):
        streamer = SafetensorsStreamer()
        _kept.append(streamer)
        streamer.__enter__()
        streamer.stream_files(asked["files"], device=asked["device"])
        return dict(streamer.get_tensors())

    return load


def _instanttensor():
    from instanttensor import safe_open

    def load(asked):
        with safe_open(asked["files"], framework="pt", device=asked["device"]) as file:
            return dict(file.tensors())

    return load


def _torch(**how):
    import torch

    def load(asked):
        parts = [
            torch.load(path, map_location=asked["device"], weights_only=True, **how)
            for path in asked["files"]
        ]
        return _together(parts) if len(parts) > 1 else _holding(parts[0], asked["names"])

    return load


def _together(parts):
    return {name: tensor for part in parts for name, tensor in part.items()}


def _holding(value, names):
    """The dictionary of a training checkpoint that has these tensors."""
    import torch

    inside = deque([value])
    while inside:
        found = inside.popleft()
        if isinstance(found, dict):
            if all(isinstance(found.get(name), torch.Tensor) for name in names):
                return {name: found[name] for name in names}
            inside.extend(found.values())
    raise ValueError("no dictionary in it has the tensors that ckptfs shows")


LOADERS = {
    "ckptfs owned": lambda: _ckptfs("pread"),
    "ckptfs mapped": lambda: _ckptfs("mmap"),
    "mount owned": lambda: _safetensors(backend="pread"),
    "mount mapped": _safetensors,
    "safetensors owned": lambda: _safetensors(backend="pread"),
    "safetensors": _safetensors,
    "fastsafetensors": lambda: _fastsafetensors(nogds=False),
    "fastsafetensors nogds": lambda: _fastsafetensors(nogds=True),
    "runai": _runai,
    "instanttensor": _instanttensor,
    "torch.load": _torch,
    "torch.load mapped": lambda: _torch(mmap=True),
}
